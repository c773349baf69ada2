"""Tasks from a JSON Lines file: one object per line, a prompt under one key and an answer under another."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from ..config.paths import is_file, user_path
from .questions import Row
from .rows import RowFormat

MAX_LINE_BYTES = 64 << 20
"""No task is this long. The limit prevents reading a file without line ends into memory at once."""
_OTHER_FORMATS = (
    (b"PAR1", "a parquet file", "set task.name=parquet"),
    (b"SQLite format 3", "a SQLite file", "set task.name=sql and task.query"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"ARROW1", "an Arrow file", "set task.name=hf and task.path to the folder that holds it"),
)


def read_jsonl(path: str | Path, *, form: RowFormat, limit: int | None = None) -> list[Row]:
    """The rows of a file, in its order; at most `limit` of them.

    Raises ValueError naming file:line for anything malformed, FileNotFoundError for a missing file.
    """
    path = user_path(path)
    if not is_file(path):
        raise FileNotFoundError(
            f"task file: got {path}, expected an existing .jsonl file; fix task.path (or eval.path)"
        )
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_LINE_BYTES + 1)
            if not line or (limit is not None and len(rows) >= limit):
                break
            if number == 1:
                _refuse_other_formats(line, path)
            if line.strip() or len(line) > MAX_LINE_BYTES:
                rows.append(parse_line(line, f"{path}:{number}", form))
    if not rows:
        raise ValueError(f"{path}: got no rows, expected one JSON object per line; check the file and task.limit")
    return rows


def parse_line(line: bytes, where: str, form: RowFormat) -> Row:
    """The row of one line. Raises ValueError that begins with `where`."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB; expected one object per line")
    try:
        item = json.loads(line)
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply; expected one JSON object per line") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({str(error)[:120]}); expected one object per line") from None
    return form.row(item, where)


def _refuse_other_formats(line: bytes, path: Path) -> None:
    for mark, kind, fix in _OTHER_FORMATS:
        if line.startswith(mark):
            raise ValueError(f"{path}: got {kind}, expected one JSON object per line; {fix}")
