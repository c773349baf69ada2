"""Whole conversations as training examples: every assistant turn is a target, everything between them is context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..types import Message
from .prompting import Prompter


def encode_conversation(
    prompter: Prompter, messages: Sequence[Message], *, num_prompt: int, tools: Sequence[dict[str, Any]] = ()
) -> tuple[list[int], list[int], list[bool]]:
    """(prompt tokens [T], response tokens [R], loss mask [R]) of a conversation.

    The first `num_prompt` messages are the prompt; an assistant message follows them. The mask is True for what each
    assistant turn says and calls, and the token that ends it; False for what stands between two turns, results of tools
    among it. `tools` are the schemas that the template writes into the prompt. Messages after the last
    assistant turn are left out. Raises ValueError for a chat template that writes earlier turns differently once
    others follow, because the model would be trained on a conversation that it never sees.
    """
    turns = [i for i, message in enumerate(messages) if i >= num_prompt and message["role"] == "assistant"]
    if not turns or turns[0] != num_prompt:
        raise ValueError(f"messages: message {num_prompt} is not the assistant's; expected an answer to the prompt")
    prompt, response, mask = prompter.encode(messages[:num_prompt], tools=tools), [], []
    for turn in turns:
        before, answer = prompter.encode_example(messages[:turn], messages[turn], tools=tools)
        so_far = [*prompt, *response]
        if before[: len(so_far)] != so_far:
            raise ValueError(
                f"chat template: before message {turn} the conversation is {prompter.tokenizer.decode(before)!r}, and "
                f"does not begin with {prompter.tokenizer.decode(so_far)!r}; expected a template that only appends"
            )
        between = before[len(so_far) :]
        response += [*between, *answer]
        mask += [False] * len(between) + [True] * len(answer)
    return prompt, response, mask
