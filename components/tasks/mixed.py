"""Several tasksets as one, mixed by weight, each with its own order and its own epochs."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

from ..types import Task
from .taskset import TaskSet


class MixedTaskSet:
    """Draws from each taskset in proportion to its weight, evenly spread: after n draws each has had n x its share,
    to within one. A taskset that has ended begins its next epoch, so none is ever exhausted.

    `iter()` yields as many tasks as all sets have in total. Positions are saved and restored as in a `TaskSet`.
    """

    def __init__(self, tasksets: Mapping[str, TaskSet], weights: Mapping[str, float], *, name: str = "mixed") -> None:
        self.name = name
        self._sets = dict(tasksets)
        total = sum(weights[n] for n in self._sets)
        self._shares = {n: weights[n] / total for n in self._sets}
        self._drawn = dict.fromkeys(self._sets, 0)
        self._streams = {n: s.forever() for n, s in self._sets.items()}
        self.tasks = tuple(task for taskset in self._sets.values() for task in taskset.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        left = len(self) - sum(self._drawn.values()) % len(self)
        for _ in range(left):
            yield self._draw()

    def forever(self) -> Iterator[Task]:
        while True:
            yield self._draw()

    def find(self, task_ids: Container[str]) -> dict[str, Task]:
        """The tasks with these ids, by id."""
        return {task.task_id: task for task in self.tasks if task.task_id in task_ids}

    def texts(self) -> Iterator[str]:
        for taskset in self._sets.values():
            yield from taskset.texts()

    def record(self, task_id: str, pass_rate: float) -> None:
        """A group of this task was finished; `pass_rate` is the share of its answers that were right."""
        for taskset in self._sets.values():
            taskset.record(task_id, pass_rate)

    @property
    def epoch(self) -> int:
        return sum(self._drawn.values()) // len(self)

    def state_dict(self) -> dict[str, Any]:
        """The exact position of every taskset, as JSON-able data."""
        sets = {name: taskset.state_dict() for name, taskset in self._sets.items()}
        return {"fingerprint": self.fingerprint(), "drawn": dict(self._drawn), "sets": sets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("fingerprint") != self.fingerprint():
            raise ValueError(
                f"taskset {self.name}: saved position has fingerprint {state.get('fingerprint')}, these tasks have "
                f"{self.fingerprint()}; resume with the task section and the seed of the saved run"
            )
        self._drawn = {name: int(count) for name, count in state["drawn"].items()}
        for name, taskset in self._sets.items():
            taskset.load_state_dict(state["sets"][name])
        self._streams = {name: taskset.forever() for name, taskset in self._sets.items()}

    def fingerprint(self) -> str:
        """16 hex digits that change with any taskset or weight."""
        content = "\n".join(f"{n} {self._shares[n]!r} {s.fingerprint()}" for n, s in self._sets.items())
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _draw(self) -> Task:
        total = sum(self._drawn.values()) + 1
        # The set that is furthest behind its share; the first one in a tie.
        name = max(self._sets, key=lambda n: total * self._shares[n] - self._drawn[n])
        task = next(self._streams[name])
        self._drawn[name] += 1
        return task
