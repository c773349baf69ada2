"""How a run ends when it is not allowed to finish: by name, with its own traceback, and with no process left.

Interrupts, the death of the driver and mistakes in a user's code end runs that have to show something else first:
test_plugins.py and test_auxiliary.py.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
def test_a_killed_actor_ends_the_run_by_name(start: Any, from_warm: list[str]) -> None:
    command = start("async_rl", *from_warm, "eval.at_start=false")
    command.wait_for("steps, lag bound", 200)
    trainer = next(p for p in command.processes() if "TrainerActor" in " ".join(p.cmdline()))
    trainer.kill()
    run = command.wait(90)
    assert run.code == 1, run.output
    assert run.last_line().startswith("leeway: failed: trainer-0: the process died"), run.output
    assert command.left_over(grace_s=15) == []
