"""One request on its way: asked of an engine, heard of while it grows, ended by a stop text or a deadline."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..collector.engine import SampledTokens
from ..collector.open_requests import Piece
from ..envs.server import Refusal
from ..types import Completion
from .router import EngineGone, Router, ServedEngine
from .text import GrowingText

HEAR_S = 10.0
NO_ENGINE_S = 0.25
LONG_REST = 500
"""Tokens that are made text beside the event loop: each takes some ten microseconds."""


@dataclass
class Choice:
    """One of the n completions of a request. `new_text`, `num_told`: since its client was last told."""

    text: GrowingText
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    new_text: str = ""
    num_told: int = 0

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Nothing follows a stop text: what the engine sampled after it is dropped."""
        for token, logprob, version in zip(tokens, logprobs, versions, strict=True):
            if self.finish_reason:
                return
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            self.new_text += self.text.add(token)
            if self.text.is_stopped:
                self.end("stop")

    def end(self, reason: str) -> None:
        if not self.finish_reason:
            self.finish_reason = reason
            self.new_text += self.text.end()

    def complete(self, sampled: SampledTokens) -> None:
        """The engine has ended it; what was heard of it is the beginning of `sampled`."""
        known = len(self.tokens)
        self.add(sampled.tokens[known:], sampled.logprobs[known:], sampled.policy_versions[known:])
        self.end("length" if sampled.finish_reason == "length" else "stop")

    def completion(self) -> Completion:
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs,
            policy_versions=self.versions,
            finish_reason=self.finish_reason,
            text=self.text.text,
        )


class Sampler:
    """`grow` yields whenever a choice has grown, and for the last time when all have ended."""

    def __init__(self, router: Router, *, deadline_s: float) -> None:
        self._router = router
        self._deadline_s = deadline_s
        self._ending: set[asyncio.Task[None]] = set()

    async def grow(
        self, prompt_tokens: list[int], choices: Sequence[Choice], *, listens: bool, **sampling: Any
    ) -> AsyncGenerator[None]:
        """`listens`: be told on the way. Raises Refusal at the deadline, or where no engine can finish it."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._deadline_s
        while True:
            with self._router.engine_for(prompt_tokens, len(choices)) as engine:
                try:
                    if engine is not None:
                        async for _ in self._ask(engine, prompt_tokens, choices, end, listens, sampling):
                            yield
                        return
                except EngineGone:
                    if any(choice.tokens for choice in choices):
                        gone = "the engine was lost before the answer was complete; ask again"
                        raise Refusal(503, gone, "engine_lost") from None
            if clock() >= end:
                raise Refusal(503, f"no engine was up for {self._deadline_s:g} s (serve.timeout_s)", "no_engine")
            await asyncio.sleep(NO_ENGINE_S)

    async def _ask(
        self,
        engine: ServedEngine,
        prompt_tokens: list[int],
        choices: Sequence[Choice],
        end: float,
        listens: bool,
        sampling: dict[str, Any],
    ) -> AsyncGenerator[None]:
        name, clock = secrets.token_hex(8), asyncio.get_running_loop().time
        greedy = not sampling["temperature"]  # all choices are the same then
        sampling = {**sampling, "n": 1 if greedy else len(choices)}
        asking = asyncio.ensure_future(engine.sample(name, prompt_tokens, listens=listens, **sampling))
        hearing: asyncio.Future[list[Piece]] | None = None
        try:
            while not asking.done():
                if listens and hearing is None:
                    hearing = asyncio.ensure_future(engine.heard(name, within_s=HEAR_S))
                waiting = {asking} if hearing is None else {asking, hearing}
                await asyncio.wait(waiting, timeout=max(0.0, end - clock()), return_when=asyncio.FIRST_COMPLETED)
                if hearing is not None and hearing.done():
                    pieces, hearing = hearing.result(), None
                    _take(choices, pieces, greedy=greedy)
                    if all(choice.finish_reason for choice in choices):
                        break
                    if pieces:
                        yield
                    elif not asking.done():  # the engine has not heard of it yet
                        await asyncio.sleep(0.01)
                elif clock() >= end and not asking.done():
                    raise Refusal(504, f"no complete answer within {self._deadline_s:g} s (serve.timeout_s)", "timeout")
            else:
                sampled = asking.result()
                assert sampled is not None, "only this request ends it"
                every = sampled * len(choices) if greedy else sampled
                num_new = sum(len(own.tokens) - len(choice.tokens) for choice, own in zip(choices, every, strict=True))
                if num_new < LONG_REST:
                    _complete(choices, every)
                else:
                    await asyncio.to_thread(_complete, choices, every)
        finally:
            if hearing is not None:
                hearing.cancel()
            if not asking.done():
                self._later(engine.end(name))
            asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks
        yield

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except EngineGone:  # with all that it worked on
        pass


def _complete(choices: Sequence[Choice], sampled: Sequence[SampledTokens]) -> None:
    for choice, own in zip(choices, sampled, strict=True):
        choice.complete(own)


def _take(choices: Sequence[Choice], pieces: Sequence[Piece], *, greedy: bool) -> None:
    for index, tokens, logprobs, version in pieces:
        for choice in choices if greedy else [choices[index]]:
            choice.add(tokens, logprobs, [version] * len(tokens))
