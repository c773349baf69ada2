"""The tasks of a run, draw by draw, and where that stream stands: so that another process draws the same ones.

An adaptive order follows from what was solved when each epoch began, so a stream cannot be replayed from the start: its
position is the taskset's own, with the tasks of all draws that are not over yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from ..tasks.mixed import MixedTaskSet
from ..tasks.queue_tasks import QueueTaskSet
from ..tasks.taskset import TaskSet
from ..types import Task
from .position import Position

logger = logging.getLogger(__name__)


class TaskStream(Iterator[Task]):
    """For ever, or `epochs` passes (the last one may be a part), without tasks whose prompt is too long.

    `num_tokens` says how long a prompt is, `shortened` what to take in place of one that is too long (None: nothing; it
    may raise). `start`: what `position` said in an earlier run, with `draws` (those that
    are drawn first, again, and then where to go on); its tasks come first.
    """

    def __init__(
        self,
        taskset: TaskSet | MixedTaskSet | QueueTaskSet,
        *,
        num_tokens: Callable[[Task], int],
        max_prompt_tokens: int,
        shortened: Callable[[Task], Task | None] = lambda task: None,
        epochs: float | None = None,
        draws: Position | None = None,
        start: dict[str, Any] | None = None,
    ) -> None:
        self._taskset = taskset
        self._num_tokens, self._limit, self._shortened = num_tokens, max_prompt_tokens, shortened
        self._most = None if epochs is None else round(epochs * len(taskset))
        self._numbers = (draws or Position()).draws()
        self._task_of: dict[int, str] = {}  # by draw, from the first one that is not over
        self._again: list[Task] = []
        self._num_drawn = 0
        self.num_too_long = self.num_shortened = 0
        if start is not None:
            taskset.load_state_dict(start["taskset"])
            by_id = {task.task_id: task for task in taskset.tasks}
            self._again = [by_id[task_id] for task_id in reversed(start["open_tasks"])]
            self._num_drawn = start["num_drawn"]
        self._source = taskset.forever()

    @property
    def num_again(self) -> int:
        """Tasks of an earlier run that are still to be drawn again: nobody has to wait for them."""
        return len(self._again)

    def __next__(self) -> Task:
        task = (self._fitting(self._again.pop()) if self._again else None) or self._fresh()
        self._task_of[next(self._numbers)] = task.task_id
        return task

    def forget_before(self, draw: int) -> None:
        """Every draw before this one is over."""
        self._task_of = {d: task_id for d, task_id in self._task_of.items() if d >= draw}

    def position(self, position: Position) -> dict[str, Any]:
        """The stream's part of `position`, as JSON-able data: tasks to draw again, and how to go on after them.

        A task that was drawn ahead, for a group that nobody has asked for yet, is among the first.
        """
        ahead = [d for d in self._task_of if d >= position.next_draw]
        waiting = [task.task_id for task in reversed(self._again)]
        return {
            "open_tasks": [self._task_of[d] for d in sorted({*position.open_draws, *ahead} & self._task_of.keys())]
            + waiting,
            "num_drawn": self._num_drawn,
            "taskset": self._taskset.state_dict(),
        }

    def _fresh(self) -> Task:
        for in_a_row in range(len(self._taskset)):
            if self._most is not None and self._num_drawn >= self._most:
                raise StopIteration
            self._num_drawn += 1
            task = next(self._source)
            if (fitting := self._fitting(task)) is not None:
                return fitting
            self.num_too_long += 1
            length = self._num_tokens(task)
            logger.warning("task %s left out: prompt of %d tokens (%d in a row)", task.task_id, length, in_a_row + 1)
        raise ValueError(
            f"rollout.max_prompt_tokens: got {self._limit}, but every prompt is longer (the last: {length}); raise it"
        )

    def _fitting(self, task: Task) -> Task | None:
        if self._num_tokens(task) <= self._limit:
            return task
        shorter = self._shortened(task)
        self.num_shortened += shorter is not None
        return shorter
