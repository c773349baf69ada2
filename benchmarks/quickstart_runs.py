"""Runs of the quickstart's RL stage with other settings, for the benchmarks beside this file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def leeway(*args: str, capture: bool = False) -> str:
    """Run the command in this folder, where environments and rewards of the benchmarks are found."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()", *args]
    done = subprocess.run(
        command, cwd=HERE, env=env, check=True, stdout=subprocess.PIPE if capture else None, text=True
    )
    return done.stdout or ""


def warmed_up(out: Path, project: str) -> Path:
    """The quickstart's model after its supervised stage; made once."""
    folder = out / project / "warm_up"
    if not (folder / "summary.json").exists():
        leeway("run", "sft", "--config", "quickstart", f"output_dir={out}", f"project={project}", "name=warm_up")
    return next(iter(sorted((folder / "stages/sft/checkpoints").glob("step-*/hf"))))


def finished_run(out: Path, project: str, name: str, model: Path | None, *overrides: str) -> Path:
    """The folder of a run from `model` (None: as the config builds it); what is there already is not run again."""
    folder = out / project / name
    if not (folder / "summary.json").exists():
        start = () if model is None else ("model.init=null", f"model.path={model}")
        leeway(
            *("run", "async_rl", "--config", "quickstart", f"output_dir={out}", f"project={project}", f"name={name}"),
            *("stages.sft=null", *start, "eval.at_start=false", "eval.at_end=false", "checkpoint.save_hf=never"),
            *("monitor.console=off", *overrides),
        )
    return folder


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of the RL stage."""
    lines = (folder / "stages/async_rl/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def series(folder: Path, name: str) -> list[float]:
    return [row[name] for row in rows(folder) if name in row]


def step_seconds(folder: Path) -> float:
    """Mean seconds per step over the last four fifths of the steps: all of a run but its start."""
    seconds = series(folder, "step/total_s")
    settled = seconds[len(seconds) // 5 :]
    return sum(settled) / len(settled)
