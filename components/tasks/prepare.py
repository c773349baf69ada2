"""Tasks prepared before a run: Data-Juicer's operators on their texts, and rows written as their source had them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..config.inputs import TaskSource
from ..types import Message
from .data_juicer import DataJuicer
from .questions import Row, whole_answer
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
    """What `RowFormat` reads as this row again."""
    is_cut = source.answer_after is not None
    own = {key: value for key, value in row.info.items() if not (is_cut and key in FROM_ANSWER_AFTER)}
    if source.tools_key is not None:
        own[source.tools_key] = own.pop("allowed_tools", [])
    if source.system_prompt_key is not None and row.system is not None:
        own[source.system_prompt_key] = row.system
    rejected: Any = own.get(source.rejected_key)
    if _are_messages(rejected):
        own[source.rejected_key] = _as_its_messages(source, rejected)
    question = row.question if isinstance(row.question, str) else _as_its_messages(source, row.question)
    turns = _as_its_messages(source, row.messages)
    if source.messages_key is not None:
        return own | {source.messages_key: [*question, *turns]}
    return own | {source.prompt_key: question, source.answer_key: turns or whole_answer(row.answer, row.info)}


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(own, dict) and {"role", "content"} <= own.keys() for own in value)


def _as_its_messages(source: TaskSource, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Under the keys that the source has for roles and contents."""
    names = {"role": source.role_key, "content": source.content_key}
    return [{names.get(key, key): value for key, value in message.items()} for message in messages]


def _text(row: Row, text: str) -> str:
    if text == "answer":
        if row.messages and "tool_calls" in row.messages[-1]:
            raise ValueError("an answer that calls tools: there is no text to work on")
        return whole_answer(row.answer, row.info)
    return row.question if isinstance(row.question, str) else row.question[_last_of_user(row)]["content"]


def _with_text(row: Row, text: str, now: str) -> Row:
    if text == "answer":
        info = row.info | ({"solution": now} if "answer_after" in row.info else {})
        messages = [*row.messages[:-1], row.messages[-1] | {"content": now}] if row.messages else []
        return replace(row, answer=now, info=info, messages=messages)
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
