"""Truncates prompts that are too long at their beginning, because the question usually comes last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..types import Message, Task


def truncated(task: Task, prompter: Any, max_tokens: int) -> Task | None:
    """The task with a prompt of at most `max_tokens` tokens: unchanged if it fits, None if no cut is enough.

    The text is cut or, in a list of messages, the last user message. System prompts and templates stay whole.
    """
    excess = len(prompter.encode(task.prompt)) - max_tokens
    if excess <= 0:
        return task
    text, rebuilt = _cuttable(task.prompt)
    tokens = prompter.encode_plain(text)
    cut = 0
    while cut < len(tokens) - 1:
        cut = min(cut + excess, len(tokens) - 1)
        shorter = replace(task, prompt=rebuilt(prompter.tokenizer.decode(tokens[cut:])))
        # The rest may be tokenized differently and become a few tokens longer: then a little more is cut.
        excess = len(prompter.encode(shorter.prompt)) - max_tokens
        if excess <= 0:
            return shorter
    return None


def _cuttable(prompt: str | list[Message]) -> tuple[str, Any]:
    """The text to cut, and a function that builds the prompt from what remains."""
    if isinstance(prompt, str):
        return prompt, lambda text: text
    users = [i for i, message in enumerate(prompt) if message["role"] == "user"]
    last = users[-1] if users else len(prompt) - 1
    before, message, after = prompt[:last], prompt[last], prompt[last + 1 :]
    return message["content"], lambda text: [*before, {**message, "content": text}, *after]
