"""Waiting for tasks: for the next of many, at a cost that does not grow with their number; for one, watched."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound="asyncio.Future")
T = TypeVar("T")


class CompletionQueue:
    """Futures that say when they have ended; asyncio.wait would look at each of them each time one does."""

    def __init__(self) -> None:
        self._ended: list[asyncio.Future] = []
        self._woken = asyncio.Event()

    def add(self, future: F) -> F:
        future.add_done_callback(self._end)
        return future

    async def get(self) -> list[asyncio.Future]:
        """Those that have ended, cancelled or not, since this was last asked for: at least one."""
        await self._woken.wait()
        self._woken.clear()
        ended, self._ended = self._ended, []
        return ended

    def _end(self, future: asyncio.Future) -> None:
        self._ended.append(future)
        self._woken.set()


async def unless(watch: Coroutine[Any, Any, NoReturn], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless `watch` raises first; the other one is cancelled."""
    watching, working = asyncio.create_task(watch), asyncio.create_task(work)
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else watching.result()
    finally:
        watching.cancel()
        working.cancel()
