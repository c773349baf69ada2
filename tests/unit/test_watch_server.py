"""The page's server: who may ask, what it answers, and what it says of a run that lives, is finished, or died."""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from starlette.testclient import TestClient

from leeway.cli.watch import has_autogroups
from leeway.config import ConfigError
from leeway.watch.folder import RunFolder
from leeway.watch.serve import watch
from leeway.watch.server import FILES, HEADERS, _Feed, build_app
from leeway.watch.watcher import Watcher

from ..watched_run import append_lines, make_run

AT = {"run": 0, "stage": "async_rl"}
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "made")


@pytest.fixture
def client(run: Path, tmp_path: Path) -> Iterator[TestClient]:
    watcher = read(run, tmp_path)
    app = build_app(watcher, token=None, hosts=LOCAL)
    with TestClient(app, base_url="http://127.0.0.1:80") as client:
        yield client
    watcher.close()


def read(run: Path, tmp_path: Path) -> Watcher:
    watcher = Watcher([RunFolder(run)], tmp_path / "cache")
    while watcher.look():
        pass
    return watcher


def overview(run: Path, tmp_path: Path) -> dict[str, Any]:
    watcher = read(run, tmp_path)
    found = watcher.overview()[0]
    watcher.close()
    return found


def test_odd_files_of_a_run_do_not_end_its_page(run: Path, tmp_path: Path) -> None:
    (run / "run.json").write_text('{"parts": 5}')
    (run / "summary.json").write_text('{"warnings": 5}')
    stage = run / "stages/async_rl"
    (stage / "config.yaml").write_text("model: {path: ~nosuchuser/x}\n")
    append_lines(stage / "metrics.jsonl", [{"step": 41, "time": 10**400, "role": "x", "step/total_s": 10**400}])
    found = overview(run, tmp_path)
    assert (found["warnings"], found["parts"], found["stages"][0]["step"]) == ([], [], 41)


def test_what_cannot_be_read_is_said_and_tried_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = read(run, tmp_path)
    assert watcher.overview()[0]["failure"] is None
    look = watcher.look
    monkeypatch.setattr(watcher, "look", lambda: (tmp_path / "gone").read_text())
    watcher.start()
    try:
        until(lambda: "FileNotFoundError" in (watcher.overview()[0]["failure"] or ""))
        monkeypatch.setattr(watcher, "look", look)
        until(lambda: watcher.failure is None and watcher.overview()[0]["failure"] is None)
    finally:
        watcher.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_the_token_nothing_is_said(run: Path, tmp_path: Path) -> None:
    watcher = read(run, tmp_path)
    client = TestClient(build_app(watcher, token="secret", hosts=LOCAL), base_url="http://localhost")
    for path in ("/", "/api/overview", "/api/events", "/page/app.js", "/?token=wrong", "/api/overview?token=secret"):
        assert client.get(path).status_code == 401, path
    assert client.get("/api/overview", cookies={"leeway_watch": "wrong"}).status_code == 401
    client.cookies.clear()
    answer = client.get("/?token=secret", follow_redirects=False)
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/overview").status_code == 200
    assert "token" not in client.get("/").text
    watcher.close()


def test_a_name_that_points_here_from_elsewhere_is_refused(client: TestClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example:80", ""):
        assert client.get("/api/overview", headers={"host": host}).status_code == 421, host
    assert client.get("/api/overview", headers={"host": "[::1]:8000"}).status_code == 200


def test_every_answer_has_the_headers_and_nothing_can_be_written(client: TestClient) -> None:
    for path in ("/", "/page/app.js", "/api/overview", "/api/rollouts", "/nothing"):
        answer = client.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.request(method, "/api/overview").status_code == 405


def test_the_page_holds_no_inline_script_or_style_and_sets_no_html() -> None:
    folder = Path(build_app.__code__.co_filename).parent / "page"
    assert {p.name for p in folder.iterdir()} == {*FILES, "uPlot.LICENSE"}
    page = (folder / "index.html").read_text()
    for line in page.splitlines():
        assert "<script" not in line or "src=" in line, line
        assert "style=" not in line, line
        assert " on" not in line.replace(" on the", ""), line
    for file in folder.glob("*.js"):
        if file.name != "uPlot.iife.min.js":
            text = file.read_text()
            for bad in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
                assert bad not in text, f"{file.name}: {bad}"


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "%2e%2e/server.py", "uPlot.LICENSE", "x"])
def test_only_the_page_s_own_files_are_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_a_question_that_cannot_be_answered_says_so_in_one_line(client: TestClient) -> None:
    for path, status in [
        ("/api/series?run=0&stage=nothing&name=x", 404),
        ("/api/series?run=7&stage=async_rl", 404),
        ("/api/series?run=-1&stage=async_rl", 404),
        ("/api/series?run=x&stage=async_rl", 400),
        ("/api/series", 404),
        ("/api/series?run=0&stage=async_rl&name=train/reward/mean&from=x", 400),
        ("/api/rollouts?run=0&stage=async_rl&sort=rowid;drop", 400),
        ("/api/rollouts?run=0&stage=async_rl&reward_min=nan", 400),
        ("/api/rollout?run=0&stage=async_rl&id=1e400", 400),
        ("/api/rollout?run=0&stage=async_rl&id=999999999", 404),
        ("/api/lanes?run=0&stage=async_rl&seconds=inf", 400),
    ]:
        answer = client.get(path)
        assert answer.status_code == status, path
        assert len(answer.json()["error"]) < 200


