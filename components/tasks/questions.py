"""The identity of a question: one stable hash, used for ids, for the hold-out and for finding duplicates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..types import Message, Task


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem as its source wrote it, before templates: `question` decides identity, not the finished prompt.

    `system`: its own system message (None: it has none).
    """

    question: str | list[Message]
    answer: str
    info: dict[str, Any]
    messages: list[Message] = field(default_factory=list)
    system: str | None = None

    def texts(self) -> Iterator[str]:
        """All of its text that is hashed or tokenized, before templates."""
        question = [{"content": self.question, "role": ""}] if isinstance(self.question, str) else self.question
        for message in (*question, *self.messages):
            yield message["role"]
            yield from texts_in(message)
        yield self.answer
        if self.system is not None:
            yield self.system
        if isinstance(solution := self.info.get("solution"), str):
            yield solution

    @property
    def digest(self) -> str:
        """sha256 (hex) of the question's text; the same on every machine, for every seed and every prompt template."""
        text = self.question if isinstance(self.question, str) else json.dumps(self.question, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def texts_in(message: Message) -> Iterator[str]:
    """What a message says and calls."""
    yield message["content"]
    if calls := message.get("tool_calls"):
        yield json.dumps(calls, ensure_ascii=False)


def whole_answer(answer: str, info: Mapping[str, Any]) -> str:
    """The reference answer with the work that led to it, where `task.answer_after` has cut that off. Without that
    setting a key called solution is like any other.
    """
    return str(info["solution"]) if "answer_after" in info and "solution" in info else answer


def said_in(message: Message) -> str:
    """A turn of the assistant as one text: the names and arguments of its calls as JSON, else its content."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(calls, ensure_ascii=False) if calls else message["content"]


def is_held_out(digest: str, holdout_frac: float) -> bool:
    """Whether a question is kept for evaluation: decided by its text alone, so it holds in every stage and run."""
    return int(digest[:16], 16) < holdout_frac * 2**64


def make_task(row: Row, *, task_id: str, system_prompt: str | None, prompt_template: str | None) -> Task:
    """The task of a row, with the system prompt and the template applied.

    `system_prompt`: of rows that have none of their own; messages that begin with one keep that. `prompt_template`
    holds "{prompt}" and wraps a text prompt, or the last user message of a list of messages.
    """
    prompt: str | list[Message] = row.question
    if prompt_template is not None:
        prompt = _apply_template(prompt, prompt_template)
    system = system_prompt if row.system is None else row.system
    if system is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[0]["role"] != "system":
            prompt = [{"role": "system", "content": system}, *messages]
    return Task(task_id=task_id, prompt=prompt, answer=row.answer, info=row.info, messages=row.messages)


def _apply_template(prompt: str | list[Message], template: str) -> str | list[Message]:
    # str.replace, not str.format: templates for mathematics are full of braces.
    if isinstance(prompt, str):
        return template.replace("{prompt}", prompt)
    users = [i for i, message in enumerate(prompt) if message["role"] == "user"]
    last = users[-1] if users else -1
    return [
        {**message, "content": template.replace("{prompt}", message["content"])} if i == last else message
        for i, message in enumerate(prompt)
    ]
