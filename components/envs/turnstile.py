"""Releases coroutines one at a time: when hundreds become ready together, other work runs in between."""

from __future__ import annotations

import asyncio


class Turnstile:
    """`await through()`: in the order of asking, one for each turn of the event loop.

    What is let through runs until it first waits. So a loop whose work comes in bursts stays as responsive as the
    longest single piece of work, however many pieces there are.
    """

    def __init__(self) -> None:
        self._next = asyncio.Lock()  # fair: first come, first served

    async def through(self) -> None:
        async with self._next:
            await asyncio.sleep(0)
