"""Tasks from a JSON Lines file: one object per line, a prompt under one key and an answer under another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..types import Message
from .questions import Row


def read_jsonl(
    path: str | Path,
    *,
    prompt_key: str,
    answer_key: str,
    answer_after: str | None = None,
    messages_key: str | None = None,
    limit: int | None = None,
) -> list[Row]:
    """The rows of a file, in its order; at most `limit` of them.

    The prompt is text or a list of messages. With `answer_after` the answer is what follows the last occurrence of that
    mark, and `info["solution"]` keeps the whole text (for supervised training). With `messages_key` a line is a whole
    conversation under that key: its prompt is everything before the first assistant message, its answer the last
    assistant message, and `info["messages"]` all of it. All other keys of a line arrive in `info`.

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
                where = f"{path}:{number}"
                item = _item(line, where, prompt_key if messages_key is None else messages_key)
                if messages_key is None:
                    rows.append(_row(item, where, prompt_key, answer_key, answer_after))
                else:
                    rows.append(_conversation(item, where, messages_key))
    if not rows:
        raise ValueError(f"{path}: got no rows, expected one JSON object per line; check the file and task.limit")
    return rows


def _item(line: bytes, where: str, key: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one object per line") from None
    if not isinstance(item, dict):
        raise ValueError(f"{where}: got {type(item).__name__}, expected a JSON object with the key {key!r}")
    return item


def _conversation(item: dict[str, Any], where: str, key: str) -> Row:
    if key not in item:
        raise ValueError(f"{where}: no key {key!r} among {sorted(item)}; set task.messages_key to one of them")
    messages = item.pop(key)
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError(f'{where}: {key!r} is no list of {{"role": ..., "content": ...}} messages')
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[0] == 0:
        raise ValueError(f"{where}: {key!r} has no assistant message after a first prompt; expected one to train on")
    return Row(
        question=messages[: answers[0]],
        answer=messages[answers[-1]]["content"],
        info={**item, "messages": messages},
    )


def _row(item: dict[str, Any], where: str, prompt_key: str, answer_key: str, answer_after: str | None) -> Row:
    for key, option in ((prompt_key, "task.prompt_key"), (answer_key, "task.answer_key")):
        if key not in item:
            raise ValueError(f"{where}: no key {key!r} among {sorted(item)}; set {option} to one of them")
    question = _checked_prompt(item.pop(prompt_key), where, prompt_key)
    answer = item.pop(answer_key)
    answer = answer if isinstance(answer, str) else json.dumps(answer)
    if answer_after is not None:
        if answer_after not in answer:
            raise ValueError(
                f"{where}: {answer_key!r} has no {answer_after!r} in it; fix the line or task.answer_after"
            )
        item = {**item, "solution": answer, "answer_after": answer_after}
        answer = answer.rpartition(answer_after)[2].strip()
    return Row(question=question, answer=answer, info=item)


def _checked_prompt(prompt: Any, where: str, key: str) -> str | list[Message]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return prompt
    shown = repr(prompt)[:60]
    raise ValueError(
        f'{where}: {key!r} is {shown}; expected text or a list of {{"role": ..., "content": ...}} messages'
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
