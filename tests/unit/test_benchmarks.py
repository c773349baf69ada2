"""The benchmarks run, and on a machine with torch and transformers only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "vllm", "torchrl", "tensordict", "omegaconf", "pydantic"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def rows_of(benchmark: str, *args: str) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)}
    command = [sys.executable, "-c", WITHOUT, f"benchmarks/{benchmark}", *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_trainers_benchmark_needs_torch_and_transformers_only():
    options = ["--groups=2", "--group-size=2", "--steps=1", "--bare", "--packing", "shared", "padded"]
    rows = rows_of("trainer.py", *options)
    assert [(r["packing"], r["loop"]) for r in rows] == [
        (packing, loop) for packing in ("shared", "padded") for loop in ("trainer", "bare")
    ]
    assert rows[0]["tokens"] == rows[2]["tokens"]
    assert rows[0]["positions"] < rows[2]["positions"]


def test_tiles_of_logits_take_less_memory_and_give_the_same_gradient():
    [row] = rows_of("output_head.py", "--tokens=512", "--hidden=64", "--vocab=40000", "--chunk=16", "--rounds=1")
    assert row["tiled_gib"] < row["whole_gib"] / 4
    assert float(row["gradient_difference"]) < 1e-5
