"""Lag 0 is the reference: with a seed, the same weights to the last bit, however many generators there are, and
however often everything is killed on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ..tiers import sample

TOLERANCE = 1e-4
STEPS = sample(6, 20)


def begin(start: Any, from_warm: list[str], generators: int, ranks: int, *more: str, name: str) -> Any:
    return start(
        "async_rl",
        *from_warm,
        f"stages.async_rl.train.steps={STEPS}",
        "stages.async_rl.train.groups_per_step=16",
        "stages.async_rl.optimizer.warmup_steps=0",
        "staleness.max_policy_lag=0",
        f"rollout.num_generators={generators}",
        f"train.num_ranks={ranks}",
        "eval.at_start=false",
        "eval.at_end=false",
        *more,
        name=name,
    )


def train(start: Any, from_warm: list[str], generators: int, ranks: int) -> tuple[str, Path]:
    run = begin(start, from_warm, generators, ranks, name=f"lockstep-{generators}-{ranks}").wait(240)
    assert run.code == 0, run.output
    assert run.series("train/policy_lag/max") == [0.0] * STEPS
    # Every token is of the trainer's own version, so both can be compared on all of them.
    gaps = run.series("train/logprob_gap/max")
    assert len(gaps) == STEPS
    assert 0 < max(gaps) <= TOLERANCE
    assert len([role for role in run.summary["processes"] if role.startswith(("generator", "trainer"))]) == (
        generators + ranks
    )
    return run.summary["weights_sha256"], run.dir / f"stages/async_rl/checkpoints/step-{STEPS:06d}/hf"


@pytest.fixture(scope="module")
def alone(start_for_all: Any, from_warm: list[str]) -> tuple[str, Path]:
    """One generator, one rank, never disturbed."""
    return train(start_for_all, from_warm, 1, 1)


@pytest.fixture(scope="module")
def of_two_ranks(start_for_all: Any, from_warm: list[str]) -> tuple[str, Path]:
    """Two generators, two ranks."""
    return train(start_for_all, from_warm, 2, 2)


@pytest.mark.long("a run for each number of generators and ranks")
@pytest.mark.timeout(600)
def test_lockstep_gives_the_same_weights_with_one_or_two_generators(
    start: Any, from_warm: list[str], alone: tuple[str, Path], of_two_ranks: tuple[str, Path]
) -> None:
    assert train(start, from_warm, 2, 1)[0] == alone[0]
    assert train(start, from_warm, 1, 2)[0] == of_two_ranks[0]


@pytest.mark.timeout(600)
def test_lockstep_gives_close_weights_with_two_generators_and_two_ranks(
    from_warm: list[str], alone: tuple[str, Path], of_two_ranks: tuple[str, Path]
) -> None:
    warm = Path(from_warm[2].removeprefix("model.path="))
    assert _moved(alone[1], warm) > 0, "nothing was learned: equal hashes say little"
    assert _moved(alone[1], of_two_ranks[1]) <= 1e-5


@pytest.mark.timeout(600)
def test_killing_everything_half_way_and_going_on_gives_the_weights_of_a_run_that_was_left_alone(
    start: Any, from_warm: list[str], alone: tuple[str, Path]
) -> None:
    half = STEPS // 2
    saving = (f"checkpoint.every={half}", "checkpoint.resume=auto")
    command = begin(start, from_warm, 1, 1, *saving, name="killed")
    latest = command.run_dir / "stages/async_rl/checkpoints/latest.json"
    deadline = time.monotonic() + 240
    while not latest.exists():
        assert command.process.poll() is None, command.output()
        assert time.monotonic() < deadline, command.output()
        time.sleep(0.005)
    for process in [command.process, *command.processes()]:
        process.kill()  # no goodbyes, and in no order
    command.process.wait(10)
    assert json.loads(latest.read_text())["step"] == half
    assert not (command.run_dir / "summary.json").exists()
    assert command.left_over(grace_s=15) == []

    run = begin(start, from_warm, 1, 1, *saving, name="killed").wait(240)
    assert run.code == 0, run.output
    assert [row["step"] for row in run.metrics() if "train/grad_norm" in row] == [*range(half + 1, STEPS + 1)]
    assert run.summary["weights_sha256"] == alone[0]


def _moved(a: Path, b: Path) -> float:
    """Largest difference of a weight."""
    from safetensors.torch import load_file

    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)
