"""The benchmarks run, and on a machine with torch, transformers and pydantic only."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway.driver import EvalPoint

from ..forked import GIVES_MEMORY_BACK, Forked

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "vllm", "torchrl", "tensordict", "omegaconf"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


PUBLISH = f"""
{GIVES_MEMORY_BACK}
import runpy, sys

sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/publish.py", run_name="__main__")
"""


OUTPUT_HEAD = """
import runpy

runpy.run_path("benchmarks/output_head.py", run_name="__main__")
"""


@pytest.mark.slow
def test_publishing_takes_a_copy_of_each_ranks_shards_and_one_bucket_on_rank_0():
    """As the benchmark measures it; the whole model is nine buckets of 16 MB."""
    arguments = ["--shape=medium", "--dtype=float32", "--bucket-mb=16", "--repeats=1", "--groups=0"]
    process = Forked(PUBLISH, *arguments, "--canary-tokens=16", cwd=ROOT)
    said = process.communicate()
    assert process.returncode == 0, said[-2000:]
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [row["rank"] for row in rows] == [0, 1]
    for row, bucket_mb in zip(rows, (16, 0), strict=True):
        assert row["num_buckets"] >= 8
        assert row["copy_mb"] == pytest.approx(row["gb"] * 1e9 / 2**20 / 2, rel=0.01), "half of the model"
        assert row["extra_mb"] <= row["copy_mb"] + bucket_mb + 12, "and what threads and allocators take for themselves"
        assert row["extra_mb"] > row["copy_mb"] + bucket_mb - 4, "or it was not measured"


def rows_of(benchmark: str, *args: str) -> list[dict[str, Any]]:
    """Of a process without most packages."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)}
    command = [sys.executable, "-c", WITHOUT, f"benchmarks/{benchmark}", *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_the_trainers_benchmark_needs_torch_transformers_and_pydantic_only():
    options = ["--groups=2", "--group-size=2", "--steps=1", "--bare", "--packing", "shared", "padded"]
    rows = rows_of("trainer.py", *options)
    assert [(r["packing"], r["loop"]) for r in rows] == [
        (packing, loop) for packing in ("shared", "padded") for loop in ("trainer", "bare")
    ]
    assert rows[0]["tokens"] == rows[2]["tokens"]
    assert rows[0]["positions"] < rows[2]["positions"]


@pytest.mark.slow
def test_the_study_of_presets_has_one_run_each_and_says_which_did_not_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = runpy.run_path(str(ROOT / "benchmarks/algorithms.py"), run_name="algorithms")
    needs = {"jsd": "algorithm.reference_path=/teacher", "mix": "replay.buffers.experts.path=/experts.jsonl"}
    start = ["model.init=null", "model.path=/warm"]
    trials = script["trials_of"](["grpo", "jsd", "mix"], seeds=2, steps=40, overrides=start, needs=needs)
    assert [c.name for c in trials] == [f"{p}-seed-{s}" for s in (0, 1) for p in ("grpo", "jsd", "mix")]
    for trial in trials:
        config = trial.config
        assert (config.algorithm.name, config.seed, config.model.path) == (trial.preset, trial.seed, "/warm")
        assert (config.train.steps, config.eval.every) == (40, 14)
        assert (config.algorithm.reference_path is not None) is (trial.preset == "jsd")

    def curve(*accuracies: float) -> list[EvalPoint]:
        return [EvalPoint(14 * i, 2.0 * i, a) for i, a in enumerate(accuracies)]

    curves = dict(zip(trials, [curve(0.2, 0.6, 0.5), curve(0.2, 0.3, 0.1), curve(0.25, 0.5)] * 2, strict=True))
    lines, failed = script["table"](curves)
    assert failed == ["jsd"]
    assert lines[2] == "| `grpo` | 2 | 0.200 | 0.500 | +0.300 (+0.300 to +0.300) | 0.600 |"
    assert script["csv_lines"](curves)[:3] == [
        "preset,seed,policy_version,train_s,accuracy", "grpo,0,0,0.00,0.2000", "grpo,0,14,2.00,0.6000",
    ]  # fmt: skip


@pytest.mark.slow
def test_tiles_of_logits_take_less_memory_and_give_the_same_gradient():
    process = Forked(OUTPUT_HEAD, "--tokens=512", "--hidden=64", "--vocab=40000", "--chunk=16", "--rounds=1", cwd=ROOT)
    said = process.communicate()
    assert process.returncode == 0, said[-2000:]
    [row] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert row["tiled_gib"] < row["whole_gib"] / 4
    assert float(row["gradient_difference"]) < 1e-5


@pytest.mark.parametrize("busy_s", [0.5, 2.0])
def test_steps_count_where_the_other_work_worked_or_rested_all_the_time(busy_s: float):
    summed_up = runpy.run_path(str(ROOT / "benchmarks" / "beside_work.py"))["summed_up"]
    windows = [(0.0, 10.0, None), (10.0, 20.0, 0.75)]
    steps = [(2.0, 1.5, 0.5), (3.0, 2.5, 0.5), (10.2, 9.8, 0.4), (15.0, 15.0 - busy_s, busy_s), (21.0, 19.5, 1.5)]
    found = summed_up(steps, windows, cores=2)
    assert found["steps"] == [2, 1]
    assert (found["quiet_s"], found["beside_s"]) == (0.5, busy_s)
    assert found["speed_per_core_left"] == 0.5 * 2 / (busy_s * 1.25)
