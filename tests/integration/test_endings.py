"""How a run ends when it is not allowed to finish: within its deadline, by the right name, and with nothing left.

Where any part will do, the run has no other: one_part.py. Engines and generators that die, interrupts, the death of the
driver and mistakes in a user's code are in runs that have to show something else first: test_learning.py,
test_lockstep.py, test_plugins.py and test_auxiliary.py. Runs without Ray: tests/unit/test_endings.py. The whole grid of
parts, acts and phases is a benchmark, which `make test-long` runs: benchmarks/chaos.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ENGINE, ROOT, left_by, part_of, shared_memory_of, temporary_folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the runs of a test have their temporary files."""
    with temporary_folder() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        yield folder


ONE_PART = str(Path(__file__).with_name("one_part.py"))


@pytest.fixture
def on_untrained(untrained: Path, of_sums: list[str]) -> list[str]:
    """Overrides of a supervised stage: a model that is there need not be built."""
    return ["model.init=null", f"model.path={untrained}", *of_sums]


@pytest.fixture
def of_one_part(on_untrained: list[str]) -> list[str]:
    return ["stages=null", *on_untrained]


@pytest.mark.long("in test_learning.py an engine dies once, and its run goes on")
@pytest.mark.timeout(900)
def test_a_generator_that_dies_is_replaced_as_often_as_is_allowed(
    start: Any, from_untrained: list[str], temporary: Path
) -> None:
    command = start("async_rl", *from_untrained, "eval.at_start=false", "cluster.restarts=1")
    command.wait_for("steps, lag bound", 400)
    part_of(command, *ENGINE).kill()
    command.wait_for("generator-0 serves again", 400)
    engine = part_of(command, *ENGINE)
    shared = shared_memory_of(engine, temporary)
    engine.kill()
    run = command.wait(300)
    assert run.code == 1, run.output
    assert run.last_line().startswith("leeway: failed: generator-0:"), run.output
    assert "all 1 restarts are used up (cluster.restarts)" in run.summary["cause"]
    assert run.summary["status"] == "failed"
    assert left_by(command, temporary) == []
    assert shared
    assert [path for path in shared if path.exists()] == []


@pytest.mark.long("as one of Ray's processes, or a generator in test_lockstep.py")
@pytest.mark.timeout(900)
def test_a_killed_actor_ends_the_run_by_name(start: Any, of_one_part: list[str], temporary: Path) -> None:
    command = start(ONE_PART, *of_one_part)
    command.wait_for("its part is ready", 400)
    part_of(command, "ParameterServerActor").kill()
    run = command.wait(300)
    assert run.code == 1, run.output
    assert run.last_line().startswith("leeway: failed: param_server: the process died"), run.output
    assert run.summary["status"] == "failed"
    assert left_by(command, temporary) == []


@pytest.mark.timeout(900)
def test_a_run_without_the_head_of_its_cluster_ends_by_that_name_before_ray_ends_it(
    start: Any, of_one_part: list[str], temporary: Path
) -> None:
    command = start(ONE_PART, *of_one_part)
    command.wait_for("its part is ready", 400)
    part_of(command, "gcs_server").kill()
    run = command.wait(300)
    assert run.code == 1, run.output
    assert run.last_line().startswith("leeway: failed: ray: the gcs_server process died"), run.output
    assert run.summary["status"] == "failed"
    assert left_by(command, temporary) == []


@pytest.mark.timeout(900)
def test_an_interrupt_has_its_own_exit_code_although_the_trainer_stands_still(
    start: Any, on_untrained: list[str], temporary: Path
) -> None:
    command = start("sft", *on_untrained)
    command.wait_for_steps(1, 400, stage="sft")
    part_of(command, "TrainerActor").send_signal(signal.SIGSTOP)
    command.process.send_signal(signal.SIGTERM)
    run = command.wait(300)
    assert run.code == 143, run.output
    assert "interrupted by SIGTERM; saving a checkpoint failed: trainer-0" in run.last_line(), run.output
    assert run.summary["status"] == "interrupted"
    assert left_by(command, temporary) == []


@pytest.mark.long("every part, act and phase, each in a run of its own: an hour")
@pytest.mark.timeout(3 * 3600)
def test_every_ending_of_the_grid_is_right_and_leaves_nothing(warm: Path, tmp_path: Path) -> None:
    script = ROOT / "benchmarks/chaos.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path), "--model", str(warm)], check=True)
    endings = [json.loads(line) for line in (tmp_path / "chaos.jsonl").read_text().splitlines()]
    assert [e for e in endings if not e["right"] or e["left"]] == []
