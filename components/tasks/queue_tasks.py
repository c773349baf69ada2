"""A queue that other programs feed: a jsonl file that grows while the run takes its tasks from it.

Each line is one task, used once, in the order of the file. `PATH.closed` (an empty file) says that nothing more comes;
the run then ends when the last task is used. While the file is open its newest task waits for the next one, so that the
end is known when it comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..config.paths import is_file, user_path
from ..types import Task
from .jsonl_tasks import parse_line
from .questions import Row
from .rows import RowFormat

POLL_S = 0.2


class QueueTaskSet:
    """As a `TaskSet` to those who draw, but that it grows. `make` turns a row into its task, None leaves it out.

    Rows are numbered by their place in the file, so the k-th draw is the same in a run that goes on later.
    """

    def __init__(
        self, path: str | Path, *, form: RowFormat, make: Callable[[Row, int], Task | None], name: str = "queue"
    ) -> None:
        self.name = name
        self._path = user_path(path)
        self._form = form
        self._make = make
        self._offset = self._num_lines = self._num_rows = self._num_drawn = 0
        self._tasks: list[Task] = []
        self._poll()
        if not self._tasks:
            raise ValueError(f"task.path: got {path}, expected a jsonl file with at least one task to start with")

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Those that have come so far."""
        return tuple(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return self.forever()

    def forever(self) -> Iterator[Task]:
        """Tasks in order until the queue is closed. Waits for the next one by blocking: ask `num_ready` before."""
        for number in itertools.count(self._num_drawn):
            while number >= len(self._tasks):
                closed = self._is_closed()  # asked before the last look into the file
                self._poll()
                if number >= len(self._tasks):
                    if closed:
                        return
                    time.sleep(POLL_S)
            self._num_drawn = number + 1
            yield self._tasks[number]

    async def num_ready(self, fits: Callable[[Task], bool], *, timeout_s: float) -> int | None:
        """How many tasks that fit can be drawn without waiting: waits until there is one. None: it is closed.

        Raises TimeoutError where nothing comes.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            closed = self._is_closed()
            self._poll()
            if closed:
                return None
            ready = sum(map(fits, self._tasks[self._num_drawn :]))
            if ready:
                return ready
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"task.path: no task came into {self._path} for {timeout_s:g} s (cluster.step_timeout_s); feed it, "
                    f"or close it with `touch {self._closed_mark}`"
                )
            await asyncio.sleep(POLL_S)

    def texts(self) -> Iterator[str]:
        for task in self._tasks:
            yield from [task.prompt] if isinstance(task.prompt, str) else (m["content"] for m in task.prompt)
            yield task.answer

    def record(self, task_id: str, pass_rate: float) -> None:
        """Nothing follows from it: the order is that of the file."""

    @property
    def epoch(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint(), "position": self._num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run's `state_dict` was. Raises ValueError where the file is another one."""
        if (got := state["fingerprint"]) != (own := self.fingerprint()):
            raise ValueError(f"task.path: the saved position has fingerprint {got}, {self._path} has {own}")
        self._num_drawn = state["position"]

    def fingerprint(self) -> str:
        """16 hex digits of the first task: the file may only grow."""
        return hashlib.sha256(self._tasks[0].task_id.encode()).hexdigest()[:16]

    @property
    def _closed_mark(self) -> Path:
        return self._path.with_name(self._path.name + ".closed")

    def _is_closed(self) -> bool:
        return self._closed_mark.exists()

    def _poll(self) -> None:
        """Read what was appended, whole lines only: another program may be in the middle of one."""
        if not is_file(self._path):
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._num_lines += 1
            if not line.strip():
                continue
            row = parse_line(line, f"{self._path}:{self._num_lines}", self._form)
            task = self._make(row, self._num_rows)
            self._num_rows += 1
            if task is not None:
                self._tasks.append(task)
