"""Tasks from a JSON Lines file: one object per line, a prompt under one key and an answer under another."""

from __future__ import annotations

import json
from pathlib import Path

from .questions import Row
from .rows import RowFormat


def read_jsonl(path: str | Path, *, form: RowFormat, limit: int | None = None) -> list[Row]:
    """The rows of a file, in its order; at most `limit` of them.

    Raises ValueError naming file:line for anything malformed, FileNotFoundError for a missing file.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"task file: got {path}, expected an existing .jsonl file; fix task.path (or eval.path)"
        )
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) >= limit:
                break
            if line.strip():
                rows.append(parse_line(line, f"{path}:{number}", form))
    if not rows:
        raise ValueError(f"{path}: got no rows, expected one JSON object per line; check the file and task.limit")
    return rows


def parse_line(line: bytes, where: str, form: RowFormat) -> Row:
    """The row of one line. Raises ValueError that begins with `where`."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one object per line") from None
    return form.row(item, where)
