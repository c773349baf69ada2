"""Batches from the replay buffer, each asked for while the one before is trained on."""

from __future__ import annotations

import asyncio

from ..config import Config
from ..replay.actor import BatchRefs
from ..runtime.launch import Parts
from ..runtime.supervisor import as_coroutine


class BatchFeed:
    """`ask` for a batch, train on the one before, then `complete` it: None after the last one."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._buffer = parts.buffer
        self._wait_for = parts.supervisor.wait
        self._timeout_s = config.cluster.step_timeout_s

    def ask(self) -> asyncio.Future[BatchRefs | None]:
        upcoming = asyncio.ensure_future(as_coroutine(self._buffer.take_batch.remote(self._timeout_s)))
        # Whoever awaits it gets its exception; when the run is ending, nobody does.
        upcoming.add_done_callback(lambda call: None if call.cancelled() else call.exception())
        return upcoming

    async def complete(self, upcoming: asyncio.Future[BatchRefs | None]) -> BatchRefs | None:
        """Waits as long as the buffer's groups make progress: the buffer itself ends a standstill, and names the cause.

        A buffer that does not respond at all is detected here.
        """
        while not upcoming.done():
            half_s = self._timeout_s / 2
            await self._wait_for(asyncio.wait({upcoming}, timeout=half_s), what="replay", timeout_s=half_s + 60)
            if not upcoming.done():
                await self._wait_for(self._buffer.ping.remote(), what="replay", timeout_s=half_s)
        return await self._wait_for(upcoming, what="replay", timeout_s=self._timeout_s)
