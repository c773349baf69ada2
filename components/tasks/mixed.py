"""Several tasksets as one, mixed by weight, each with its own order and its own epochs."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torchdata.nodes import BaseNode

from ..types import Task
from .taskset import TaskSet


class MixedTaskSet(BaseNode[Task]):
    """Draws from each taskset in proportion to its weight, evenly spread: after n draws each has had n x its share,
    plus or minus one. A taskset that has ended begins its next epoch, so none is ever exhausted.

    torchdata's `MultiNodeWeightedSampler` draws at random, so shares hold on average only, and its state holds a
    generator's tensor; checkpoints keep positions as JSON.
    """

    def __init__(self, tasksets: Mapping[str, TaskSet], weights: Mapping[str, float], *, name: str = "mixed") -> None:
        super().__init__()
        self.name = name
        self._sets = dict(tasksets)
        total = sum(weights[n] for n in self._sets)
        self._shares = {n: weights[n] / total for n in self._sets}
        self.tasks = tuple(task for taskset in self._sets.values() for task in taskset.tasks)
        self.reset()

    def __len__(self) -> int:
        return len(self.tasks)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """As `TaskSet.reset`, for every taskset."""
        super().reset(initial_state)
        if initial_state is not None and initial_state.get("fingerprint") != self.fingerprint():
            raise ValueError(
                f"taskset {self.name}: saved position has fingerprint {initial_state.get('fingerprint')}, these tasks "
                f"have {self.fingerprint()}; resume with the task section and the seed of the saved run"
            )
        state = initial_state or {"drawn": dict.fromkeys(self._sets, 0), "sets": dict.fromkeys(self._sets)}
        self._drawn = {name: int(count) for name, count in state["drawn"].items()}
        for name, taskset in self._sets.items():
            taskset.reset(state["sets"][name])

    def next(self) -> Task:
        total = sum(self._drawn.values()) + 1
        # The set that is furthest behind its share; the first one in a tie.
        name = max(self._sets, key=lambda n: total * self._shares[n] - self._drawn[n])
        task = next(self._sets[name])
        self._drawn[name] += 1
        return task

    def get_state(self) -> dict[str, Any]:
        sets = {name: taskset.state_dict() for name, taskset in self._sets.items()}
        return {"fingerprint": self.fingerprint(), "drawn": dict(self._drawn), "sets": sets}

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

    def fingerprint(self) -> str:
        """16 hex digits that change with any taskset or weight."""
        content = "\n".join(f"{n} {self._shares[n]!r} {s.fingerprint()}" for n, s in self._sets.items())
        return hashlib.sha256(content.encode()).hexdigest()[:16]
