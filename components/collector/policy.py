"""The policy as environments see it: text or tokens in, completions out."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ..config.sampling import kept_width
from ..sampling_masks import BARRED, KEPT, rows_of
from ..types import Completion, Message
from ..weights import WeightSyncError
from .clock import RolloutClock
from .engine import Generates, SampledTokens


@dataclass
class _Life:
    """What all views of one rollout's policy share: whether it has ended, and who asks the engine at this moment."""

    is_over: bool = False
    asking: set[asyncio.Task[Any]] = field(default_factory=set)


class EnginePolicy:
    """One group's view of the engine.

    `seed` makes its samples a function of (weights, prompt, seed); None leaves them free. With `top_k` or `min_tokens`
    completions say which tokens could be drawn (`sampling_masks`); `top_p` below 1 without `top_k` is for evaluation:
    the trainer does not reproduce such log-probabilities. `version`: under which all of it is sampled, by an engine
    that holds several (None: under what it serves at each token). `vocab_size`: ids of tokens are below it (None: not
    known). Every request is within a `generating()` and within `clock`: the engine tells that how much it worked on it.
    """

    def __init__(
        self,
        engine: Generates,
        prompter: Any,
        *,
        group_size: int,
        temperature: float,
        max_prompt_tokens: int,
        max_response_tokens: int,
        max_model_len: int,
        call_limit: int | None = None,
        seed: int | None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_tokens: int = 0,
        version: int | None = None,
        vocab_size: int | None = None,
        count_tokens: Callable[[int], None],
        generating: Callable[[], AbstractContextManager[None]],
        clock: RolloutClock | None = None,
        encoded: tuple[Any, list[int]] | None = None,
    ) -> None:
        """`encoded`: a prompt and its tokens, as the prompter encodes it."""
        self._engine = engine
        self.prompter = prompter
        self._encoded = encoded
        self.group_size = group_size
        self._temperature = temperature
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self.max_model_len = max_model_len
        self._call_limit = max_model_len if call_limit is None else call_limit
        self._seed = seed
        self._version = version
        self._vocab_size = vocab_size
        self._top_k, self._min_tokens = top_k, min_tokens
        self._special: dict[str, Any] = {} if top_p == 1.0 else {"top_p": top_p}
        self._special |= {"top_k": top_k} if top_k else {}
        if version is not None:
            self._special["version"] = version
        self._num_calls = 0
        self._count_tokens = count_tokens
        self._generating = generating
        self._clock = clock or RolloutClock()
        self._life = _Life()
        self.versions: set[int] = set()
        """Versions of all tokens sampled so far, those of `conversation` views included."""
        self.sampled: list[tuple[list[int], list[float]]] = []
        """The tokens and logprobs of all answers so far, of these views too."""

    def encode(self, prompt: str | list[Message]) -> list[int]:
        if self._encoded is not None and prompt == self._encoded[0]:
            return list(self._encoded[1])
        return self.prompter.encode(prompt)

    @property
    def masks(self) -> list[str]:
        """The `sampling_masks` that its completions bring, and trajectories must."""
        return [KEPT] if self._top_k else [BARRED] if self._min_tokens else []

    def conversation(self, index: int) -> EnginePolicy:
        """A view with a call count and seed of its own: requests of other conversations do not change its samples."""
        view = copy.copy(self)
        view._num_calls = 0
        # Two parts, where a call's own seed has one: no view repeats the seed of a call.
        view._seed = None if self._seed is None else derived_seed(self._seed, index, 0)
        return view

    def end(self) -> None:
        """The rollout has ended, or was given up: what it still asks the engine for is aborted, and more is refused."""
        self._life.is_over = True
        for task in self._life.asking:
            task.cancel()

    async def generate(
        self, prompt: str | list[Message] | list[int], *, n: int | None = None, max_tokens: int | None = None
    ) -> list[Completion]:
        if self._life.is_over:
            raise RuntimeError("this rollout has ended: its policy answers no more")
        tokens: list[int] = prompt if _is_tokens(prompt) else self.encode(prompt)  # type: ignore[arg-type]
        first_turn = self._num_calls == 0
        room = self.max_model_len - len(tokens)
        if (first_turn and len(tokens) > self._max_prompt_tokens) or room < 1:
            raise ValueError(
                f"prompt of {len(tokens)} tokens; rollout.max_prompt_tokens is {self._max_prompt_tokens} and "
                f"rollout.max_model_len is {self.max_model_len}: raise them or shorten the prompt"
            )
        check_ids(tokens, self._vocab_size)  # one that the model does not have would end the engine
        seed = None if self._seed is None else derived_seed(self._seed, self._num_calls)
        self._num_calls += 1
        most = min(self._max_response_tokens if max_tokens is None else max_tokens, room, self._call_limit)
        if most < 1:
            raise ValueError(f"max_tokens: got {max_tokens}, expected 1 or more; end the rollout instead")
        least: dict[str, Any] = {"min_tokens": min(self._min_tokens, most)} if self._min_tokens else {}
        with self._generating(), self._clock, self._asking():
            sampled = await self._engine.generate(
                tokens,
                clock=self._clock,
                n=self.group_size if n is None else n,
                temperature=self._temperature,
                max_tokens=most,
                stop_token_ids=self.prompter.stop_token_ids,
                seed=seed,
                **self._special,
                **least,
            )
        self._count_tokens(sum(len(s.tokens) for s in sampled))
        self.versions.update(*(s.policy_versions for s in sampled))
        self.sampled += [(list(s.tokens), list(s.logprobs)) for s in sampled]  # the lists become the environment's
        if self._version is not None and self.versions - {self._version}:
            others = ", ".join(map(str, sorted(self.versions - {self._version})))
            raise WeightSyncError("version", self._version, f"the engine sampled with version {others} in its place")
        # An engine may hand out hundreds of completions in one turn: let the loop breathe before decoding them.
        await asyncio.sleep(0)
        return [
            Completion(
                tokens=s.tokens,
                logprobs=s.logprobs,
                policy_versions=s.policy_versions,
                finish_reason=s.finish_reason,
                text=self.prompter.decode(s.tokens),
                token_tensors=self._masks(s, min_tokens=least.get("min_tokens", 0)),
            )
            for s in sampled
        ]

    def _masks(self, s: SampledTokens, *, min_tokens: int) -> dict[str, Any]:
        if self._top_k:  # what was barred is not among what was left
            assert s.kept is not None, "an engine that is asked for top_k says what it drew from"
            return {KEPT: rows_of(s.kept, kept_width(self._top_k))}
        if self._min_tokens:
            barred = [s.barred if i < min_tokens else () for i in range(len(s.tokens))]
            return {BARRED: rows_of(barred, len(s.barred))}
        return {}

    @contextmanager
    def _asking(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._life.asking.add(task)
        try:
            yield
        finally:
            self._life.asking.discard(task)


def check_ids(tokens: list[int], vocab_size: int | None) -> None:
    """Raises ValueError for a prompt with an id that no token has."""
    if tokens and (min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size)):
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        below = "" if vocab_size is None else f", below {vocab_size}, the model's vocabulary"
        raise ValueError(f"prompt with token id {wrong}; expected ids from 0{below}")


def derived_seed(*parts: int) -> int:
    """A 31-bit seed from several numbers; near numbers give unrelated seeds (an engine adds a completion's index)."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _is_tokens(prompt: Any) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
