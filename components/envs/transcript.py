"""One conversation, token by token: sampled tokens are kept unchanged, everything else is masked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ..sampling_masks import joined_rows, no_rows
from ..tasks.prompting import ASSISTANT_STANDS
from ..types import NO_VERSION, Completion, Message, Trajectory, Turn

Observation = str | list[Message] | list[int]
"""What an environment says: text (one user message), messages, or token ids."""


class Transcript:
    """A prompt, then completions and observations in turn. Nothing that was sampled is ever decoded and encoded again.

    With a chat template, what it writes between two turns (the end of the policy's turn, the next messages, the header
    of the next turn) is added as the environment's tokens; without one, observations are added as plain text.
    """

    def __init__(self, prompter: Any, prompt: Observation) -> None:
        self._prompter = prompter
        is_tokens = is_token_ids(prompt)
        self.prompt_tokens: list[int] = list(prompt) if is_tokens else prompter.encode(prompt)  # type: ignore[arg-type]
        self._messages: list[Message] | None = None if is_tokens else as_messages(prompt)
        self._response: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._token_tensors: dict[str, list[Any]] = {}  # by name, one tensor for each turn
        self._finish_reason = "stop"

    @property
    def tokens(self) -> list[int]:
        """All tokens so far [T]: the prompt of the next request."""
        return [*self.prompt_tokens, *self._response]

    @property
    def num_response_tokens(self) -> int:
        return len(self._response)

    def copy(self) -> Transcript:
        """A copy that can be continued independently."""
        other = copy.copy(self)
        for name in ("_response", "_mask", "_logprobs", "_versions", "_messages"):
            value = getattr(self, name)
            setattr(other, name, None if value is None else list(value))
        other._token_tensors = {name: list(parts) for name, parts in self._token_tensors.items()}
        return other

    def as_prompt(self) -> Transcript:
        """A conversation that goes on from here, in which all of this one is prompt: none of its tokens is sampled."""
        other = self.copy()
        other.prompt_tokens, other._response = self.tokens, []
        other._mask, other._logprobs, other._versions, other._token_tensors = [], [], [], {}
        return other

    def sampled(self, completion: Completion) -> None:
        """The policy's turn."""
        self._response += completion.tokens
        self._mask += [True] * len(completion.tokens)
        self._logprobs += completion.logprobs
        self._versions += completion.policy_versions
        for name, rows in completion.token_tensors.items():
            self._token_tensors.setdefault(name, []).append(rows)
        self._finish_reason = completion.finish_reason

    def observed(self, observation: Observation, *, max_len: int | None = None) -> bool:
        """The environment's turn, after the policy's.

        If that would leave no room for an answer within `max_len` tokens, nothing is added and the result is False: a
        trajectory ends with what the policy sampled. Raises ValueError for a template that rewrites earlier turns.
        """
        tokens = self._between(observation)
        if max_len is not None and len(self.prompt_tokens) + len(self._response) + len(tokens) >= max_len:
            return False
        self._response += tokens
        self._mask += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._versions += [NO_VERSION] * len(tokens)
        for parts in self._token_tensors.values():
            parts.append(no_rows(parts[-1], len(tokens)))
        return True

    def trajectory(
        self,
        *,
        reward: float,
        finish_reason: str | None = None,
        metrics: dict[str, float] | None = None,
        turns: Sequence[Turn] = (),
    ) -> Trajectory:
        """The whole conversation; `finish_reason` defaults to that of the last completion."""
        return Trajectory(
            prompt_tokens=list(self.prompt_tokens),
            response_tokens=list(self._response),
            loss_mask=list(self._mask),
            behavior_logprobs=list(self._logprobs),
            policy_versions=list(self._versions),
            reward=reward,
            finish_reason=finish_reason or self._finish_reason,
            text=self._prompter.decode(self._response),
            metrics=metrics or {},
            turns=list(turns),
            token_tensors={name: joined_rows(parts) for name, parts in self._token_tensors.items()},
        )

    def _between(self, observation: Observation) -> list[int]:
        if is_token_ids(observation):
            return list(observation)  # type: ignore[arg-type]
        if self._messages is None:
            if self._prompter.has_template:
                raise TypeError("the conversation began with token ids; expected token ids as its observations too")
            self._messages = []
        turn = as_messages(observation)
        tokens = self._prompter.encode_next_turn(self._messages, turn)
        self._messages += [{"role": "assistant", "content": ASSISTANT_STANDS}, *turn]
        # The policy has written the end of its turn already, unless it was cut off or ended with another stop token.
        last = self._response[-1] if self._response else None
        return tokens[1:] if tokens[:1] == [last] and last in self._prompter.stop_token_ids else tokens


def as_messages(observation: Observation) -> list[Message]:
    """An observation as messages, unless it is token ids; text is one user message."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return list(observation)  # type: ignore[arg-type]


def with_system(messages: list[Message], text: str | None) -> list[Message]:
    """The messages with `text` (None: nothing) in their system message, after what it says already."""
    if text is None:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def is_token_ids(observation: Any) -> bool:
    return (
        not isinstance(observation, str)
        and isinstance(observation, Sequence)
        and bool(observation)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in observation)
    )


def is_observation(observation: Any) -> bool:
    """Whether it is non-empty text, messages ({"role": text, "content": text}) or token ids."""
    if isinstance(observation, str):
        return bool(observation)
    return is_token_ids(observation) or (
        isinstance(observation, list)
        and bool(observation)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in observation
        )
    )
