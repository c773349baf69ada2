"""Records an agent's requests as conversations: turns that continue a conversation are merged, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..types import Completion, Message, Trajectory
from .base import Policy
from .tools import parse_calls
from .transcript import Transcript, with_system

Seen = tuple[str, str, str]
"""A message as it is compared: role, text, tool calls."""

Prompt = str | list[int]
"""What a completion (not a chat) continues: text, or token ids."""


class NoRoom(ValueError):
    """The conversation leaves no room for another token."""


@dataclass
class _Conversation:
    """`seen`: its messages, the last answer included; of bare completions its text so far ("": of token ids)."""

    seen: list[Seen] | str
    transcript: Transcript
    num_sampled: int = 0
    was_cut: bool = False


@dataclass(frozen=True)
class ChatTurn:
    """A sampled turn as it is answered: `calls` are tool calls in OpenAI's form, `text` is what stands before them."""

    text: str
    calls: list[dict[str, Any]]
    completion: Completion
    num_prompt_tokens: int


class Recorder:
    """The requests of one agent in one rollout.

    If a request's messages begin with those of an earlier request and its answer, it continues from that request's
    tokens: sampled tokens are never changed. The same holds for a bare completion whose text (or tokens) begins with an
    earlier one's and its answer. Any other request starts a new conversation; so does each further one of several that
    continue the same turn at the same time.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._conversations: list[_Conversation] = []
        self.num_requests = 0

    async def chat(self, messages: list[dict[str, Any]], *, tools_text: str | None, max_tokens: int | None) -> ChatTurn:
        """One turn. Raises ValueError for messages that cannot be rendered, `NoRoom` for ones that are too long."""
        seen = [seen_message(m) for m in messages]
        known = [c for c in self._conversations if isinstance(c.seen, list) and _continues(c.seen, seen)]
        if known:
            found = max(known, key=lambda c: len(c.seen))
            # Work on a copy, so that a request that is aborted and sent again finds the conversation unchanged.
            transcript = found.transcript.copy()
            self._observe(transcript, rendered(messages[len(found.seen) :]))
        else:
            prompt_messages = with_system(rendered(messages), tools_text)
            found = _Conversation([], Transcript(self._policy.prompter, prompt_messages))
            transcript = found.transcript
        turn, found = await self._sample(found, transcript, max_tokens)
        found.seen = [*seen, seen_message({"role": "assistant", "content": turn.text, "tool_calls": turn.calls})]
        return turn

    async def complete(self, prompt: Prompt, *, max_tokens: int | None) -> ChatTurn:
        """One bare completion of text or token ids; a prompt that extends an earlier one's text or tokens continues it.

        The same text again continues only an answer that was cut off; a finished answer has no continuation.
        """
        known = [(c, rest) for c in self._conversations if (rest := self._rest(c, prompt)) is not None]
        if known:
            found, rest = max(known, key=lambda pair: len(pair[0].transcript.tokens))
            transcript = found.transcript.copy()
            if rest:
                self._observe(transcript, self._known(rest, self._policy.prompter.encode_plain))
        else:
            tokens = self._known(prompt, self._policy.prompter.encode_text)
            found = _Conversation("", Transcript(self._policy.prompter, tokens))
            transcript = found.transcript
        turn, found = await self._sample(found, transcript, max_tokens, calls=False)
        found.seen = prompt + turn.text if isinstance(prompt, str) else ""
        found.was_cut = turn.completion.finish_reason == "length"
        return turn

    def _known(self, prompt: Prompt, encode: Callable[[str], list[int]]) -> list[int]:
        """Tokens of the prompt. Raises ValueError for ids outside the vocabulary, which would crash an engine."""
        if isinstance(prompt, str):
            return encode(prompt)
        size = self._policy.prompter.vocab_size
        if min(prompt) < 0 or max(prompt) >= size:
            raise ValueError(f"prompt: got the token id {max(prompt, key=abs)}, expected ids from 0 to {size - 1}")
        return list(prompt)

    def _rest(self, conversation: _Conversation, prompt: Prompt) -> Prompt | None:
        """What `prompt` adds to a conversation; None if it does not continue it."""
        if isinstance(conversation.seen, list):
            return None
        before: Any = conversation.seen if isinstance(prompt, str) else conversation.transcript.tokens
        if not before or prompt[: len(before)] != before:
            return None
        rest = prompt[len(before) :]
        return rest if rest or conversation.was_cut else None

    def _observe(self, transcript: Transcript, observation: Any) -> None:
        if not transcript.observed(observation, max_len=self._policy.max_model_len):
            raise NoRoom(f"the conversation is longer than {self._policy.max_model_len} tokens")

    async def _sample(
        self, found: _Conversation, transcript: Transcript, max_tokens: int | None, *, calls: bool = True
    ) -> tuple[ChatTurn, _Conversation]:
        """The turn, and the conversation that has it: `found`, unless another request has gone on with it meanwhile."""
        self.num_requests += 1
        number, prompt, before = self.num_requests, transcript.tokens, found.transcript
        if len(prompt) >= self._policy.max_model_len:
            raise NoRoom(f"{len(prompt)} tokens; at most {self._policy.max_model_len} fit with the answer")
        (completion,) = await self._policy.generate(prompt, n=1, max_tokens=max_tokens)
        if found.transcript is not before:  # its earlier answers are trained on there
            transcript = transcript.as_prompt()
            found = _Conversation(found.seen, transcript)
        transcript.sampled(completion)
        if not any(c is found for c in self._conversations):
            self._conversations.append(found)
        found.transcript, found.num_sampled = transcript, found.num_sampled + len(completion.tokens)
        if not calls:
            return ChatTurn(completion.text, [], completion, len(prompt)), found
        return chat_turn(completion, len(prompt), number=number), found

    def trajectory(self, *, reward: float, metrics: dict[str, float], longest_only: bool = False) -> Trajectory:
        """The conversation with the most sampled tokens; the others are attached to it, in order.

        Raises ValueError where there is none.
        """
        if not self._conversations:
            raise ValueError("no request of the agent was answered; expected at least one")
        longest = max(self._conversations, key=lambda c: c.num_sampled)
        rest = [] if longest_only else [c for c in self._conversations if c is not longest]
        counts = {"env/requests": float(self.num_requests), "env/conversations": float(len(self._conversations))}
        trajectory = longest.transcript.trajectory(reward=reward, metrics={**counts, **metrics})
        return replace(trajectory, other_conversations=[c.transcript.trajectory(reward=reward) for c in rest])


def _continues(known: list[Seen], new: list[Seen]) -> bool:
    rest = new[len(known) :]
    return new[: len(known)] == known and bool(rest) and all(role != "assistant" for role, _, _ in rest)


def seen_message(message: dict[str, Any]) -> Seen:
    calls = [
        (c["function"]["name"], _canonical(c["function"].get("arguments", ""))) for c in message.get("tool_calls") or []
    ]
    return str(message["role"]), _content(message), json.dumps(calls) if calls else ""


def _canonical(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("messages: expected text, got parts of another type")
        return "".join(part["text"] for part in content)
    return "" if content is None else str(content)


def rendered(messages: list[dict[str, Any]]) -> list[Message]:
    """As chat templates take them: results of tools become user messages, calls become the text that they were."""
    out: list[Message] = []
    for message in messages:
        role, text = str(message["role"]), _content(message)
        if role == "tool":
            result = f"<tool_response>\n{text}\n</tool_response>"
            if out and out[-1]["role"] == "user" and out[-1]["content"].endswith("</tool_response>"):
                out[-1] = {"role": "user", "content": f"{out[-1]['content']}\n{result}"}
            else:
                out.append({"role": "user", "content": result})
            continue
        for call in message.get("tool_calls") or []:
            function = call["function"]
            item = {"name": function["name"], "arguments": _canonical(function.get("arguments", "{}"))}
            text += f"<tool_call>{json.dumps(item)}</tool_call>"
        out.append({"role": "system" if role == "developer" else role, "content": text})
    return out


def chat_turn(completion: Completion, num_prompt_tokens: int, *, number: int) -> ChatTurn:
    found = [call for call in parse_calls(completion.text) if call.error is None]
    if not found:
        return ChatTurn(completion.text, [], completion, num_prompt_tokens)
    calls = [
        {
            "id": f"call_{number}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(found)
    ]
    return ChatTurn(completion.text.partition("<tool_call>")[0], calls, completion, num_prompt_tokens)
