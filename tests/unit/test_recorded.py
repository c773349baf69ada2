"""The trainer's logprobs of the rollouts that people read, from the pass that was trained to their rows."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leeway.algorithms.grpo import GRPO
from leeway.replay.assemble import Assembler
from leeway.train_batch import TrainBatch
from leeway.trainer.actor import TrainedStep, TrainerActor
from leeway.types import Group, Trajectory, batch_trajectories

from ..trainers import random_trajectories

U, RANKS, SIZE = 2, 2, 4


def grouped(trajectories: list[Trajectory]) -> list[Group]:
    """Groups of `SIZE` with one prompt each; all rewards of every third one are equal."""
    groups = []
    for first in range(0, len(trajectories), SIZE):
        prompt = trajectories[first].prompt_tokens
        own = [
            dataclasses.replace(t, prompt_tokens=prompt, reward=float(i % 2) * (first // SIZE % 3 != 2))
            for i, t in enumerate(trajectories[first : first + SIZE])
        ]
        groups.append(Group.of(group_id=first, task_id=f"task-{first}", trajectories=own))
    return groups


async def step_of(actor: TrainerActor, share: TrainBatch) -> TrainedStep:
    return await actor.train_step(share, False)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["shared", "packed"])
def test_a_planted_difference_of_trainer_and_engine_comes_out_at_its_token(
    make: Callable[..., Any], packing: str, tmp_path: Path
) -> None:
    """Through steps, ranks and small microbatches: what the engine said is off by a number of each token's own."""
    rng = random.Random(5)
    trainer = make(packing=packing, max_tokens_per_microbatch=30)
    drawn = random_trajectories(5, 6 * SIZE)
    planted, moved = {}, []
    for group in grouped(drawn):
        right = trainer.token_logprobs(
            batch_trajectories(group.trajectories(), [0.0] * SIZE, num_sequences=SIZE, num_tokens=1)
        )
        each = iter(right.tolist())
        own = []
        for i, t in enumerate(group.trajectories()):
            off = [rng.uniform(-1, 1) * sampled for sampled in t.loss_mask]
            planted[group.group_id, i] = off
            own.append(dataclasses.replace(t, behavior_logprobs=[next(each) - d for d in off]))
        moved.append(Group.of(group_id=group.group_id, task_id=group.task_id, trajectories=own))
    batch = Assembler(
        advantage=GRPO(eps=1e-6), updates_per_batch=U, num_ranks=RANKS, skip_zero_advantage=True, rollouts_per_step=9
    )(0, moved)
    actor = TrainerActor(role="trainer-0", log_file=tmp_path / "log", log_level="ERROR", cores=[])
    trainer.optim_step = dict  # the weights stay: both steps are held to one truth
    actor._trainer = trainer

    seen, ranks_that_saw = set(), set()
    for shares, rollouts in zip(batch.steps, batch.rollouts, strict=True):
        for rank, share in enumerate(shares):
            for number, logprobs in asyncio.run(step_of(actor, share)).logprobs.items():
                row = rollouts[number]
                key = row["group_id"], row["sequence_id"]
                assert key not in seen, "each is one rank's"
                seen.add(key)
                ranks_that_saw.add(rank)
                off = [a - b for a, b in zip(logprobs, row["behavior_logprobs"], strict=True)]
                assert off == pytest.approx(planted[key], abs=2e-5)
    readable = {(r["group_id"], r["sequence_id"]) for rows in batch.rollouts for r in rows}
    trained = {key for key in readable if key[0] // SIZE % 3 != 2}
    assert seen == trained, "all but those without an advantage, which no pass computed"
    assert trained != readable
    assert ranks_that_saw == {0, 1}


@pytest.mark.slow
def test_nothing_is_kept_of_a_share_in_which_nothing_is_recorded(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make()
    batch = Assembler(
        advantage=GRPO(eps=1e-6), updates_per_batch=1, num_ranks=1, skip_zero_advantage=True, rollouts_per_step=0
    )(0, grouped(random_trajectories(1, SIZE)))
    ((share,),) = batch.steps
    assert share.recorded is None
    actor = TrainerActor(role="trainer-0", log_file=tmp_path / "log", log_level="ERROR", cores=[])
    actor._trainer = trainer
    assert asyncio.run(step_of(actor, share)).logprobs == {}
