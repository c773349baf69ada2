"""The monitor against real files: what is written, what is refused, and what a broken sink may and may not do."""

from __future__ import annotations

import hashlib
import importlib.machinery
import io
import json
import math
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from leeway.config import ConfigError, Hardware, check_run, find_recipe, load_config
from leeway.config.running import MonitorConfig
from leeway.monitor import (
    Monitor,
    Record,
    Sink,
    build_monitor,
    read_metrics,
    reward_first,
    reward_last,
    weights_sha256,
    write_summary,
)
from leeway.monitor.console import ConsoleSink, as_duration, sparkline
from leeway.monitor.jsonl import JsonlSink, as_line
from leeway.monitor.logs import others_to_file
from leeway.monitor.series import bin_shares, read_series

ROOT = Path(__file__).resolve().parents[2]


def Settings(**changes: Any) -> MonitorConfig:
    return MonitorConfig(console="off").model_copy(update=changes)


class BrokenSink(Sink):
    name = "broken"

    def __init__(self, *, required: bool) -> None:
        self.required = required
        self.num_calls = 0

    def log(self, record: Record) -> None:
        self.num_calls += 1
        raise OSError("disk full")

    def close(self, status: str) -> None:
        raise OSError("disk full")


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(token: str) -> Any:
        raise AssertionError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# metrics.jsonl


def test_rows_are_on_disk_before_the_monitor_is_closed(tmp_path: Path) -> None:
    monitor = build_monitor(tmp_path / "run", Settings(), {}, 10, "rl")
    monitor.log(1, {"train/reward/mean": np.float32(0.5), "train/sequences": np.int64(64)})  # type: ignore[dict-item]
    monitor.log(1, {"collector/pause_s": 0.25}, role="collector")
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    assert first.pop("time") > 1.7e9
    assert first == {"step": 1, "role": "trainer", "train/reward/mean": 0.5, "train/sequences": 64}
    assert (second["role"], second["collector/pause_s"]) == ("collector", 0.25)
    monitor.close("done")


def test_a_line_is_strict_json_however_deep_a_nan_lies() -> None:
    row = {"reward": 1.0, "logprobs": [[-0.5, math.nan], (math.inf,)], "text": "\x9b31m"}
    line = as_line(row)
    assert json.loads(line) == {"reward": 1.0, "logprobs": [[-0.5, None], [None]], "text": "\x9b31m"}
    assert "NaN" not in line
    assert line.isprintable()


def test_nonfinite_numbers_stay_json_and_keep_their_kind(tmp_path: Path) -> None:
    monitor = build_monitor(tmp_path, Settings(), {}, None, "rl")
    monitor.log(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    monitor.log(2, {"a": 3.0, "b": 4.0, "c": 1.0})
    monitor.close("done")
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["a"], first["b"], first["c"]) == (None, None, 1.0)
    assert first["nonfinite"] == {"a": "nan", "b": "-inf"}
    assert "nonfinite" not in second


@pytest.mark.slow
def test_pandas_reads_them_as_numbers(tmp_path: Path) -> None:
    import pandas

    monitor = build_monitor(tmp_path, Settings(), {}, None, "rl")
    monitor.log(1, {"a": math.nan})
    monitor.log(2, {"a": 3.0})
    monitor.close("done")
    frame = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert str(frame.dtypes["a"]) == "float64"
    assert np.nanmean(frame["a"].to_numpy()) == 3.0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [({"step": 1.0}, "'step' is taken"), ({"x": "1.0"}, "'x': got '1.0'"), ({"x": None}, "'x': got None")],
)
def test_what_is_not_a_metric_is_refused_by_name(tmp_path: Path, metrics: dict[str, Any], message: str) -> None:
    monitor = build_monitor(tmp_path, Settings(), {}, None, "rl")
    with pytest.raises(ValueError, match=message):
        monitor.log(1, metrics)
    monitor.close("failed")
    assert lines(tmp_path / "metrics.jsonl") == []


