"""The order in which an epoch visits its tasks: as they come, shuffled, from easy to hard, or by pass rate."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ..types import Task

LEAST_CHANCE = 0.1
"""A task that is always or never solved still comes up in this share of the epochs, because that may change."""

MEMORY = 0.5
"""Weight of the old pass rate against the newest."""


def order_of(
    tasks: Sequence[Task],
    how: str,
    *,
    seed: int,
    epoch: int,
    difficulty_key: str | None,
    pass_rates: Mapping[str, float],
) -> list[int]:
    """Indices of the tasks of one epoch. Decided by its arguments alone, the same on every machine.

    `adaptive`: every task in the first epoch; later a task with pass rate p comes up with a chance of 4 p (1 - p), at
    least `LEAST_CHANCE`: groups that all fail or all succeed teach nothing. Others have each task exactly once.
    """
    order = list(range(len(tasks)))
    # A text seed keeps (seed 0, epoch 1) and (seed 1, epoch 0) apart; Python hashes it the same everywhere.
    draw = random.Random(f"{seed}/{epoch}")
    if how == "easy_to_hard":
        return sorted(order, key=lambda i: difficulty_of(tasks[i], difficulty_key))
    if how in ("shuffle", "adaptive"):
        draw.shuffle(order)
    if how == "adaptive":
        chosen = [i for i in order if draw.random() < _chance(pass_rates.get(tasks[i].task_id))]
        return chosen or order
    return order


def difficulty_of(task: Task, key: str | None) -> float:
    """The number under `key` of the task's row. Raises ValueError naming the task."""
    value = task.info.get(key) if key is not None else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"task.difficulty_key: task {task.task_id} has {value!r} under {key!r}, expected a number in every row; "
            "name another key, or use task.order=shuffle"
        )
    return float(value)


def updated(old: float | None, newest: float) -> float:
    """A running pass rate."""
    return newest if old is None else MEMORY * old + (1 - MEMORY) * newest


def _chance(pass_rate: float | None) -> float:
    return 1.0 if pass_rate is None else max(LEAST_CHANCE, 4 * pass_rate * (1 - pass_rate))