def test_the_overview_says_who_waits_and_what_deserves_a_look(client: TestClient) -> None:
    (found,) = client.get("/api/overview").json()
    assert (found["name"], found["state"], found["death"]) == ("made", "finished", None)
    (stage,) = found["stages"]
    assert (stage["name"], stage["step"]) == ("async_rl", 40)
    assert stage["wait"]["sentence"].startswith(
        "The trainer waits 60 % of its time for a batch, because the generators"
    )
    assert stage["wait"]["setting"] == "rollout.num_generators"
    assert [a["title"] for a in stage["advisories"]] == ["Entropy has collapsed"]
    assert stage["settings"]["staleness.max_policy_lag"] == 2


def test_series_and_words(client: TestClient) -> None:
    found = client.get("/api/series", params=AT | {"name": ["train/reward/mean", "nothing"], "points": 10}).json()
    assert len(found["train/reward/mean"]["steps"]) == 10
    assert found["nothing"] == {"steps": [], "values": []}
    words = client.get("/api/words").json()
    assert words["train/reward/mean"]["unit"] == "reward"


def test_rollouts_can_be_filtered_and_read(client: TestClient) -> None:
    found = client.get("/api/rollouts", params=AT | {"reward_min": 1, "sort": "oldest", "limit": 3}).json()
    assert found["total"] == 80
    assert [row["step"] for row in found["rows"]] == [1, 1, 2]
    assert found["choices"]["reasons"] == ["length", "stop"]
    read = client.get("/api/rollout", params=AT | {"id": found["rows"][0]["rowid"]}).json()
    assert read["text"] == "answer 1 of step 1"
    assert client.get("/api/lags", params=AT).json() == [{"lag": 1, "count": 160}]


class Reader:
    """Of a request what a feed asks."""

    def __init__(self, reads: int) -> None:
        self._left = reads + 1

    async def is_disconnected(self) -> bool:
        self._left -= 1
        return self._left == 0


def test_events_begin_with_the_overview(run: Path, tmp_path: Path) -> None:
    watcher = read(run, tmp_path)

    async def first() -> list[str]:
        return [text async for text in _Feed(watcher).listen(Reader(1))]  # pyright: ignore[reportArgumentType]

    (text,) = asyncio.run(first())
    assert text.startswith("event: overview\ndata: [")
    assert text.endswith("\n\n")
    assert "\n" not in text.removeprefix("event: overview\n").removesuffix("\n\n")
    watcher.close()


def test_readers_that_leave_together_raise_nothing(run: Path, tmp_path: Path) -> None:
    """As a server has them leave: by a cancellation that is repeated until each has left."""
    watcher = read(run, tmp_path)
    feed, heard = _Feed(watcher), [0] * 5

    async def hear(reader: int) -> None:
        async for _ in feed.listen(Reader(100)):  # pyright: ignore[reportArgumentType]
            heard[reader] += 1

    async def scenario() -> None:
        async with anyio.create_task_group() as readers:
            for reader in range(5):
                readers.start_soon(hear, reader)
            await anyio.wait_all_tasks_blocked()
            readers.cancel_scope.cancel()

    asyncio.run(scenario())
    assert heard == [1] * 5
    watcher.close()


