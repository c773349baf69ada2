"""Preference pairs: a task's answer is the chosen one, another key of its line the rejected one."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.schema import Config
from ..types import Task


def rejected_key(config: Config, taskset: str) -> str:
    """Under which key a taskset that is measured on has its rejected answers."""
    return config.eval.tasksets.get(taskset, {}).get("rejected_key", config.task.rejected_key)


def rejected_answer(task: Task, *, key: str) -> str:
    """The answer that was not preferred. Raises ValueError naming the task where it is missing or equals the other."""
    rejected = task.info.get(key)
    if not isinstance(rejected, str):
        raise ValueError(
            f"task {task.task_id}: got {sorted(task.info)} beside prompt and answer, expected a text under {key!r}; "
            "set task.rejected_key (and task.answer_key to the chosen answer's key)"
        )
    if rejected == task.answer:
        raise ValueError(f"task {task.task_id}: chosen and rejected answer are the same; drop the line")
    return rejected


def pairs_among(tasks: Iterable[Task], *, key: str) -> list[Task]:
    """Those with a rejected answer: stages may share held-out questions (`eval.path`) that are no pairs."""
    return [task for task in tasks if key in task.info]
