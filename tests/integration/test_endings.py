"""How a run ends when it is not allowed to finish: by name, with its own traceback, and with no process left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

RUNNING = "async_rl step 2"


@pytest.mark.timeout(300)
def test_a_generator_that_dies_ends_the_run_by_name(start: Any, from_warm: list[str]) -> None:
    command = start("async_rl", *from_warm, "eval.at_start=false")
    command.wait_for("steps, lag bound", 200)
    engine = [p for p in command.processes() if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name()]
    assert engine, [p.cmdline() for p in command.processes()]
    engine[0].kill()
    run = command.wait(90)
    assert run.code == 1, run.output
    assert run.last_line().startswith("leeway: failed: generator-0:"), run.output
    assert "Traceback" in run.output
    assert run.summary["status"] == "failed"
    assert "generator-0" in run.summary["cause"]
    assert command.left_over(grace_s=15) == []


@pytest.mark.timeout(300)
def test_a_killed_actor_ends_the_run_by_name(start: Any, from_warm: list[str]) -> None:
    command = start("async_rl", *from_warm, "eval.at_start=false")
    command.wait_for("steps, lag bound", 200)
    trainer = next(p for p in command.processes() if "TrainerActor" in " ".join(p.cmdline()))
    trainer.kill()
    run = command.wait(90)
    assert run.code == 1, run.output
    assert run.last_line().startswith("leeway: failed: trainer-0: the process died"), run.output
    assert command.left_over(grace_s=15) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long("takes the same way as SIGINT")),
    ],
)
def test_an_interrupt_saves_a_checkpoint_and_leaves_nothing(
    start: Any, from_warm: list[str], number: signal.Signals, code: int
) -> None:
    command = start("async_rl", *from_warm, "eval.at_start=false")
    command.wait_for("steps, lag bound", 200)
    os.kill(command.process.pid, number)
    run = command.wait(90)
    assert run.code == code, run.output
    assert run.summary["status"] == "interrupted"
    checkpoints = run.dir / "stages/async_rl/checkpoints"
    latest = json.loads((checkpoints / "latest.json").read_text())
    assert (checkpoints / latest["path"] / "hf/model.safetensors").exists()
    assert command.left_over(grace_s=15) == []


@pytest.mark.timeout(300)
def test_a_killed_driver_leaves_nothing(start: Any, from_warm: list[str]) -> None:
    """Nobody is there to clean up: every process has to notice by itself."""
    command = start("async_rl", *from_warm, "eval.at_start=false")
    command.wait_for("steps, lag bound", 200)
    psutil.Process(command.process.pid).kill()
    command.process.wait(10)
    assert command.left_over(grace_s=30) == []


@pytest.mark.timeout(120)
def test_an_environment_that_always_fails_ends_the_run_with_its_reason(
    start: Any, from_warm: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad_env.py").write_text(
        "from leeway import Environment\n"
        "class Bad(Environment):\n"
        "    async def rollout(self, task, policy):\n"
        "        raise KeyError('my own mistake')\n"
    )
    run = start(
        "async_rl",
        *from_warm,
        "env.name=bad_env:Bad",
        "rollout.retries=0",
        "stages.async_rl.train.groups_per_step=4",
        "eval.at_start=false",
        "eval.at_end=false",
    ).wait(100)
    assert run.code == 1, run.output
    assert "my own mistake" in run.last_line()
