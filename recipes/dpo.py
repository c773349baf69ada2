"""Direct preference optimization on pairs of a chosen and a rejected answer.

    taskset -> pairs of prompt + answer tokens -> [batches, one ahead] -> Trainer[N ranks] -> checkpoints/

A task's answer (`task.answer_key`) is the chosen one; the rejected one is under `task.rejected_key`. The reference is
the model that training starts from, or `algorithm.reference_path`. Held-out pairs (`task.holdout_frac` or `eval.path`)
are compared before and after, and every `eval.every` steps. Everything else is as in supervised finetuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leeway import driver
from leeway.config import Config, Recipe
from leeway.config.rules import PREFERENCE_RULES
from leeway.recipes.sft import data_of_tasks, train_offline
from leeway.types import Trajectory


async def run(context: driver.StageContext) -> driver.StageResult:
    """Train for `train.steps` (or `train.epochs`) on batches of `train.batch_size` answers, two of each pair."""
    data = data_of_tasks(context, batches=batches_of, held_out=held_out_pairs)
    return await train_offline(context, data, loss_name="train/loss/dpo")


RECIPE = Recipe(run=run, generates=False, trains_on="pairs", rules=PREFERENCE_RULES)


def batches_of(
    config: Config,
    taskset: driver.TaskSet | driver.MixedTaskSet,
    prompter: driver.Prompter,
    *,
    start: dict[str, Any] | None = None,
) -> driver.Batches[list[driver.TrainBatch]]:
    """`train.batch_size` answers in each batch, dealt to the ranks; a pair is never split."""
    return driver.Batches(
        taskset,
        make=lambda task: driver.pair_of(task, prompter, rejected_key=config.task.rejected_key),
        size=config.train.batch_size // 2,
        collate=lambda pairs: _shares(pairs, config.train.num_ranks),
        start=start,
    )


def held_out_pairs(config: Config, prompter: driver.Prompter) -> dict[str, list[driver.TrainBatch]]:
    """The pairs among the evaluation tasks; tasksets without any are omitted."""
    shares = {}
    for evalset in driver.build_evalsets(config):
        key = driver.rejected_key(config, evalset.name)
        pairs = [
            driver.pair_of(task, prompter, rejected_key=key) for task in driver.pairs_among(evalset.tasks, key=key)
        ]
        if pairs:
            shares[evalset.name] = _shares(pairs, config.train.num_ranks)
    return shares


def _shares(pairs: Sequence[tuple[Trajectory, Trajectory]], num_ranks: int) -> list[driver.TrainBatch]:
    num_tokens = sum(len(t.response_tokens) for pair in pairs for t in pair)
    shares = [[t for pair in pairs[rank::num_ranks] for t in pair] for rank in range(num_ranks)]
    return [
        driver.batch_trajectories(share, [0.0] * len(share), num_sequences=2 * len(pairs), num_tokens=num_tokens)
        for share in shares
    ]
