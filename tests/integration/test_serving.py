"""`leeway serve` as a command: it serves, streams, takes feedback, and leaves nothing behind when it is interrupted."""

from __future__ import annotations

import json
import signal
import string
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ANY_ENGINE, DIGITS_LAST, Started, left_by, temporary_folder


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
        except OSError as error:  # it has ended
            return 0, str(error)


@pytest.mark.timeout(900)
def test_a_model_is_served_until_it_is_interrupted_and_nothing_is_left(
    untrained: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_TOKENS", ",".join(TOKENS.values()))
    overrides = ["serve.port=0", "serve.token_variable=SERVE_TOKENS"]
    overrides += [ANY_ENGINE, "rollout.num_generators=2", "cluster.device=cpu", "model.dtype=float32"]
    overrides += ["rollout.max_model_len=64", "rollout.max_prompt_tokens=40", "rollout.max_response_tokens=12"]
    overrides += ["cluster.kv_cache_gib=0.1", "cluster.object_store_mb=100"]
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
        assert other.ask("/v1/feedback", {"id": f"{answer['id']}/0", "reward": 1.0})[0] == 404
        status, refusal = one.ask("/v1/commit", {"ids": [answer["id"]], "task_id": "sum"})
        assert (status, "nothing is trained here" in refusal) == (409, True), refusal
        command.process.send_signal(signal.SIGINT)
        run = command.wait(300)
    finally:
        command.end()
    assert run.code == 130, run.output
    assert run.last_line() == "leeway: interrupted by SIGINT", run.output
    assert not any(token in run.output for token in TOKENS.values())
    assert left_by(command, temporary) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_train_job_takes_its_steps_from_http_clients_alone(
    start: Any, of_sums: list[str], from_untrained: list[str], tmp_path: Path
) -> None:
    """The client rewards digits in an answer, and no task of the run: that is what is learned."""
    settings = [*of_sums, *from_untrained, *DIGITS_LAST, ANY_ENGINE, "train.steps=6", "train.groups_per_step=4"]
    settings += ["explorer.silent_s=6"]  # how long it waits for somebody who could evaluate
    train = start("train", *[s.replace("stages.async_rl.", "") for s in settings], "algorithm.group_size=4")
    train.wait_for("explorers are met", 600)
    serve = Started(["serve", str(train.run_dir), "serve.port=0"], cwd=tmp_path, run_dir=train.run_dir)
    try:
        serve.wait_for("end it with Ctrl-C", 600)
        url = next(word for word in serve.output().split() if word.startswith("http://")).rstrip(",")
        token = serve.output().partition("token: ")[2].split()[0]
        client, statuses = Client(url.removesuffix("/v1"), token), list[int]()
        deadline = time.monotonic() + 600
        while train.process.poll() is None and time.monotonic() < deadline:
            status, text = client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "3"}], "n": 4})
            if status != 200:
                break
            answer = json.loads(text)
            for choice in answer["choices"]:
                reward = float(any(digit in choice["message"]["content"] for digit in string.digits))
                client.ask("/v1/feedback", {"id": f"{answer['id']}/{choice['index']}", "reward": reward})
            statuses.append(client.ask("/v1/commit", {"ids": [answer["id"]], "task_id": "digits"})[0])
        run = train.wait(600)
        assert run.code == 0, run.output
        assert statuses.count(200) >= 6 * 4
        assert {*statuses} <= {200, 409, 429, 503, 0}
        assert serve.wait(600).code == 0, serve.output()
        assert max(run.series("train/policy_lag/max")) <= run.lag_bound
        assert run.series("explorers/serve/groups")[-1] >= 6 * 4
    finally:
        serve.end()
    assert not [*serve.left_over(60), *train.left_over(60)]
