"""The index of a watched stage: what was appended is found, what was replaced is read again, and nothing is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leeway.watch.columns import MAX_NAMES, Columns, thinned
from leeway.watch.index import StageIndex
from leeway.watch.lines import FollowedFile
from leeway.watch.pieces import Pieces
from leeway.watch.rollouts import MAX_TOKENS, readable
from leeway.watch.shown import shown, shown_value

from ..watched_run import append_lines, make_run, rollout_row, rows_of, write_rollouts, write_tokenizer


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run") / "stages/async_rl"


def opened(stage: Path, tmp_path: Path) -> StageIndex:
    index = StageIndex(stage, tmp_path / "cache")
    while index.advance():
        pass
    return index


def total(index: StageIndex, **filters: Any) -> int:
    return index.find(filters, sort="newest", limit=5, offset=0)["total"]


def test_what_was_written_is_found(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    steps, values = index.series("train/reward/mean")
    assert steps.tolist() == list(range(1, 41))
    assert values[9] == pytest.approx(0.10)
    assert index.last_step == 40
    assert total(index) == 160
    assert index.progress() | {"num_rollouts": 0} == {
        "metrics": 1.0,
        "rollouts": 1.0,
        "num_rollouts": 0,
        "skipped_lines": 0,
        "refused_names": 0,
    }


def test_what_a_run_does_now_is_known_before_all_of_it_was_read(stage: Path, tmp_path: Path) -> None:
    with (stage / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "torn')
    index = StageIndex(stage, tmp_path / "cache")
    assert index.last_step == 40
    assert index.progress()["metrics"] == 0
    glimpsed = index.recent_rows()
    assert [row["step"] for row in glimpsed if row["role"] == "trainer"] == list(range(21, 41))
    while index.advance():
        pass
    assert index.recent_rows() == glimpsed, "no line counts twice"
    assert len(index.series("train/reward/mean")[0]) == 40


def test_only_what_is_new_is_read(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    assert not index.advance()
    append_lines(stage / "metrics.jsonl", rows_of(41))
    write_rollouts(stage, 41)
    assert index.advance()
    assert index.last_step == 41
    assert len(index.series("train/reward/mean")[0]) == 41
    assert total(index) == 164


def test_a_line_without_an_end_waits_for_it(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    line = json.dumps(rows_of(41)[0])
    with (stage / "metrics.jsonl").open("a") as file:
        file.write(line[:30])
    assert not index.advance()
    with (stage / "metrics.jsonl").open("a") as file:
        file.write(line[30:] + "\n")
    assert index.advance()
    assert index.last_step == 41


def test_an_index_goes_on_where_an_earlier_one_ended(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    index.close()
    append_lines(stage / "metrics.jsonl", rows_of(41))
    write_rollouts(stage, 41)
    again = StageIndex(stage, tmp_path / "cache")
    assert again.last_step == 40, "read from the cache"
    assert len(again.recent_rows()) == 40, "the last twenty steps, two lines each"
    while again.advance():
        pass
    assert len(again.series("train/reward/mean")[0]) == 41
    assert total(again) == 164


def test_a_crash_of_the_watcher_counts_nothing_twice(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    index.close()
    append_lines(stage / "metrics.jsonl", rows_of(41))
    crashed = StageIndex(stage, tmp_path / "cache")
    crashed._take_metrics(crashed._metrics.read())
    crashed._columns.flush()  # written, and no state that says so
    again = StageIndex(stage, tmp_path / "cache")
    while again.advance():
        pass
    steps, _ = again._columns.read("train/reward/mean")
    assert steps.tolist() == list(range(1, 42))
    assert again._columns._lengths["train/reward/mean"] == 41


def test_a_resumed_run_is_read_anew(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    kept = [row for step in range(1, 11) for row in rows_of(step)]
    (stage / "metrics.jsonl").unlink()
    append_lines(stage / "metrics.jsonl", kept)
    append_lines(
        stage / "metrics.jsonl", ({**row, "train/reward/mean": 9.0} for s in range(11, 60) for row in rows_of(s))
    )
    while index.advance():
        pass
    steps, values = index.series("train/reward/mean")
    assert steps.tolist() == list(range(1, 60))
    assert values[-1] == 9.0
    assert total(index) == 160


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({"reward_min": 1.0}, 80),
        ({"step_min": 11, "step_max": 20}, 40),
        ({"group": 70}, 4),
        ({"reason": "length"}, 40),
        ({"task": "k-3"}, 32),
        ({"same_task": "k-3"}, 0),
        ({"same_task": "task-3"}, 32),
        ({"tokens_min": 5}, 0),
        ({"lag_min": 0.5, "lag_max": 0.7}, 160),
        ({"sign": "equality"}, 1),
        ({"task": "' or 1=1 --"}, 0),
        ({"task": "%"}, 0),
    ],
)
def test_filters(stage: Path, tmp_path: Path, filters: dict[str, Any], count: int) -> None:
    append_lines(
        stage / "suspects.jsonl", [{"step": 7, "group_id": 70, "sequence_id": 1, "signs": ["equality", "exit"]}]
    )
    assert total(opened(stage, tmp_path), **filters) == count


def test_a_rollout_comes_from_its_file(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    write_tokenizer(tmp_path / "model")
    row = index.find({"group": 70, "reward_min": 1.0}, sort="newest", limit=1, offset=0)["rows"][0]
    assert (row["turns"], row["tokens"], row["lag"]) == (2, 4, pytest.approx(2 / 3))
    found = index.rollout(row["rowid"])
    assert found is not None
    page = readable(*found, Pieces([tmp_path / "model"], tmp_path / "pieces.sqlite"))
    assert page["prompt"]["pieces"] == [" ask", " what"]
    assert page["response"]["pieces"] == [" one", "<|tool|>", " two", "\n"]
    assert page["response"]["loss_mask"] == [True, False, True, True]
    assert index.rollout(10**9) is None


def test_a_file_that_has_gone_is_no_rollout(stage: Path, tmp_path: Path) -> None:
    index = opened(stage, tmp_path)
    row = index.find({}, sort="newest", limit=1, offset=0)["rows"][0]
    (stage / f"rollouts/step-{row['step']:06d}.jsonl").unlink()
    assert index.rollout(row["rowid"]) is None


def test_lines_of_anything_are_survived(stage: Path, tmp_path: Path) -> None:
    hostile = [
        {"step": "x", "train/reward/mean": 1},
        {"step": 41, "train/reward/mean": "<script>", "time": "now", "a": True, "b": None, "c": [1], "d": 1e999},
        {"step": 10**30, "time": 1, "train/reward/mean": 0.5},
        [1, 2],
        {"train/reward/mean": 0.1},
    ]
    append_lines(stage / "metrics.jsonl", hostile)
    with (stage / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe{\n" + b"[" * 100_000 + b"\n" + b"null\n")
    rows = [
        rollout_row(41, 0, group_id="x", task_id={"a": 1}, reward="high", policy_versions="no", loss_mask=3),
        rollout_row(41, 1, task_id="\ud800\u202e", finish_reason=None, advantage=[1, "x", None], metrics=[1]),
        rollout_row(41, 2, group_id=2**80, reward=True, response_tokens=None, policy_versions=[None, 1e400]),
    ]
    write_rollouts(stage, 41, rows)
    index = opened(stage, tmp_path)
    assert total(index) == 163
    assert index.last_step == 41
    for row in index.find({"step_min": 41}, sort="newest", limit=9, offset=0)["rows"]:
        found = index.rollout(row["rowid"])
        assert found is not None
        json.dumps(readable(*found, Pieces([], tmp_path / "none.sqlite")), allow_nan=False)


@pytest.mark.slow
def test_endless_names_make_no_endless_files(tmp_path: Path) -> None:
    columns = Columns(tmp_path)
    columns.append({"step": 1} | {f"name/{i}": 1.0 for i in range(MAX_NAMES + 10)})
    columns.flush()
    assert len(columns.names) == MAX_NAMES
    assert columns.num_refused == 10


def test_a_line_that_never_ends_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leeway.watch.lines.MAX_LINE", 1000)
    monkeypatch.setattr("leeway.watch.lines.CHUNK", 100)
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\ntwo\n")
    file = FollowedFile(path)
    assert file.read(4) == [b"one"]
    assert file.read(100) == []
    assert file.read(100) == [b"two"]
    assert file.num_skipped == 1


def test_thinning_keeps_extremes_and_the_mean() -> None:
    steps = np.arange(1.0, 100_001)
    values = np.sin(steps / 500)
    values[54_321] = 40.0
    thin = thinned(steps, values, 500)
    assert len(thin["steps"]) <= 500
    assert max(thin["high"]) == 40.0
    assert thin["steps"] == sorted(thin["steps"])
    assert np.average(thin["values"]) == pytest.approx(values.mean(), abs=1e-3)
    assert thinned(steps[:3], values[:3], 500) == {"steps": [1, 2, 3], "values": values[:3].tolist()}


def test_what_is_shown_has_a_shape() -> None:
    assert shown("a\x1b[31m\u202eb\u200d\ufeff\nc\td\x00") == "a\\x1b[31m\\u202eb\\u200d\\ufeff\nc\td\\x00"
    assert shown("\ud800") == "\\ud800"
    assert shown("Grüße, 你好, 😀") == "Grüße, 你好, 😀"
    cut = shown("x" * 10_000_000)
    assert len(cut) < 21_000
    assert cut.endswith("[cut: 9,980,000 more characters]")
    nested: Any = "x"
    for _ in range(100):
        nested = [nested]
    assert "nested too deeply" in json.dumps(shown_value(nested))
    assert shown_value({"a": float("nan"), "\u202e": 1}) == {"a": None, "\\u202e": 1}


@pytest.mark.slow
def test_one_token_of_ten_megabytes_is_cut_with_a_note(stage: Path, tmp_path: Path) -> None:
    write_rollouts(stage, 41, [rollout_row(41, 0, text="A" * 10_000_000, response_tokens=[3] * 50_000)])
    index = opened(stage, tmp_path)
    row = index.find({"step_min": 41}, sort="newest", limit=1, offset=0)["rows"][0]
    found = index.rollout(row["rowid"])
    assert found is not None
    page = readable(*found, Pieces([], tmp_path / "none.sqlite"))
    assert len(page["response"]["ids"]) == MAX_TOKENS
    assert page["cut"]["response"] == 50_000 - MAX_TOKENS
    assert len(json.dumps(page)) < 300_000
    assert "more characters" in page["text"]
