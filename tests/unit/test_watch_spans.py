"""Lanes: spans are found by time without being loaded, across a file that was begun anew, and the slowest is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leeway.monitor.waits import Wait
from leeway.watch.chain import with_chain
from leeway.watch.spans import MAX_SPANS, SpanIndex, span_of

from ..watched_run import append_lines

AT = 1_700_000_000.0
WAIT = Wait(waiter="trainer", holder="generate", frac=0.5, sentence="The trainer waits.")


def spans(part: str, num: int, *, first: int = 0, length: float = 0.5, name: str = "step", **attrs: Any) -> list[dict]:
    each = range(first, first + num)
    return [{"id": f"{part}:{i}", "name": name, "start": AT + i, "end": AT + i + length, "attrs": attrs} for i in each]


def indexed(stage: Path) -> SpanIndex:
    index = SpanIndex(stage)
    index.advance()
    return index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spans").mkdir()
    return tmp_path / "spans"


@pytest.mark.slow
def test_a_window_holds_what_overlaps_it(folder: Path) -> None:
    append_lines(folder / "driver.jsonl", [{"part": "driver", "pid": 1}, *spans("driver", 10_000)])
    index = indexed(folder.parent)
    assert index.extent() == (AT, AT + 9_999.5)
    (lane,) = index.window(AT + 5_000.4, AT + 5_003.2)["lanes"]
    assert [s["start"] - AT for s in lane["spans"]] == [5_000, 5_001, 5_002, 5_003]
    assert lane["left_out"] == 0


@pytest.mark.slow
def test_a_long_span_is_found_from_its_middle(folder: Path) -> None:
    long = {"id": "driver:long", "name": "wait", "start": AT + 100, "end": AT + 9_000, "attrs": {"for": "trainer"}}
    rows = sorted([*spans("driver", 10_000), long], key=lambda s: s["end"])
    append_lines(folder / "driver.jsonl", rows)
    found = indexed(folder.parent).spans("driver", AT + 2_000, AT + 2_000.1)
    assert {s["id"] for s in found} == {"driver:long", "driver:2000"}


def test_only_what_was_appended_is_read(folder: Path) -> None:
    append_lines(folder / "driver.jsonl", spans("driver", 10))
    index = indexed(folder.parent)
    assert not index.advance()
    append_lines(folder / "driver.jsonl", spans("driver", 10, first=10))
    assert index.advance()
    assert len(index.spans("driver", AT, AT + 99)) == 20


def test_a_file_that_was_set_aside_is_still_the_same_part(folder: Path) -> None:
    append_lines(folder / "driver.jsonl", spans("driver", 50))
    index = indexed(folder.parent)
    (folder / "driver.jsonl").rename(folder / "driver.old.jsonl")
    append_lines(folder / "driver.jsonl", spans("driver", 50, first=50))
    index.advance()
    assert index.parts() == ["driver"]
    assert len(index.spans("driver", AT, AT + 200)) == 100


@pytest.mark.slow
def test_too_many_spans_leave_the_shortest_out_and_say_so(folder: Path) -> None:
    append_lines(folder / "driver.jsonl", spans("driver", MAX_SPANS + 500))
    (lane,) = indexed(folder.parent).window(AT, AT + 1e6)["lanes"]
    assert (len(lane["spans"]), lane["left_out"]) == (MAX_SPANS, 500)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"part": "x"}',
        b'{"start": "1", "end": 2}',
        b'{"start": true, "end": 2}',
        b'{"start": 1e999, "end": 2}',
    ],
)
def test_what_is_no_span_is_none(line: bytes) -> None:
    assert span_of(line) is None


def test_a_span_of_anything_is_bounded() -> None:
    found = span_of(b'{"id": {}, "name": "' + b"x" * 1000 + b'", "start": 5, "end": 2, "attrs": [1], "parent": 7}')
    assert found is not None
    assert (len(found["name"]), found["end"], found["attrs"], found["parent"]) == (80, 5.0, {}, "7")


def test_the_generator_that_holds_the_others_up_is_named(folder: Path) -> None:
    slow: Any = {"for": "generator-1", "why": "group 3"}
    append_lines(folder / "replay.jsonl", spans("replay", 20, name="wait", length=0.9, **slow))
    append_lines(folder / "generator-0.jsonl", spans("generator-0", 20, name="generate"))
    behind: Any = {"for": "weights", "why": "version 41"}
    own = [
        *spans("generator-1", 20, name="wait", length=0.4, **behind),
        *[s | {"id": s["id"] + "w"} for s in spans("generator-1", 20, name="fetch_weights", version=41)],
    ]
    append_lines(folder / "generator-1.jsonl", own)
    said = with_chain(WAIT, indexed(folder.parent), 20.0).sentence
    assert said == (
        "The trainer waits. 100 % of that was for generator-1, which waited 40 % of its time for weights of version 41."
    )


def test_even_waits_name_nobody(folder: Path) -> None:
    for i in range(2):
        held_up: Any = {"for": f"generator-{i}"}
        append_lines(folder / "replay.jsonl", spans("replay", 10, first=10 * i, name="wait", **held_up))
        append_lines(folder / f"generator-{i}.jsonl", spans(f"generator-{i}", 20, name="generate"))
    assert with_chain(WAIT, indexed(folder.parent), 20.0) is WAIT


def test_lines_that_are_no_json_cost_no_other_line(folder: Path) -> None:
    """Lines are parsed together; the first two of the odd ones are one value together, and none alone."""
    rows = [json.dumps(row) for row in spans("driver", 500)]
    odd = ['{"start": 5', '"end": 6}', "", "[1", "nan", "1, 2", '{"start": 1, "end": [', "\\ud800"]
    lines = [*rows[:250], *odd, *rows[250:]]
    (folder / "driver.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    index = indexed(folder.parent)
    assert [s["start"] for s in index.spans("driver", AT, AT + 600)] == [AT + i for i in range(500)]
    assert index.extent() == (AT, AT + 499.5)
