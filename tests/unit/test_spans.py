"""Spans: what is written, when, and what a killed process leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leeway import spans
from leeway.collector.clock import ActivityClock, RolloutClock


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "spans" / "generator-0.jsonl"
    spans.open_writer(path, part="generator-0")
    yield path
    spans.close_writer()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path) -> list[dict[str, Any]]:
    """Everything that was recorded, without the first line."""
    spans.close_writer()
    return lines(path)[1:]


def test_a_span_has_its_time_its_attributes_and_the_span_around_it(file: Path) -> None:
    before = time.time()
    with spans.span("step", step=3):
        with spans.span("generate", group=7) as attrs:
            attrs["tokens"] = 35
        spans.instant("announce", version=4)
    after = time.time()
    generate, announce, step = written(file)
    head = lines(file)[0]
    assert (head["part"], head["pid"], head["host"]) == ("generator-0", os.getpid(), os.uname().nodename)
    assert [row["name"] for row in (generate, announce, step)] == ["generate", "announce", "step"]
    assert generate["attrs"] == {"group": 7, "tokens": 35}
    assert generate["parent"] == announce["parent"] == step["id"]
    assert "parent" not in step
    assert announce["start"] == announce["end"]
    assert step["start"] <= generate["start"] <= generate["end"] <= step["end"]
    # Two clocks that count the same seconds: what they differ by in a test is far below this.
    assert before - 0.1 <= step["start"]
    assert step["end"] <= after + 0.1


def test_what_runs_beside_a_span_is_not_inside_of_it(file: Path) -> None:
    async def one(group: int) -> None:
        with spans.span("generate", group=group):
            await asyncio.sleep(0)
            spans.instant("inside", group=group)

    async def both() -> None:
        await asyncio.gather(one(1), one(2))

    asyncio.run(both())
    rows = written(file)
    ids = {row["id"]: row["attrs"]["group"] for row in rows if row["name"] == "generate"}
    assert [(ids[row["parent"]], row["attrs"]["group"]) for row in rows if row["name"] == "inside"] == [(1, 1), (2, 2)]


def test_times_are_on_the_drivers_clock(tmp_path: Path) -> None:
    spans.open_writer(tmp_path / "x.jsonl", part="x", clock_offset_s=1000.0)
    spans.instant("here")
    spans.close_writer()
    head, row = lines(tmp_path / "x.jsonl")
    assert head["clock_offset_s"] == 1000.0
    assert abs(row["start"] - (time.time() - 1000.0)) < 100.0


def test_without_a_writer_nothing_is_recorded() -> None:
    spans.close_writer()
    with spans.span("step") as attrs:
        attrs["step"] = 1
    spans.instant("here")
    with spans.span("step") as attrs:
        assert attrs == {}


def test_text_of_others_is_cut_and_escaped(file: Path) -> None:
    spans.instant("failed", why="\x1b]0;title\x07 \u202e\n" + "x" * 10_000)
    (row,) = written(file)
    assert len(row["attrs"]["why"]) == spans.MAX_TEXT
    raw = file.read_text()
    assert raw.isascii()
    assert raw.replace("\n", "").isprintable()


def test_a_file_that_grew_to_its_limit_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    writer = spans.SpanWriter(path, part="x", kept_bytes=4000)
    for number in range(200):
        writer.add("here", number, 0.0, 0.0, None, {})
        writer.flush()
    writer.close()
    old, new = lines(tmp_path / "x.old.jsonl"), lines(path)
    assert old[0]["part"] == new[0]["part"] == "x"
    assert new[-1]["id"].endswith(".199")
    assert all(file.stat().st_size < 4200 for file in tmp_path.iterdir())
    assert len([*tmp_path.iterdir()]) == 2


def test_what_does_not_fit_into_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_WAITING", 2)
    monkeypatch.setattr(spans, "FLUSH_S", 3600.0)  # the disk takes nothing meanwhile
    writer = spans.SpanWriter(tmp_path / "x.jsonl", part="x")
    for number in range(5):
        writer.add("here", number, 0.0, 0.0, None, {})
    writer.close()
    *kept, lost = lines(tmp_path / "x.jsonl")[1:]
    assert len(kept) == 2
    assert lost["attrs"] == {"spans": 3}


def test_a_disk_that_takes_nothing_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spans").write_text("not a folder")
    spans.open_writer(tmp_path / "spans" / "x.jsonl", part="x")
    for _ in range(3):
        spans.instant("here")
        spans.flush()
    spans.close_writer()
    assert [record.message.split(" cannot")[0] for record in caplog.records] == [
        f"spans: {tmp_path / 'spans' / 'x.jsonl'}"
    ]


class Nameless:
    def __str__(self) -> str:
        raise ValueError("no words")


def test_a_span_that_cannot_be_written_is_counted_and_the_others_are_written(tmp_path: Path) -> None:
    spans.open_writer(tmp_path / "x.jsonl", part="x")
    circle: list[Any] = []
    circle.append(circle)
    for value in (Nameless(), circle, 1):
        spans.instant("here", value=value)
    spans.close_writer()
    kept, lost = lines(tmp_path / "x.jsonl")[1:]
    assert (kept["attrs"], lost["attrs"]) == ({"value": 1}, {"spans": 2})


def test_a_disk_that_does_not_answer_keeps_nobody_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "CLOSE_S", 0.05)
    writer = spans.SpanWriter(tmp_path / "x.jsonl", part="x")
    writer.add("here", 1, 0.0, 0.0, None, {})
    writer.flush()
    with writer._writing:  # a write that does not return
        writer.close()
    assert "the disk does not answer" in caplog.text


KILLED = """
import sys, time
from pathlib import Path
from leeway import spans
spans.open_writer(Path(sys.argv[1]), part="x")
number = 0
while True:
    number += 1
    spans.instant("here", number=number)
    if number == 500:
        spans.flush()
        print("written", flush=True)
    if number > 500:
        time.sleep(0.001)
