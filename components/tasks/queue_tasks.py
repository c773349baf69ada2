"""A queue that other programs feed: a jsonl file that grows while the run draws its tasks from it.

Each line is one task, used once, in the order of the file. `PATH.closed` (an empty file) marks the end of the queue:
the run then ends when the last task is used. The file itself is the backlog: a line is read when its task is drawn, and
is not kept in memory.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchdata.nodes import BaseNode

from ..config.paths import is_file, user_path
from ..types import Task
from .jsonl_tasks import MAX_LINE_BYTES, parse_line
from .questions import Row
from .rows import RowFormat

FIRST_TASKS = 1000
"""How many are exposed as `tasks`: enough to try an environment and to measure speeds."""


class NoTaskYet(Exception):
    """There is no task to draw now, but there may be one later. The message says how to provide one."""


@dataclass(slots=True)
class _FilePosition:
    """Where the next line of the file begins, and how many lines and rows (non-empty lines) precede it."""

    offset: int = 0
    num_lines: int = 0
    num_rows: int = 0


class QueueTaskSet(BaseNode[Task]):
    """Behaves like a `TaskSet` that grows: drawing raises `NoTaskYet` if it would have to wait.

    `make` turns a row into its task; None leaves the row out. Rows are numbered by their place in the file, so the k-th
    draw is the same after a resume. `limit`: the queue ends after this many rows.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        form: RowFormat,
        make: Callable[[Row, int], Task | None],
        limit: int | None = None,
        name: str = "queue",
    ) -> None:
        super().__init__()
        self.name = name
        self._path = user_path(path)
        self._form = form
        self._make = make
        self._limit = limit
        self._position = _FilePosition()
        self._searched_to = -1  # size of the file when there was no further line in it
        first = next(self.in_file(), None)
        if first is None:
            raise ValueError(f"task.path: got {path}, expected a jsonl file with at least one task to start with")
        self._fingerprint = hashlib.sha256(first.task_id.encode()).hexdigest()[:16]
        self.reset()

    def next(self) -> Task:
        """The next task. Ends if the queue is closed; raises `NoTaskYet` if it is open but empty."""
        closed = self._closed_mark.exists()  # check this before reading the file for the last time
        searched_to = self._size()
        for task in self._read(self._position, unfinished=closed):
            if task is not None:
                return task
        if closed or self._position.num_rows == self._limit:
            raise StopIteration
        self._searched_to = searched_to
        raise NoTaskYet(f"a task in {self._path}; feed it, or close it with `touch {self._closed_mark}`")

    def may_have_more(self) -> bool:
        """Whether drawing could have a different result than last time; costs two file-system checks."""
        return self._size() != self._searched_to or self._closed_mark.exists()

    def in_file(self) -> Iterator[Task]:
        """Every task that is in the file now, from its beginning. Raises ValueError naming the line."""
        whole = self._read(_FilePosition(), unfinished=self._closed_mark.exists())
        return (task for task in whole if task is not None)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The first tasks of the file, for trying environments and measuring speeds."""
        return tuple(itertools.islice(self.in_file(), FIRST_TASKS))

    def find(self, task_ids: Container[str]) -> dict[str, Task]:
        """The drawn tasks with these ids, by id. Reads the file from its beginning."""
        position = _FilePosition()
        found = {}
        for task in self._read(position, unfinished=True):
            if position.num_rows > self._position.num_rows:
                break
            if task is not None and task.task_id in task_ids:
                found[task.task_id] = task
        return found

    def texts(self) -> Iterator[str]:
        for task in self.in_file():
            yield from [task.prompt] if isinstance(task.prompt, str) else (m["content"] for m in task.prompt)
            yield task.answer

    def record(self, task_id: str, pass_rate: float) -> None:
        """Ignored: the order is that of the file."""

    @property
    def epoch(self) -> int:
        return 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin with the first line, or where `state_dict()` gave `initial_state`. Raises ValueError if that belongs
        to another file."""
        super().reset(initial_state)
        state = initial_state or {"fingerprint": self.fingerprint(), "position": {}}
        if (got := state["fingerprint"]) != (own := self.fingerprint()):
            raise ValueError(f"task.path: the saved position has fingerprint {got}, {self._path} has {own}")
        self._position = _FilePosition(**state["position"])
        self._size()  # raises if the file has become shorter

    def get_state(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint(), "position": asdict(self._position)}

    def fingerprint(self) -> str:
        """16 hex digits of the first task: the file may only grow."""
        return self._fingerprint

    @property
    def _closed_mark(self) -> Path:
        return self._path.with_name(self._path.name + ".closed")

    def _size(self) -> int:
        size = self._path.stat().st_size if is_file(self._path) else 0
        if size < self._position.offset:
            raise ValueError(
                f"task.path: {self._path} has {size} bytes, but {self._position.offset} were read from it; expected a "
                "file that only grows; put back what was taken out"
            )
        return size

    def _read(self, position: _FilePosition, *, unfinished: bool) -> Iterator[Task | None]:
        """The tasks of the file from `position` on, which moves along: None for rows that `make` leaves out.

        A last line without a line end is read only when nothing more will come (`unfinished`). Otherwise another
        program may still be writing it.
        """
        if not is_file(self._path):
            return
        with self._path.open("rb") as file:
            file.seek(position.offset)
            while position.num_rows != self._limit and (line := file.readline(MAX_LINE_BYTES + 1)):
                if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES and not unfinished:
                    return
                task, is_row = None, bool(line.strip()) or len(line) > MAX_LINE_BYTES
                if is_row:
                    row = parse_line(line, f"{self._path}:{position.num_lines + 1}", self._form)
                    task = self._make(row, position.num_rows)
                position.offset += len(line)
                position.num_lines += 1
                position.num_rows += is_row
                if is_row:
                    yield task
