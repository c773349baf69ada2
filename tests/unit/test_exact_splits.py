"""The gradient of a batch does not depend on how it is cut: over passes, ranks, layouts or tiles of logits.

For every aggregation of the losses, in float32, within 1e-5 of the gradient's norm.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from leeway.algorithms.aggregation import AGGREGATIONS
from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.objective import Objective, PolicyObjective, SupervisedObjective
from leeway.trainer.microbatch import split_into_microbatches
from leeway.trainer.trainer import Trainer

from ..tiers import sample
from ..trainers import batch_of, end_group, free_address, gradients, in_pairs, random_trajectories, settings_of

OBJECTIVES: dict[str, Objective] = {
    how: PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation=how, aggregation_length=20)
    for how in AGGREGATIONS
}
OBJECTIVES["supervised"] = SupervisedObjective()
TRAJECTORIES = in_pairs(random_trajectories(1, 16))
WHOLE = {"max_tokens_per_microbatch": 10_000, "logprob_chunk_tokens": 10_000}


@functools.cache
def in_passes(number: int, packing: str) -> dict[str, Any]:
    """Settings under which the batch is cut into so many passes."""
    for limit in range(20, 400):
        if len(split_into_microbatches(batch_of(TRAJECTORIES), max_tokens=limit, packing=packing)) == number:  # type: ignore[arg-type]
            return {"max_tokens_per_microbatch": limit, "packing": packing}
    raise AssertionError(f"no limit gives {number} passes")


def check_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()

    def norm(tensors: list[torch.Tensor]) -> float:
        return sum(float(t.double().square().sum()) for t in tensors) ** 0.5

    total = norm(list(expected.values()))
    assert total > 0
    assert norm([got[name] - gradient for name, gradient in expected.items()]) <= 1e-5 * total
    for name, gradient in expected.items():
        # Some are 0 but for rounding: a key bias moves no attention score.
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * total, name


class OneRank:
    """Gradients of a single rank. A trainer is made once for each way to cut, and given one objective after another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trainers: dict[str, Trainer] = {}

    def gradient(self, objective: Objective, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
        if not dist.is_initialized():  # another test has ended the group, and with it these trainers
            self._trainers.clear()
        key = repr(changes)
        if key not in self._trainers:
            settings = settings_of(self._path, **(WHOLE | changes))
            self._trainers[key] = Trainer(settings, rank=0, init_method=free_address())
        trainer = self._trainers[key]
        trainer._objective = objective
        trainer._optimizer.zero_grad()
        trainer.forward_backward(batch_of(TRAJECTORIES))
        return gradients(trainer)


@pytest.fixture(scope="module")
def gradients_of_one_rank(model_path: Path, group_of_one_rank: None) -> OneRank:
    return OneRank(model_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", OBJECTIVES)
def test_one_rank_cuts_as_it_likes(gradients_of_one_rank: OneRank, how: str) -> None:
    def gradient(**changes: Any) -> dict[str, torch.Tensor]:
        return gradients_of_one_rank.gradient(OBJECTIVES[how], changes)

    expected = gradient(packing="padded")
    cuts = [
        {"packing": "packed"},
        in_passes(5, "padded"),
        in_passes(5, "shared") | {"logprob_chunk_tokens": 7},
    ]
    one_at_a_time = [
        {"packing": "shared"},
        {"packing": "shared", "logprob_chunk_tokens": 7},
        {"packing": "padded", "logprob_chunk_tokens": 50},
        in_passes(5, "packed"),
    ]
    for changes in cuts + sample([], one_at_a_time):
        check_same(gradient(**changes), expected)


RANK_1 = """
from leeway.trainer.trainer import Trainer
all_settings, address, share = work
for settings in all_settings:
    trainer = Trainer(settings, rank=1, init_method=address)
    trainer.forward_backward(share)
    for parameter in trainer._model.parameters():
        parameter.grad.full_tensor()
trainer.close()
"""


@pytest.mark.slow
def test_two_ranks_add_up_to_one(make, model_path, other_ranks):
    split, address = 5, free_address()  # unequal shares, a group cut in two, several passes against one
    limits = {"max_tokens_per_microbatch": 60}
    settings = [settings_of(model_path, num_ranks=2, objective=o, **limits) for o in OBJECTIVES.values()]
    other_ranks.begin(RANK_1, {1: (settings, address, batch_of(TRAJECTORIES, share=slice(split, None)))})
    expected = []
    for objective in OBJECTIVES.values():
        alone = make(objective=objective, **WHOLE)
        alone.forward_backward(batch_of(TRAJECTORIES))
        expected.append(gradients(alone))
    end_group()
    for each, gradient in zip(settings, expected, strict=True):
        together = Trainer(each, rank=0, init_method=address)
        together.forward_backward(batch_of(TRAJECTORIES, share=slice(0, split)))
        check_same(gradients(together), gradient)
    end_group()
    other_ranks.results()
