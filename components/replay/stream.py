"""The tasks of a run, draw by draw, and the position in that stream, so that another process draws the same tasks.

An adaptive order depends on what was solved when each epoch began, so a stream cannot be replayed from the start: its
position is the taskset's own position, plus the tasks of all unfinished draws.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ..tasks.mixed import MixedTaskSet
from ..tasks.queue_tasks import NoTaskYet, QueueTaskSet
from ..tasks.taskset import TaskSet
from ..types import Task
from .position import Position

logger = logging.getLogger(__name__)


BREATH = 64
"""The most overlong prompts of a queue that one draw skips: there may be any number, and others are waiting."""


class TaskStream(Iterator[Task]):
    """Endless, or `epochs` passes (the last one may be partial), without tasks whose prompt is too long.

    `num_tokens` gives the length of a prompt, `shortened` the replacement for one that is too long (None: there is
    none; it may raise). `start`: what `position` returned in an earlier run; its open tasks come first.

    Drawing from a queue raises `NoTaskYet` if it is empty now.
    """

    def __init__(
        self,
        taskset: TaskSet | MixedTaskSet | QueueTaskSet,
        *,
        num_tokens: Callable[[Task], int],
        max_prompt_tokens: int,
        shortened: Callable[[Task], Task | None] = lambda task: None,
        epochs: float | None = None,
        start: dict[str, Any] | None = None,
    ) -> None:
        self._taskset = taskset
        self._num_tokens, self._limit, self._shortened = num_tokens, max_prompt_tokens, shortened
        self._most: int | None = None
        if epochs is not None:
            assert not isinstance(taskset, QueueTaskSet), "a rule on settings: nobody knows how long a queue will be"
            self._most = round(epochs * len(taskset))
        self._task_of: dict[int, str] = {}  # by draw, from the first one that is not over
        self._ahead: deque[str] = deque()  # drawn, for groups that nobody has asked for yet
        self._again: list[Task] = []
        self._num_drawn = 0
        self.num_too_long = self.num_shortened = 0
        self._too_long: set[str] = set()  # ids, of a taskset that draws tasks again; each is measured and logged once
        self._num_ids: int | None = None
        if start is not None:
            taskset.reset(start["taskset"])
            by_id = taskset.find(set(start["open_tasks"]))
            if gone := [task_id for task_id in start["open_tasks"] if task_id not in by_id]:
                raise ValueError(f"task: the resumed run needs task {gone[0]}, which no longer exists")
            self._again = [by_id[task_id] for task_id in reversed(start["open_tasks"])]
            self._num_drawn = start["num_drawn"]

    def __next__(self) -> Task:
        task = (self._fitting(self._again.pop()) if self._again else None) or self._fresh()
        self._ahead.append(task.task_id)
        return task

    def admitted(self, draw: int) -> None:
        """The oldest task that is drawn ahead is that of this group."""
        self._task_of[draw] = self._ahead.popleft()

    def returned(self, draw: int, task: Task) -> None:
        """The group of this draw is no more: its task is drawn again, under another number."""
        del self._task_of[draw]
        self._again.append(task)

    def forget_before(self, draw: int) -> None:
        """Every draw before this one is finished."""
        self._task_of = {d: task_id for d, task_id in self._task_of.items() if d >= draw}

    def position(self, position: Position) -> dict[str, Any]:
        """The stream's part of `position`, as JSON-able data: tasks to draw again, and how to continue after them.

        A task that was drawn ahead, for a group that no collector has requested yet, is among the former.
        """
        waiting = [task.task_id for task in reversed(self._again)]
        return {
            "open_tasks": [
                *(self._task_of[d] for d in sorted(self._task_of.keys() & {*position.open_draws})),
                *self._ahead,
                *waiting,
            ],
            "num_drawn": self._num_drawn,
            "taskset": self._taskset.state_dict(),
        }

    def _fresh(self) -> Task:
        for in_a_row in itertools.count(1):
            if self._most is not None and self._num_drawn >= self._most:
                raise StopIteration
            task = next(self._taskset)
            self._num_drawn += 1
            if task.task_id not in self._too_long and (fitting := self._fitting(task)) is not None:
                return fitting
            self._leave_out(task)
            if isinstance(self._taskset, QueueTaskSet) and in_a_row == BREATH:
                raise NoTaskYet(f"a prompt of at most {self._limit} tokens (rollout.max_prompt_tokens)")
        raise AssertionError("counting has no end")

    def _leave_out(self, task: Task) -> None:
        """Raises ValueError once every task of the taskset has been left out, however often each was drawn."""
        self.num_too_long += 1
        if task.task_id in self._too_long:
            return
        length = self._num_tokens(task)
        logger.warning("task %s left out: prompt of %d tokens", task.task_id, length)
        if isinstance(self._taskset, QueueTaskSet):  # draws each task once
            return
        self._too_long.add(task.task_id)
        if self._num_ids is None:
            self._num_ids = len({t.task_id for t in self._taskset.tasks})
        if len(self._too_long) == self._num_ids:
            raise ValueError(
                f"rollout.max_prompt_tokens: got {self._limit}, but every prompt is longer (the last: {length}); "
                "raise it, or set rollout.overlong_prompts=truncate"
            )

    def _fitting(self, task: Task) -> Task | None:
        if self._num_tokens(task) <= self._limit:
            return task
        shorter = self._shortened(task)
        self.num_shortened += shorter is not None
        return shorter
