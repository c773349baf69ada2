"""`leeway serve` as a command: it serves, streams, takes groups, and leaves nothing behind when it is interrupted."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leeway.serving.group_folder import committed_groups

from .conftest import ANY_ENGINE, Started, left_by, temporary_folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with temporary_folder() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        yield folder


TOKENS = {"a": "a-token-of-the-first-client", "b": "b-token-of-another-client"}


class Client:
    def __init__(self, url: str, token: str) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=200) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.mark.timeout(900)
def test_a_model_is_served_until_it_is_interrupted_and_nothing_is_left(
    untrained: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_TOKENS", ",".join(TOKENS.values()))
    overrides = ["serve.port=0", "serve.token_variable=SERVE_TOKENS", f"serve.groups={tmp_path}/groups"]
    overrides += [ANY_ENGINE, "rollout.num_generators=2", "cluster.device=cpu", "model.dtype=float32"]
    overrides += ["rollout.max_model_len=64", "rollout.max_prompt_tokens=40", "rollout.max_response_tokens=12"]
    overrides += ["algorithm.group_size=4", "cluster.kv_cache_gib=0.1", "cluster.object_store_mb=100"]
    command = Started(["serve", str(untrained), *overrides], cwd=tmp_path, run_dir=tmp_path)
    try:
        command.wait_for("end it with Ctrl-C", 400)
        url = next(word for word in command.output().split() if word.startswith("http://")).rstrip(",")
        url = url.removesuffix("/v1")
        one, other, stranger = (Client(url, token) for token in (*TOKENS.values(), "a-token-that-nobody-has"))
        status, health = stranger.ask("/health")
        assert (status, [e["up"] for e in json.loads(health)["engines"]]) == (200, [True, True])
        assert stranger.ask("/v1/models")[0] == 401
        chat = {"messages": [{"role": "user", "content": "12 + 34 ="}], "max_tokens": 12, "n": 4}
        status, text = one.ask("/v1/chat/completions", chat)
        assert status == 200, text
        answer = json.loads(text)
        status, stream = one.ask("/v1/chat/completions", {**chat, "stream": True})
        events = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n")[:-2]]
        assert stream.endswith("data: [DONE]\n\n")
        assert {e["choices"][0]["index"] for e in events} == {0, 1, 2, 3}
        for i in range(4):
            assert one.ask("/v1/feedback", {"id": f"{answer['id']}/{i}", "reward": float(i == 2)})[0] == 200
        assert other.ask("/v1/commit", {"ids": [answer["id"]]})[0] == 404
        status, committed = one.ask("/v1/commit", {"ids": [answer["id"]], "task_id": "sum"})
        assert status == 200, committed
        (group,) = committed_groups(tmp_path / "groups")
        assert (group.task_id, group.rewards, group.policy_versions()) == ("sum", [0.0, 0.0, 1.0, 0.0], (0, 0))
        command.process.send_signal(signal.SIGINT)
        run = command.wait(300)
    finally:
        command.end()
    assert run.code == 130, run.output
    assert run.last_line() == "leeway: interrupted by SIGINT", run.output
    assert not any(token in run.output for token in TOKENS.values())
    assert left_by(command, temporary) == []
