"""Lag 0 is the reference: with a seed, the same weights to the last bit, however many generators there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 1e-4
STEPS = 5


@pytest.mark.timeout(420)
def test_lockstep_gives_the_same_weights_with_one_or_two_generators_and_close_ones_with_two_ranks(
    start: Any, from_warm: list[str]
) -> None:
    def train(generators: int, ranks: int) -> tuple[str, Path]:
        name = f"lockstep-{generators}-{ranks}"
        command = start(
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
            name=name,
        )
        run = command.wait(120)
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

    (one, of_one), (same, _) = train(1, 1), train(2, 1)
    two, of_two = train(2, 2)
    assert one == same
    if os.environ.get("LEEWAY_LONG_TESTS"):  # make test-long: another minute for the same with two ranks
        assert train(1, 2)[0] == two
    warm = Path(from_warm[2].removeprefix("model.path="))
    assert _moved(of_one, warm) > 0, "nothing was learned: equal hashes say little"
    assert _moved(of_one, of_two) <= 1e-5


def _moved(a: Path, b: Path) -> float:
    """Largest difference of a weight."""
    from safetensors.torch import load_file

    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)
