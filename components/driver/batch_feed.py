"""Batches from the replay buffer, each asked for while the one before is trained on, or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from ..config import Config
from ..replay.actor import BatchRefs
from ..runtime.launch import Parts
from ..runtime.supervisor import as_coroutine

T = TypeVar("T")


class BatchFeed:
    """`ask` for a batch, train on the one before, then `complete` it: None after the last one."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._buffer = parts.buffer
        self._wait_for = parts.supervisor.wait
        self._timeout_s = config.cluster.step_timeout_s

    def ask(self) -> asyncio.Future[BatchRefs | None]:
        return _asked(self._buffer.take_batch.remote(self._timeout_s))

    async def part(self, *, at_least: int) -> list[Any] | None:
        """Each rank's share of what has come of the next batch since the last call, of `at_least` groups or more; None
        once `ask` is answered with the rest.
        """
        return await self.complete(_asked(self._buffer.take_part.remote(at_least, self._timeout_s)))

    async def complete(self, upcoming: asyncio.Future[T]) -> T:
        """Waits as long as the buffer's groups make progress: the buffer itself ends a standstill, and names the cause.

        A buffer that does not respond at all is detected here.
        """
        while not upcoming.done():
            half_s = self._timeout_s / 2
            await self._wait_for(asyncio.wait({upcoming}, timeout=half_s), what="replay", timeout_s=half_s + 60)
            if not upcoming.done():
                await self._wait_for(self._buffer.ping.remote(), what="replay", timeout_s=half_s)
        return await self._wait_for(upcoming, what="replay", timeout_s=self._timeout_s)


def _asked(call: Awaitable[T]) -> asyncio.Future[T]:
    upcoming = asyncio.ensure_future(as_coroutine(call))
    # Whoever awaits it gets its exception; when the run is ending, nobody does.
    upcoming.add_done_callback(lambda call: None if call.cancelled() else call.exception())
    return upcoming
