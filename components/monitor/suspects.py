"""suspects.jsonl: answers that scored full and that a person should read, a line each.

    {"step": 12, "group_id": 733, "task_id": "5351a6a761f5f64d", "sequence_id": 4, "signs": ["equality"],
     "reward": 1.0, "num_tokens": 31, "question": "... sorts a list.", "answer": "", "head": "class A:..."}

`answer` is the task's, `head` the beginning of what was paid. Pure ASCII: what an answer says, terminal escapes and
characters without a shape among it, is escaped as JSON does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .jsonl import finite_or_null, read_metrics, set_aside

MAX_ROWS = 20_000
"""Rows in a file: some 25 MB. The last one then says that there are no more; the metrics continue to count."""


class SuspectList:
    """Appends rows; there is no file before the first. `resumed_at`: as for `JsonlSink`."""

    def __init__(self, path: Path, *, resumed_at: int | None = None) -> None:
        self._path = path
        if path.exists() and path.stat().st_size > 0:
            set_aside(path, resumed_at)
        self._num_rows = len(read_metrics(path)) if path.exists() else 0

    def add(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """The rows of one step."""
        room = MAX_ROWS - self._num_rows
        if not rows or room <= 0:
            return
        lines = [{"step": step, **row} for row in rows[:room]]
        if len(rows) >= room:
            lines.append({"step": step, "signs": [], "head": f"this list ends here, at {MAX_ROWS} rows"})
        self._num_rows += len(lines)
        with self._path.open("a", encoding="ascii") as file:
            file.writelines(json.dumps(finite_or_null(line), allow_nan=False) + "\n" for line in lines)
