"""The benchmarks run, and on a machine with torch and transformers only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "vllm", "torchrl", "tensordict", "omegaconf", "pydantic"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.argv = ["trainer.py", "--groups=2", "--group-size=2", "--steps=1", "--bare", "--packing", "shared", "padded"]
runpy.run_path("benchmarks/trainer.py", run_name="__main__")
"""


@pytest.mark.timeout(180)
def test_publishing_takes_no_more_memory_than_two_buckets_on_any_of_two_ranks(tmp_path):
    """As the benchmark measures it; the whole model is five buckets of 4 MB."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)}
    arguments = ["--shape=small", "--dtype=float32", "--bucket-mb=4", "--repeats=2"]
    done = subprocess.run(
        [sys.executable, "benchmarks/publish.py", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert row["num_buckets"] >= 5
        assert row["extra_mb"] <= 2 * 4 + 3, "two buckets, and what threads and allocators take for themselves"
    assert rows[0]["extra_mb"] > 3, "or nothing was measured"


def test_the_trainers_benchmark_needs_torch_and_transformers_only():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)}
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(r["packing"], r["loop"]) for r in rows] == [
        (packing, loop) for packing in ("shared", "padded") for loop in ("trainer", "bare")
    ]
    assert rows[0]["tokens"] == rows[2]["tokens"]
    assert rows[0]["positions"] < rows[2]["positions"]
