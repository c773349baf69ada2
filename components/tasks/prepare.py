"""Tasks prepared before a run: Data-Juicer's operators on their texts, and rows written as their source had them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..config.inputs import TaskSource
from .data_juicer import DataJuicer
from .questions import Row
from .taskset import read_rows

FROM_ANSWER_AFTER = ("solution", "answer_after")
"""Keys that `task.answer_after` adds to a row when it is read."""


def prepared(
    source: TaskSource, process: Sequence[Any], *, seed: int, text: Literal["prompt", "answer"] = "prompt"
) -> tuple[int, list[Row]]:
    """(how many rows there were, those that the operators leave, changed as they say, in their order).

    `text`: what the operators see of a row. A prompt of several messages is the content of its last one by the user.
    Raises ValueError in one line.
    """
    operators = DataJuicer(process, key="process")
    rows = read_rows(source, seed)
    found = operators.applied([_text(row, text) for row in rows])
    return len(rows), [_with_text(rows[at], text, now) for at, now in found]


def write_rows(file: Path, source: TaskSource, rows: Iterable[tuple[Row, dict[str, Any]]]) -> None:
    """(row, further keys) as jsonl, under the keys that `source` reads them by, whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        for row, further in rows:
            out.write(json.dumps(_written(source, row) | further, ensure_ascii=False) + "\n")
    partial.replace(file)


def _written(source: TaskSource, row: Row) -> dict[str, Any]:
    own = {key: value for key, value in row.info.items() if key not in FROM_ANSWER_AFTER}
    answer = row.messages or row.info.get("solution", row.answer)
    return own | {source.prompt_key: row.question, source.answer_key: answer}


def _text(row: Row, text: str) -> str:
    if text == "answer":
        return str(row.info.get("solution", row.answer))
    return row.question if isinstance(row.question, str) else row.question[_last_of_user(row)]["content"]


def _with_text(row: Row, text: str, now: str) -> Row:
    if text == "answer":
        info = row.info | ({"solution": now} if "solution" in row.info else {})
        return replace(row, answer=now, info=info)
    if isinstance(row.question, str):
        return replace(row, question=now)
    at = _last_of_user(row)
    messages = [message | {"content": now} if i == at else message for i, message in enumerate(row.question)]
    return replace(row, question=messages)


def _last_of_user(row: Row) -> int:
    users = [i for i, message in enumerate(row.question) if isinstance(message, dict) and message["role"] == "user"]
    if not users:
        raise ValueError("a prompt without a message of the user: there is no text to work on")
    return users[-1]
