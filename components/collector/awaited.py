"""Waiting for the next of many tasks to end, at a cost that does not grow with their number."""

from __future__ import annotations

import asyncio
from typing import TypeVar

F = TypeVar("F", bound="asyncio.Future")


class Awaited:
    """Futures that say when they have ended; asyncio.wait would look at each of them each time one does."""

    def __init__(self) -> None:
        self._ended: list[asyncio.Future] = []
        self._woken = asyncio.Event()

    def add(self, future: F) -> F:
        future.add_done_callback(self._end)
        return future

    async def ended(self) -> list[asyncio.Future]:
        """Those that have ended, cancelled or not, since this was last asked for: at least one."""
        await self._woken.wait()
        self._woken.clear()
        ended, self._ended = self._ended, []
        return ended

    def _end(self, future: asyncio.Future) -> None:
        self._ended.append(future)
        self._woken.set()
