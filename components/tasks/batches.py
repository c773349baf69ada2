"""Batches of the tasks' own answers, for supervised and preference training, made while the ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torchdata.nodes import BaseNode, Batcher, Loader, Mapper, Prefetcher

from ..types import Task

B = TypeVar("B")
E = TypeVar("E")


class Batches(Iterator[B], Generic[B]):
    """tasks -> `make` -> lists of `size` -> `collate`. The next batch is made in a thread meanwhile.

    Endless, or `most` tasks in all: then the last batch may be smaller. `start`: what `state_dict()` returned after an
    earlier batch; the next one comes first.
    """

    def __init__(
        self,
        tasks: BaseNode[Task],
        *,
        make: Callable[[Task], E],
        size: int,
        collate: Callable[[Sequence[E]], B],
        most: int | None = None,
        start: dict[str, Any] | None = None,
    ) -> None:
        source = tasks if most is None else _First(tasks, most)
        batches = Batcher(Mapper(source, make), size, drop_last=False)
        self._loader = Loader(Prefetcher(Mapper(batches, collate), prefetch_factor=1))
        if start is not None:
            self._loader.load_state_dict(start)
        self._batches = iter(self._loader)

    def __next__(self) -> B:
        """Raises ValueError, as `make` does, for a task that cannot be trained on."""
        try:
            return next(self._batches)
        except ValueError as error:  # raised in the thread: its message is a traceback that ends with the original
            raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from error

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was returned last, as JSON-able data."""
        return self._loader.state_dict()


class _First(BaseNode[Task]):
    """The first `count` tasks."""

    def __init__(self, tasks: BaseNode[Task], count: int) -> None:
        super().__init__()
        self._tasks, self._count = tasks, count
        self._given = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._given = 0 if initial_state is None else int(initial_state["given"])
        self._tasks.reset(None if initial_state is None else initial_state["tasks"])

    def next(self) -> Task:
        if self._given == self._count:
            raise StopIteration
        self._given += 1
        return next(self._tasks)

    def get_state(self) -> dict[str, Any]:
        return {"given": self._given, "tasks": self._tasks.state_dict()}
