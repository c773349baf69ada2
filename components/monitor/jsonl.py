"""metrics.jsonl, the run's own record: one JSON object per line, readable by jq, pandas and a human.

    {"step": 12, "time": 1760000000.123, "role": "trainer", "train/reward/mean": 0.53, "train/grad_norm": 0.8}

JSON has no NaN and no infinity. They are written as null (jq and pandas both read that: pandas as NaN in a float
column), and the line then also names what they were: `"nonfinite": {"train/grad_norm": "inf"}`.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ..failures import EachCharacter
from .sink import Record, Sink


class JsonlSink(Sink):
    """Appends one line per record and flushes it, so that a killed run keeps every line that was logged.

    `resumed_at`: the step that this run resumes from. The rows up to it stay and new rows are appended, so a run has
    one record however often it was stopped. Later rows are moved to metrics-1.jsonl (-2, ...), because those steps are
    trained again. None: a run from the start, which moves all old rows.
    """

    name = "metrics.jsonl"
    required = True

    def __init__(self, path: Path, *, resumed_at: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > 0:
            set_aside(path, resumed_at)
        self._file = path.open("a", encoding="utf-8")

    def log(self, record: Record) -> None:
        row: dict[str, Any] = {"step": record.step, "time": round(record.time, 3), "role": record.role}
        row.update({key: finite_or_null(value) for key, value in record.metrics.items()})
        nonfinite = {key: str(value) for key, value in record.metrics.items() if not math.isfinite(value)}
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._file.write(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self, status: str) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in the order they were logged; a last line cut short by a kill is left out.

    Raises ValueError, naming file and line, when any other line is not a JSON object.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # a complete line ends with a newline, so only a torn one can be last
                break
            raise ValueError(f"{path}:{number}: {error}; expected one JSON object per line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: got {type(row).__name__}, expected one JSON object per line")
        rows.append(row)
    return rows


def finite_or_null(value: Any) -> Any:
    """`value` as strict JSON can carry it: every nan and infinity, at any depth, becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


def as_line(value: Any) -> str:
    """Strict JSON on one line, readable in any language; characters without a shape are escaped, as in ASCII.

    JSON itself escapes a terminal's ESC, but not its one-character form, and no mark of text direction.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except ValueError:
        text = json.dumps(finite_or_null(value), allow_nan=False, ensure_ascii=False)
    return text if text.isprintable() else text.translate(_ESCAPED)


def _escaped(c: str) -> str:
    if c.isprintable():
        return c
    return f"\\u{ord(c):04x}" if c <= "\uffff" else json.dumps(c)[1:-1]


_ESCAPED = EachCharacter(_escaped)


def write_text_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def set_aside(path: Path, resumed_at: int | None) -> None:
    """Move the rows beyond `resumed_at` (None: all) to a separate file; drop a last line truncated by a kill."""
    if resumed_at is None:
        path.rename(_free_name(path))
        return
    kept, beyond = [], []
    for row in read_metrics(path):
        (kept if row["step"] <= resumed_at else beyond).append(row)
    if beyond:  # first, so that a kill in between leaves every row somewhere
        write_text_atomically(_free_name(path), _lines(beyond))
    write_text_atomically(path, _lines(kept))


def set_folder_aside(folder: Path) -> None:
    """Move what an earlier run has left in it to FOLDER-1 (-2, ...)."""
    if folder.is_dir() and any(folder.iterdir()):
        folder.rename(_free_name(folder))


def set_steps_aside(folder: Path, resumed_at: int) -> None:
    """Move the files of steps beyond `resumed_at` to FOLDER-1 (-2, ...): these steps are made again."""
    numbered = [(re.fullmatch(r"step-(\d+)\.jsonl", file.name), file) for file in folder.glob("step-*.jsonl")]
    beyond = [file for found, file in numbered if found is not None and int(found[1]) > resumed_at]
    if beyond:
        aside = _free_name(folder)
        aside.mkdir()
        for file in beyond:
            file.rename(aside / file.name)


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free
