"""Preference pairs: a task's answer is the chosen one, another key of its line the rejected one."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.schema import Config
from ..types import Message, Task


def rejected_key(config: Config, taskset: str) -> str:
    """The key under which an evaluation taskset has its rejected answers."""
    own = config.eval.tasksets.get(taskset)
    return (config.task if own is None else config.task.evaluated(own)).rejected_key


def rejected_answer(task: Task, *, key: str) -> str | list[Message]:
    """The rejected answer: text, or the messages that follow the prompt.

    Raises ValueError naming the task if it is missing or equals the chosen one.
    """
    rejected = task.info.get(key)
    if not isinstance(rejected, str) and not (isinstance(rejected, list) and rejected):
        raise ValueError(
            f"task {task.task_id}: got {sorted(task.info)} besides prompt and answer, expected text or messages "
            f"under {key!r}; "
            "set task.rejected_key (and task.answer_key to the chosen answer's key)"
        )
    if rejected == (task.messages or task.answer):
        raise ValueError(f"task {task.task_id}: chosen and rejected answer are the same; drop the line")
    return rejected


def pairs_among(tasks: Iterable[Task], *, key: str) -> list[Task]:
    """The tasks with a rejected answer: stages may share held-out questions (`eval.path`) that are not pairs."""
    return [task for task in tasks if key in task.info]
