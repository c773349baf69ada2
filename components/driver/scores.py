"""How hard tasks are for a model, written beside the tasks as their source has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.inputs import TaskConfig
from ..failures import PartFailed
from ..tasks.prepare import write_rows
from ..tasks.questions import Row
from ..tasks.taskset import TaskSet, build_taskset, rows_by_id
from ..types import Task, Trajectory


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of one task. `pass_rate`: the share of its answers that are right; `reward`: their mean reward."""

    pass_rate: float
    reward: float
    answers: int


def tasks_with_rows(config: Config) -> tuple[list[Task], list[Row]]:
    """(the tasks that a run would train on, in their source's order; the row of each)."""
    taskset = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
    assert isinstance(taskset, TaskSet), "a rule on settings: one source that ends"
    rows = rows_by_id(config.task, config.seed)
    return list(taskset.tasks), [rows[task.task_id.partition("-")[0]] for task in taskset.tasks]


def scores_of(answers: Sequence[Sequence[Trajectory] | str], *, solved: float) -> list[Score | None]:
    """One for each task; None for a task that failed. Raises PartFailed if all did."""
    scores = [None if isinstance(own, str) else _score(own, solved) for own in answers]
    if all(score is None for score in scores):
        why = next((own for own in answers if isinstance(own, str)), "there are none")
        raise PartFailed("scoring", f"all {len(scores)} tasks failed, the first one: {why}")
    return scores


def write_scored(file: Path, task: TaskConfig, rows: Sequence[Row], scores: Sequence[Score | None]) -> None:
    """The rows as jsonl, under the keys that `task` reads them by, whole or not at all; those that failed are left out.

    `difficulty` is 1 - `pass_rate`.
    """
    scored = zip(rows, scores, strict=True)
    write_rows(file, task, ((row, _further(score)) for row, score in scored if score is not None))


def _score(answers: Sequence[Trajectory], solved: float) -> Score:
    right = [t.metrics.get("exact_match", float(t.reward >= solved)) == 1.0 for t in answers]
    return Score(
        pass_rate=sum(right) / len(right), reward=sum(t.reward for t in answers) / len(answers), answers=len(answers)
    )


def _further(score: Score) -> dict[str, Any]:
    return {
        "pass_rate": score.pass_rate,
        "difficulty": 1.0 - score.pass_rate,
        "mean_reward": score.reward,
        "answers_scored": score.answers,
    }