"""


def test_a_killed_process_leaves_whole_lines_and_its_successor_continues(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    with path.open("a") as file:
        file.write('{"id": "x:1.50')  # as if it had been killed while it wrote
    spans.open_writer(path, part="x")
    spans.instant("again")
    spans.close_writer()
    texts = path.read_text().splitlines()
    torn = texts.index('{"id": "x:1.50')
    rows = [json.loads(text) for number, text in enumerate(texts) if number != torn]
    assert [row["attrs"]["number"] for row in rows[1:501]] == [*range(1, 501)]
    assert rows[-2]["part"] == "x"
    assert rows[-1]["name"] == "again"
    assert len({row["id"] for row in rows if "id" in row}) == len(rows) - 2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_generators_waits_are_recorded_as_what_it_waits_for(file: Path) -> None:
    clock = ActivityClock(now := Clock())
    now.now += 2
    clock.drain()  # seen while it still waits
    now.now += 1
    with clock.doing("wait_for_weights"):
        now.now += 4
        with clock.doing("environment"):
            now.now += 0.0005  # too short to be a wait
            with clock.doing("generate"), clock.doing("generate"):
                now.now += 8
    rows = [(row["attrs"]["for"], round(row["end"] - row["start"], 6)) for row in written(file)]
    assert rows == [("slot", 2.0), ("slot", 1.0), ("weights", 4.0)]
    assert clock.total("generate") == 8


def test_a_groups_time_outside_of_the_engine_is_recorded(file: Path) -> None:
    clock = RolloutClock(now := Clock(), group=5)
    now.now += 1
    with clock:
        now.now += 10
        with clock:  # another of its conversations: somebody is still inside
            now.now += 10
    now.now += 2
    with clock:
        now.now += 10
    answered = now.now
    now.now += 3
    assert clock.end() == answered
    rows = written(file)
    assert [(row["attrs"]["group"], round(row["end"] - row["start"], 6)) for row in rows] == [(5, 1), (5, 2), (5, 3)]
    assert clock.asked_at == 101.0


def test_a_run_that_is_begun_anew_sets_spans_and_rollouts_of_the_earlier_one_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leeway.config import load_config
    from leeway.driver import checkpoints
    from leeway.driver.runner import _begin_anew

    config = load_config("quickstart", [], recipe="async_rl")
    for life in range(2):
        for name in ("spans", "rollouts"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x.jsonl").write_text(f"{life}\n")
        _begin_anew(tmp_path, config)
    _begin_anew(tmp_path, config)  # there is nothing
    assert [(tmp_path / f"spans-{n}/x.jsonl").read_text() for n in (1, 2)] == ["0\n", "1\n"]
    assert (tmp_path / "rollouts-2").is_dir()
    assert not (tmp_path / "spans").exists()
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans/x.jsonl").write_text("to go on with\n")
    monkeypatch.setattr(checkpoints, "resume_point", lambda *_: tmp_path)
    _begin_anew(tmp_path, config)
    assert (tmp_path / "spans/x.jsonl").exists()
