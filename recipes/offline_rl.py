"""Train with a policy loss on stored experiences: an earlier run's groups, or rows with rewards. No engine is started.

    groups on disk, or rows -> advantages, shares -> [batches, one ahead] -> Trainer[N ranks] -> checkpoints/

An experience is a group: answers to one task, with their rewards and the logprobs of the policy that sampled them. A
batch of `train.groups_per_step` groups is one optimizer step. Where nobody wrote logprobs down, those of the weights
that training begins with stand for them. Nothing is sampled here, so there is no lag and no bound on it.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial

from leeway import driver
from leeway.config import Recipe
from leeway.config.rules import EXPERIENCE_RULES
from leeway.recipes.sft import train_offline

MEASURED = ("train/loss/policy", "train/kl/mean", "train/entropy/mean")


async def run(context: driver.StageContext) -> driver.StageResult:
    """Each experience is trained on once in every epoch. What to turn, by config section:

    - `task.name=store`, `task.path`: a run that kept its groups (`replay.keep_groups`)
    - `task.name=jsonl` (parquet, hf, sql), `task.reward_key`, `task.group_key`: rows, each an answer with its reward
    - `train.epochs` or `train.steps`, `train.groups_per_step`, `algorithm.*`, `optimizer.*`: what is learned from them
    - `task.holdout_frac`, `eval.every`: the policy loss on experiences that are not trained on
    """
    config = context.config
    train, held_out = await asyncio.to_thread(driver.load_experiences, config)
    groups_per_step, epochs = config.train.groups_per_step, config.train.epochs
    most = None if epochs is None else max(1, round(epochs * len(train)))
    total_steps = config.train.steps if most is None else math.ceil(most / groups_per_step)
    assert total_steps is not None, "a rule on settings: steps or epochs"
    sets = [train, *([held_out] if len(held_out) else [])]
    if driver.resume_point(context.dir / "checkpoints", config) is not None:
        driver.use_scored(context.dir, *sets)
    data = driver.OfflineData(
        taskset=train,
        total_steps=total_steps,
        size=f"steps of {groups_per_step} groups, {len(train)} groups in all, {len(held_out)} held out",
        batches=lambda start: driver.Batches(
            train,
            make=train.group,
            size=groups_per_step,
            collate=partial(driver.assembled, config),
            most=most,
            start=start,
        ),
        split=lambda batch: (batch.steps[0], batch.metrics),
        held_out=lambda: {held_out.name: driver.whole_set(config, held_out)} if len(held_out) else {},
        measured=MEASURED,
        prepare=lambda launcher: driver.score_missing(context, launcher, *sets),
    )
    return await train_offline(context, data, loss_name="train/loss/policy")


RECIPE = Recipe(run=run, generates=False, trains_on="experiences", rules=EXPERIENCE_RULES)