def test_an_earlier_runs_metrics_are_set_aside_not_mixed_or_lost(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        monitor = build_monitor(tmp_path, Settings(), {}, None, "rl")
        monitor.log(run, {"x": run})
        monitor.close("done")
    assert [row["x"] for row in lines(tmp_path / "metrics.jsonl")] == [3]
    assert [row["x"] for row in lines(tmp_path / "metrics-1.jsonl")] == [1]
    assert [row["x"] for row in lines(tmp_path / "metrics-2.jsonl")] == [2]


def test_a_run_that_goes_on_continues_its_record_and_sets_aside_what_is_trained_again(tmp_path: Path) -> None:
    monitor = build_monitor(tmp_path, Settings(), {}, None, "rl")
    for step in range(5):
        monitor.log(step, {"x": float(step), "gap": math.nan})
        monitor.rollouts(step, [{"reward": 0.1}])
    monitor.close("failed")
    before = lines(tmp_path / "metrics.jsonl")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tra')  # killed
    monitor = build_monitor(tmp_path, Settings(), {}, None, "rl", resumed_at=2)
    monitor.log(3, {"x": 30.0})
    monitor.rollouts(3, [{"reward": 0.9}])
    monitor.close("done")
    rewards = {file.name: lines(file)[0]["reward"] for file in (tmp_path / "rollouts").iterdir()}
    assert rewards == {f"step-00000{step}.jsonl": reward for step, reward in enumerate((0.1, 0.1, 0.1, 0.9))}
    assert sorted(file.name for file in (tmp_path / "rollouts-1").iterdir()) == [
        "step-000003.jsonl", "step-000004.jsonl",
    ]  # fmt: skip
    rows = lines(tmp_path / "metrics.jsonl")
    assert rows[:3] == before[:3]
    assert [row["x"] for row in rows[3:]] == [30.0]
    assert lines(tmp_path / "metrics-1.jsonl") == before[3:]


def test_reading_forgives_only_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "trai')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


# rollouts


def test_rollouts_are_sampled_over_the_whole_step_and_strict_json(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, config={}, sinks=[], rollouts_per_step=4)
    monitor.rollouts(12, [{"index": i, "text": "é", "logprobs": [-math.inf, -0.5]} for i in range(64)])
    rows = lines(tmp_path / "rollouts" / "step-000012.jsonl")
    assert [row["index"] for row in rows] == [0, 16, 32, 48]
    assert rows[0] == {"index": 0, "text": "é", "logprobs": [None, -0.5]}
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000012.jsonl"]


def test_no_rollouts_are_written_when_switched_off(tmp_path: Path) -> None:
    Monitor(tmp_path, config={}, sinks=[], rollouts_per_step=0).rollouts(1, [{"text": "x"}])
    assert not (tmp_path / "rollouts").exists()


# broken sinks


def test_a_broken_view_is_switched_off_named_and_the_record_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = BrokenSink(required=False)
    monitor = Monitor(tmp_path, config={}, sinks=[broken, JsonlSink(tmp_path / "metrics.jsonl")])
    with caplog.at_level("WARNING"):
        for step in (1, 2, 3):
            monitor.log(step, {"x": 1.0})
        monitor.close("done")
    assert broken.num_calls == 1
    assert monitor.failed_sinks == {"broken": "OSError: disk full"}
    assert len(caplog.records) == 1
    assert "broken failed and is switched off" in caplog.text
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


def test_a_broken_record_ends_the_run_after_the_others_had_their_turn(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, config={}, sinks=[BrokenSink(required=True), JsonlSink(tmp_path / "metrics.jsonl")])
    with pytest.raises(OSError, match="disk full"):
        monitor.log(1, {"x": 1.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    with pytest.raises(OSError, match="disk full"):
        monitor.close("failed")
    monitor.close("failed")
    with pytest.raises(RuntimeError, match="after close"):
        monitor.log(2, {"x": 1.0})


# console


def plain_console(clock: list[float], total_steps: int | None = 100) -> tuple[ConsoleSink, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=60)
    return ConsoleSink(
        mode="auto", total_steps=total_steps, title="rl [a]", console=console, clock=lambda: clock[0]
    ), out


def record(step: int, **metrics: float) -> Record:
    return Record(
        step=step, time=0.0, role="trainer", metrics={key.replace("__", "/"): value for key, value in metrics.items()}
    )


def test_auto_off_a_terminal_prints_a_line_every_few_seconds_and_never_the_same_state_twice() -> None:
    clock = [0.0]
    sink, out = plain_console(clock)
    for step in range(1, 101):
        clock[0] = step * 0.5
        sink.log(record(step, train__reward__mean=step / 100))
    sink.close("done")
    text = out.getvalue().splitlines()
    assert text[0] == "rl [a] step 1/100  reward 0.010"
    assert [int(re.findall(r"step (\d+)/", line)[0]) for line in text] == [
        1,
        11,
        21,
        31,
        41,
        51,
        61,
        71,
        81,
        91,
        100,
    ]
    assert text[-1] == "rl [a] step 100/100  reward 1.000 | done in 50.0 s"


def test_the_last_step_is_said_once_however_many_parts_report_it() -> None:
    clock = [0.0]
    sink, out = plain_console(clock, total_steps=2)
    for role in ("collector", "trainer", "collector", "driver"):
        sink.log(Record(step=2, time=0.0, role=role, metrics={"train/reward/mean": 0.5}))
    sink.log(record(2, eval__gsm8k__exact_match=0.25))
    sink.close("done")
    lines = out.getvalue().splitlines()
    assert sum("2/2" in line for line in lines) <= 2
    assert lines[-1] == "rl [a] step 2/2  reward 0.500 | done in 0.0 s"
    assert not [line for line in lines if "eval/" in line], "the recipe says what was evaluated"


def test_nothing_is_shown_while_everything_starts() -> None:
    sink, out = plain_console([0.0])
    sink.log(Record(step=0, time=0.0, role="collector", metrics={"collector/tokens_per_s": 1.0}))
    assert out.getvalue() == ""


@pytest.mark.parametrize(("status", "shows"), [("done", "315/315"), ("interrupted", "315/600")])
def test_a_bar_is_full_where_the_run_is_done_early(status: str, shows: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    sink = ConsoleSink(mode="live", total_steps=600, title="sft", console=console)
    sink.log(record(315, train__loss__sft=0.4))
    sink.close(status)
    assert re.findall(r"\d+/\d+", out.getvalue())[-1] == shows


def test_what_libraries_write_to_stderr_goes_to_a_file_and_leeways_own_warnings_to_the_terminal(
    tmp_path: Path, capfd: Any
) -> None:
    import logging
    import os

    logging.getLogger().setLevel(logging.ERROR)  # as a library may do
    with others_to_file(tmp_path / "logs/driver.log"):
        os.write(2, b"from C++\n")
        logging.getLogger("somelib").warning("noise")
        logging.getLogger("leeway.monitor").warning("wandb failed")
    os.write(2, b"after\n")
    out, err = capfd.readouterr()
    assert err == "after\n"
    assert out == "leeway: WARNING: wandb failed\n"
    assert "from C++" in (tmp_path / "logs/driver.log").read_text()
    with others_to_file(tmp_path / "quiet/driver.log"):
        pass
    assert not (tmp_path / "quiet").exists()


def test_live_mode_shows_the_bar_and_the_status_line() -> None:
    out = io.StringIO()
    sink = ConsoleSink(
        mode="live", total_steps=4, title="rl [a]", console=Console(file=out, width=120, force_terminal=True)
    )
    sink.log(record(3, train__reward__mean=0.5, step__total_s=1.0, step__wait_for_batch_s=0.4))
    sink.close("interrupted")
    assert "rl [a]" in out.getvalue()
    assert "3/4" in out.getvalue()
    assert "reward 0.500 | 1.00 s/step" in out.getvalue()
    assert re.search(r"rl \[a\]: interrupted after [\d.]+ s, at step 3", out.getvalue())


WAITING = {"step__total_s": 2.0, "step__wait_for_batch_s": 1.2, "step__forward_backward_s": 0.8}


def test_live_mode_shows_the_course_of_the_reward_and_who_waits_for_whom() -> None:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True)
    settings, clock = {"rollout.num_generators": 1}, [0.0]
    sink = ConsoleSink(
        mode="live", total_steps=10, title="rl", console=console, settings=settings, clock=lambda: clock[0]
    )
    for step in range(1, 9):
        sink.log(Record(step=step, time=0.0, role="collector", metrics={"collector/generate_frac": 0.9}))
        clock[0] = 2.0 * step
        sink.log(record(step, train__reward__mean=step / 8, **WAITING))
    sink.close("done")
    text = out.getvalue()
    assert "reward 1.000 ▁▂▃▄▅▆▇█" in text
    assert "The trainer waits 60 % of its time for a batch" in text
    assert "done" not in text, "the bar is full"


def test_without_a_terminal_who_waits_is_said_when_it_changes() -> None:
    clock = [0.0]
    sink, out = plain_console(clock)
    for step in range(1, 101):
        clock[0] = step * 2.0
        shares = WAITING if step <= 50 else {"step__total_s": 2.0, "step__forward_backward_s": 2.0}
        sink.log(record(step, train__reward__mean=0.5, **shares))
    sink.close("done")
    lines = out.getvalue().splitlines()
    sentences = [line for line in lines if line.startswith("rl [a]: ")]
    assert [sentence.split(": ", 1)[1].split()[:3] for sentence in sentences] == [
        ["The", "trainer", "waits"],
        ["The", "trainer", "waits"],
        ["Nobody", "waits:", "the"],
    ], "at first, again after a while, and when it has changed"
    assert "98 s left" not in lines[0]
    assert "3 min left" in lines[0], "99 steps of 2 s"
    assert all(line.isascii() for line in lines), "a file is read by anything"


@pytest.mark.slow
def test_a_long_run_says_less_and_less_often() -> None:
    clock = [0.0]
    sink, out = plain_console(clock, total_steps=None)
    for step in range(1, 36_001):
        clock[0] = float(step)
        sink.log(record(step, train__reward__mean=0.5))
    assert 600 <= len(out.getvalue().splitlines()) <= 900, "ten hours, a line a second possible"


def test_a_sparkline_goes_from_the_least_to_the_largest() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([0.5] * 10) == "▁" * 10
    assert len(sparkline([float(i) for i in range(1000)], width=24)) == 24
    assert sparkline([1.0]) == ""
    assert [as_duration(s) for s in (5, 100, 7200)] == ["5 s", "2 min", "2.0 h"]


# tensorboard, wandb


@pytest.mark.slow
def test_tensorboard_events_hold_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = build_monitor(tmp_path, Settings(tensorboard=True), {}, None, "rl")
    monitor.log(3, {"train/reward/mean": 0.25, "train/grad_norm": math.inf})
    monitor.log(7, {"train/reward/mean": 0.75, "train/sequences": 64})
    monitor.close("done")
    assert monitor.failed_sinks == {}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward/mean")] == [(3, 0.25), (7, 0.75)]
    assert events.Scalars("train/grad_norm")[0].value == math.inf
    assert [(e.step, e.value) for e in events.Scalars("train/sequences")] == [(7, 64.0)]


def _without_block_headers(data: bytes) -> bytes:
    """The records of a .wandb file (LevelDB's log format), joined where a 32 KiB block boundary cuts one in two."""
    content, offset = b"", 7  # after the file's own header
    while offset + 7 <= len(data):
        left_in_block = 32768 - offset % 32768
        if left_in_block < 7:
            offset += left_in_block
            continue
        length = int.from_bytes(data[offset + 4 : offset + 6], "little")
        content += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
    return content


@pytest.mark.slow
def test_wandb_offline_leaves_a_run_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # anything that did reach for the network would fail
    settings = Settings(wandb="offline", table_every=1)
    monitor = build_monitor(tmp_path, settings, {"project": "p", "seed": 3}, None, "rl")
    monitor.log(5, {"train/reward/mean": 0.125})
    monitor.log(4, {"collector/pause_s": 0.5}, role="collector")  # a late row of an older step must not be lost
    monitor.rollouts(4, [{"text": "an answer", "reward": 1.0, "policy_versions": [3, 4]}])
    monitor.summary({"steps": 5, "eval": {"after": {"accuracy": 0.625}}})
    monitor.close("done")
    assert monitor.failed_sinks == {}
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/rollouts*.json")
    assert "an answer" in table.read_text()
    (binary,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    expected = (b"train/reward/mean", b"collector/pause_s", b"0.125", b"0.625")
    deadline = time.monotonic() + 200  # wandb's own service may still be writing the file's last block after finish()
    while not all(text in _without_block_headers(binary.read_bytes()) for text in expected):
        assert time.monotonic() < deadline, f"{binary} holds not all of {expected}"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same_run_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    asked: list[tuple[str | None, str | None]] = []

    def init(**options: Any) -> Any:
        asked.append((options["id"], options["resume"]))
        run = types.SimpleNamespace(id=options["id"] or f"new-{len(asked)}", summary={})
        return types.SimpleNamespace(**vars(run), define_metric=lambda *_, **__: None, finish=lambda **_: None)

    monkeypatch.setattr(wandb, "init", init)
    for resumed_at in (None, 4, None):
        build_monitor(tmp_path, Settings(wandb="offline"), {}, None, "rl", resumed_at=resumed_at).close("done")
    assert asked == [(None, None), ("new-1", "allow"), (None, None)]


@pytest.mark.parametrize("setting", ["wandb=offline", "tensorboard=true"])
def test_a_missing_package_is_said_before_a_run(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    package = setting.partition("=")[0]
    # What Python finds when the package is missing and the working directory holds a folder of that name.
    folder = importlib.machinery.ModuleSpec(package, None, is_package=True)
    config = load_config("quickstart", [f"monitor.{setting}", "rollout.engine.name=hf"])
    machine = Hardware(cores=(0, 1), num_gpus=0, memory_gib=16.0)
    for found in (None, folder):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", lambda name, path: None)
        problems = [str(problem) for problem in check_run(config, find_recipe("async_rl"), machine)]
        assert problems == [f'monitor.{package}: missing package {package}; install it: pip install "leeway[monitor]"']


@pytest.mark.slow
def test_importing_and_running_the_monitor_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from leeway.config.running import MonitorConfig
from leeway.monitor import build_monitor, write_summary
settings = MonitorConfig(console="plain", tensorboard=True, rollouts_per_step=1)
monitor = build_monitor(Path({str(tmp_path)!r}), settings, {{}}, 1, "rl")
monitor.log(1, {{"x": 1.0}})
monitor.close("done")
print("loaded:", [m for m in ("torch", "ray", "vllm", "matplotlib", "wandb", "tensorflow") if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"


# summary


def test_summary_has_one_order_and_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "summary.json"
    write_summary(path, {"status": "running", "filler": "x" * 1000})
    write_summary(path, {"zeta": 1, "versions": {"torch": "2"}, "alpha": math.nan, "steps": 3, "status": "done"})
    summary = json.loads(path.read_text())
    assert list(summary) == ["status", "steps", "versions", "alpha", "zeta"]
    assert summary["alpha"] is None
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]
    with pytest.raises(TypeError):
        write_summary(path, {"status": object()})
    assert json.loads(path.read_text()) == summary


def test_reward_first_and_last_are_means_over_5_and_20_rl_steps() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/a/reward": 9.0},
        *({"step": s, "train/loss/sft": 1.0} for s in range(5)),
    ]
    rows += [{"step": step, "train/reward/mean": float(step)} for step in range(1, 101)]
    rows.append({"step": 101, "train/reward/mean": None})
    assert reward_first(rows) == 3.0
    assert reward_last(rows) == 90.5
    assert reward_first([]) is None
    assert reward_last(rows[:8]) == 1.5


def test_weights_sha256_is_the_hash_of_the_shards_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "model-00002.safetensors").write_bytes(b"world")
    (tmp_path / "model-00001.safetensors").write_bytes(b"hello")
    (tmp_path / "config.json").write_text("{}")
    assert weights_sha256(tmp_path) == hashlib.sha256(b"helloworld").hexdigest()
    (tmp_path / "model-00002.safetensors").write_bytes(b"worle")
    assert weights_sha256(tmp_path) != hashlib.sha256(b"helloworld").hexdigest()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        weights_sha256(tmp_path / "nowhere")


# curves


def rl_rows(num_steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"step": 0, "role": "eval", "eval/addition/exact_match": 0.4, "eval/addition/reward": 0.45, "limit/step_s": 0.8}
    ]
    for step in range(1, num_steps + 1):
        row = {
            "train/reward/mean": 0.5 + 0.001 * step,
            "train/policy_lag/mean": 1.5,
            "train/policy_lag/max": 2,
            "train/tokens_per_s": 100.0,
        }
        row |= {
            "step/total_s": 2.0,
            "step/wait_for_batch_s": 0.5,
            "step/forward_backward_s": 1.0,
            "step/optim_s": 0.1,
            "step/publish_s": 0.2,
        }
        rows.append({"step": step, "role": "trainer", **row, "limit/efficiency": 0.4 if step > 1 else None})
        shares = {"collector/wait_for_slot_frac": 0.3, "collector/pause_frac": 0.1, "collector/generate_frac": 0.6}
        rows.append({"step": step, "role": "collector", "collector/tokens_per_s": 150.0, **shares})
    rows.append({"step": num_steps, "role": "eval", "eval/addition/exact_match": 0.7, "eval/addition/reward": 0.75})
    return rows


def panels(figure: Any) -> dict[str, Any]:
    return {ax.get_title(loc="left").split(" (")[0]: ax for ax in figure.axes}


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.slow
def test_curves_show_every_question_with_its_numbers() -> None:
    from leeway.monitor.curves import build_figure

    stages = [
        ("warm-up", read_series([{"step": s, "train/loss/sft": 1 / s} for s in range(1, 50)])),
        ("rl", read_series(rl_rows(200))),
    ]
    by_title = panels(build_figure(stages, title="t", max_policy_lag=2))
    assert list(by_title) == [
        "Supervised loss",
        "Reward and held-out evaluation",
        "Policy lag of trained tokens",
        "Trainer",
        "Collectors",
        "Throughput",
        "Time per step",
        "Efficiency",
    ]
    reward = by_title["Reward and held-out evaluation"]
    held_out = next(line for line in reward.get_lines() if line.get_label() == "held-out exact match")
    assert held_out.get_xydata().tolist() == [[0.0, 0.4], [200.0, 0.7]]
    assert {text.get_text() for text in reward.texts} == {"0.4", "0.7"}
    lag = by_title["Policy lag of trained tokens"]
    bound = next(line for line in lag.get_lines() if line.get_label() == "bound (2)")
    assert set(bound.get_ydata()) == {2}
    assert lag.get_ylim()[1] > 2
    expected = ["forward + backward 50 %", "optimizer 5 %", "publish 10 %", "waits for a batch 25 %", "other 10 %"]
    assert legend(by_title["Trainer"]) == expected
    assert legend(by_title["Collectors"]) == ["generates 60 %", "paused for weights 10 %", "waits for a slot 30 %"]
    assert "reached (median 40 %)" in legend(by_title["Efficiency"])
    limit = next(line for line in by_title["Time per step"].get_lines() if "limit" in str(line.get_label()))
    assert set(limit.get_ydata()) == {0.8}


@pytest.mark.slow
def test_no_text_of_the_picture_overlaps_another() -> None:
    from leeway.monitor.curves import build_figure

    figure = build_figure([("rl", read_series(rl_rows(200)))], title="t", max_policy_lag=2)
    figure.draw_without_rendering()
    boxes = [(ax, box) for ax in figure.axes if (box := ax.get_tightbbox()) is not None]
    assert len(boxes) == 7
    for i, (one, box) in enumerate(boxes):
        assert box.x0 >= 0, one.get_title(loc="left")
        assert box.x1 <= figure.bbox.x1, one.get_title(loc="left")
        for other, other_box in boxes[i + 1 :]:
            overlap = box.overlaps(other_box)
            assert not overlap, (one.get_title(loc="left"), other.get_title(loc="left"))


@pytest.mark.slow
def test_the_last_numbers_of_training_and_held_out_loss_do_not_lie_on_each_other() -> None:
    from leeway.monitor.curves import build_figure

    rows: list[dict[str, Any]] = [{"step": step, "train/loss/sft": 1 / step} for step in range(1, 33)]
    rows += [{"step": step, "eval/held_out/loss_sft": loss} for step, loss in ((0, 3.1), (32, 0.032))]
    figure = build_figure([("sft", read_series(rows))])
    figure.draw_without_rendering()
    ax = panels(figure)["Supervised loss"]
    assert legend(ax)[0] == "training loss (0.0318 at the end)", "the mean of the last steps"
    assert [text.get_text() for text in ax.texts] == ["3.1", "0.032"]
    one, other = (text.get_window_extent() for text in ax.texts)
    assert not one.overlaps(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "titles"),
    [
        ([{"step": 1, "train/reward/mean": 0.5}], ["Reward and held-out evaluation"]),
        ([{"step": 0, "eval/a/exact_match": 0.5}], ["Reward and held-out evaluation"]),
        ([{"step": 0, "eval/a/loss_sft": 5.8}], []),  # sft that ended before its first step
        ([{"step": 1, "step/total_s": 1.0, "train/reward/mean": None}], ["Time per step"]),
        ([{"step": 1, "collector/pause_frac": 0.5}, {"step": 900, "collector/pause_frac": 0.1}], ["Collectors"]),
        ([{"step": 1, "step/wait_for_batch_s": 0.0, "step/forward_backward_s": 0.0}], ["Trainer"]),
        (
            [{"step": 1, "train/reward/mean": -5.0, "eval/a/exact_match": 0.5, "eval/a/reward": -4.0}],
            ["Reward and held-out evaluation"],
        ),
        ([], []),
    ],
)
def test_curves_of_short_and_partial_runs(tmp_path: Path, rows: list[dict[str, Any]], titles: list[str]) -> None:
    from leeway.monitor.curves import build_figure, draw_curves

    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(panels(build_figure([("", read_series(read_metrics(path)))]))) == titles
    drawn = draw_curves([("", path)], tmp_path / "out" / "curves.png")
    assert drawn is bool(titles)
    if not drawn:
        assert not (tmp_path / "out").exists(), "a picture of nothing is none"
        return
    assert (tmp_path / "out" / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["curves.png"]


@pytest.mark.slow
def test_rewards_beyond_0_to_1_are_compared_with_held_out_rewards() -> None:
    from leeway.monitor.curves import build_figure

    figure = build_figure(
        [("", read_series([{"step": 1, "train/reward/mean": -5.0, "eval/a/exact_match": 0.5, "eval/a/reward": -4.0}]))]
    )
    assert legend(figure.axes[0]) == ["training reward", "held-out reward"]


def test_shares_weigh_steps_by_their_time_and_sum_to_a_hundred() -> None:
    rows = [{"step": s, "wait": 1.0 if s == 2 else 0.0, "total": 9.0 if s == 2 else 1.0} for s in (1, 2)]
    series = read_series(rows)
    _, width, shares = bin_shares({"wait": series["wait"]}, series["total"], max_bins=1)
    assert width == 2
    assert shares["wait"] == pytest.approx([10.0])
    assert shares["other"] == pytest.approx([90.0])
    overlapping = read_series([{"step": 1, "a": 0.9, "b": 0.6}])
    _, _, shares = bin_shares(overlapping, None, max_bins=10)
    assert (shares["a"][0], shares["b"][0], shares["other"][0]) == pytest.approx((60.0, 40.0, 0.0))


# docs


def test_every_metric_this_package_names_is_explained_in_the_docs() -> None:
    explained = set(re.findall(r"`([a-z_]+/[a-z_/<>0-9]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    named: set[str] = set()
    for path in (ROOT / "components" / "monitor").glob("*.py"):
        named |= set(re.findall(r'"((?:train|collector|step|limit|replay|param_server)/[a-z_/]+)"', path.read_text()))
    assert len(named) > 15
    assert named <= explained, named - explained


OWN_SINK = """
import json
from leeway import Sink

class Lines(Sink):
    name = "lines"

    def __init__(self, run_dir, *, title, config, resumed_at):
        self.file = run_dir / "lines.txt"
        self.title = title

    def log(self, record):
        with self.file.open("a") as out:
            out.write(f"{self.title} {record.step} {json.dumps(dict(record.metrics))}\\n")

    def close(self, status):
        with self.file.open("a") as out:
            out.write(status)

class Half(Sink):
    name = "half"
    def log(self, record): ...

def make(run_dir, **about): ...
"""


def test_a_place_for_metrics_of_ones_own_takes_no_file_of_ours(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_sinks.py").write_text(OWN_SINK)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_dir = tmp_path / "run"
    monitor = build_monitor(run_dir, Settings(sinks=["my_sinks:Lines"]), {}, 10, "mine / rl")
    monitor.log(1, {"train/accuracy/my_metric": 0.5})
    monitor.close("done")
    assert (run_dir / "lines.txt").read_text() == 'mine / rl 1 {"train/accuracy/my_metric": 0.5}\ndone'
    for name, part in (("make", "no such class"), ("Half", "has no close"), ("Gone", "no 'Gone'")):
        with pytest.raises(ValueError, match=part):
            build_monitor(tmp_path / name, Settings(sinks=[f"my_sinks:{name}"]), {}, 10, "mine")
        assert not (tmp_path / name).exists()
    base = ["model.path=org/model", "model.init=null"]
    assert load_config("quickstart", [*base, "monitor.sinks=[my_sinks:Lines]"]).monitor.sinks == ["my_sinks:Lines"]
    for name, part in (("my_sinks:Lins", "has no Lins"), ("lines", "pkg.mod:Class")):
        with pytest.raises(ConfigError, match=part):
            load_config("quickstart", [*base, f"monitor.sinks=[{name}]"])