def test_a_dead_run_opens_on_its_cause(tmp_path: Path) -> None:
    run = make_run(tmp_path / "dead", status="failed", cause="generator-0: its engine died: out of memory")
    (run / "stages/async_rl/checkpoints").mkdir()
    found = overview(run, tmp_path)
    assert found["state"] == "dead"
    death = found["death"]
    assert (death["part"], death["log_file"]) == ("generator-0", "stages/async_rl/logs/generator-0.log")
    assert death["log"] == ["started", "EngineDead: out of memory"]
    assert "the trainer waited" in death["waited"]
    assert death["advice"] == f"leeway resume {run}"


def test_a_part_s_name_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("secret")
    run = make_run(tmp_path / "dead", status="failed", cause="../../../../secret: x")
    death = overview(run, tmp_path)["death"]
    assert "secret" not in death["log"]
    assert death["log_file"] == ""


def test_a_run_that_ended_without_a_word_is_dead(tmp_path: Path) -> None:
    found = overview(make_run(tmp_path / "gone", status=None), tmp_path)
    assert found["state"] == "dead"
    assert "without a word" in found["cause"]


def test_a_run_lives_while_its_driver_does(tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", status="failed", cause="of an earlier part")
    lock = {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": socket.gethostname()}
    (run / "run.lock").write_text(json.dumps(lock))
    assert overview(run, tmp_path)["state"] == "live"
    (run / "run.lock").write_text(json.dumps(lock | {"started": 1.0}))  # its number was given to another process
    assert overview(run, tmp_path)["state"] == "dead"
    (run / "run.lock").write_text(json.dumps(lock | {"host": "elsewhere"}))
    assert overview(run, tmp_path)["state"] == "dead", "its last line is old"


def test_watching_takes_no_lock_and_writes_nothing_into_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", status=None)
    (run / "run.lock").write_text("{}")
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    watcher = read(run, tmp_path)
    with (run / "run.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        while watcher.look():
            pass
    watcher.close()
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_a_folder_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    watcher = Watcher([RunFolder(tmp_path / "later")], tmp_path / "cache")
    watcher.look()
    assert watcher.overview()[0]["state"] == "waiting"
    make_run(tmp_path / "later")
    while watcher.look():
        pass
    assert watcher.overview()[0]["stages"][0]["step"] == 40
    watcher.close()


def test_two_watchers_of_one_run_do_not_share_an_index(run: Path, tmp_path: Path) -> None:
    first, second = read(run, tmp_path), read(run, tmp_path)
    append_lines(run / "stages/async_rl/metrics.jsonl", [{"step": 41, "time": 1.0, "x": 1.0}])
    for watcher in (first, second):
        watcher.look()
        assert watcher.overview()[0]["stages"][0]["step"] == 41
    first.close()
    second.close()


def test_what_files_say_is_shown_with_every_character_visible(tmp_path: Path) -> None:
    cause = "<img src=x onerror=alert(1)>\u202e\x1b[2J"
    found = overview(make_run(tmp_path / "dead", status="failed", cause=cause), tmp_path)
    assert found["cause"] == "<img src=x onerror=alert(1)>\\u202e\\x1b[2J"


@pytest.mark.slow
def test_a_watcher_takes_what_is_left_over_and_leaves_nothing_when_it_ends(run: Path, tmp_path: Path) -> None:
    """It has no cache, because another one holds it: what it kept for itself goes."""
    cache, scratch = tmp_path / "user/leeway/watch", tmp_path / "scratch"
    cache.mkdir(parents=True)
    scratch.mkdir()
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "user"), "TMPDIR": str(scratch)}
    code = "from leeway.cli.main import main; main()"
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", code, "watch", "--no-token", str(run)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert process.stdout is not None
        address = re.search(r"http://(127\.0\.0\.1:\d+)/", process.stdout.readline())
        assert address is not None
        page = http.client.HTTPConnection(address[1], timeout=60)
        page.request("GET", "/api/events")
        assert page.getresponse().readline() == b"event: overview\n"
        assert any(scratch.iterdir())
        started = psutil.Process(process.pid)
        (server,) = started.children() if has_autogroups() else [started]
        assert server.nice() == 19
        if has_autogroups():  # which do not look at the priority of a process of another session
            assert "nice 19" in Path(f"/proc/{server.pid}/autogroup").read_text(encoding="ascii")
        process.terminate()
        assert process.communicate(timeout=120) == ("", ""), "an open page is let go, without a word"
        assert process.returncode == 0
        page.close()
    assert not any(scratch.iterdir())


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RUN"):
        watch([tmp_path / "nothing"], host="127.0.0.1", port=0, open_to_all=False)
    with pytest.raises(ConfigError, match="--no-token"):
        watch([tmp_path], host="0.0.0.0", port=0, open_to_all=True)
