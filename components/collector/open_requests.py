"""Requests that an engine answers outside of any rollout: those of a served address."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .engine import Generates, Heard, SampledTokens

Piece = tuple[int, list[int], list[float], int]
"""(index of the completion, its next tokens, their logprobs, the version that drew them)."""


@dataclass(eq=False)
class _Open:
    pieces: list[Piece] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[list[SampledTokens]] | None = None
    was_ended: bool = False

    def hear(self, index: int, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.pieces.append((index, tokens, logprobs, version))
        self.news.set()


class OpenRequests:
    """Whoever asks names its request, and may then hear of it on the way, and end it."""

    def __init__(self, engine: Generates) -> None:
        self._engine = engine
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def sample(
        self, name: str, prompt_tokens: Sequence[int], *, listens: bool, **sampling: Any
    ) -> list[SampledTokens] | None:
        """See `Generates.generate`; None where `end` ended it. `listens`: `heard` will be asked."""
        own = self._open[name] = _Open()
        heard: Heard | None = own.hear if listens else None
        own.task = asyncio.create_task(self._engine.generate(prompt_tokens, heard=heard, **sampling))
        try:
            return await own.task
        except asyncio.CancelledError:
            if own.was_ended:
                return None
            raise
        finally:
            del self._open[name]
            own.news.set()

    async def heard(self, name: str, *, within_s: float) -> list[Piece]:
        """What was sampled since the last call, as soon as there is something; [] if it has ended, or after so long."""
        own = self._open.get(name)
        if own is None:
            return []
        try:
            async with asyncio.timeout(within_s):
                await own.news.wait()
        except TimeoutError:
            return []
        own.news.clear()
        pieces, own.pieces = own.pieces, []
        return pieces

    def end(self, name: str) -> None:
        """Abort it at the engine; nothing happens where it has ended."""
        own = self._open.get(name)
        if own is not None and own.task is not None:
            own.was_ended = True
            own.task.cancel()
