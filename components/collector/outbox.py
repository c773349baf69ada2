"""Finished groups on their way out, while others begin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from ..group import Group

HOLD_S = 0.12
"""A call between two processes costs them milliseconds: after one that asks for more began, and again after its answer,
groups wait so long for the next. While an engine is kept full, one follows the other sooner.
"""


class Outbox:
    """Sends groups with one call of `send` at a time. What is added during a call goes with the next one: adding never
    waits, and a busy receiver gets fewer calls. Fewer still where other calls take groups along (`taken`): after one of
    those began, and after it was answered, groups wait `hold_s` seconds for the next.
    """

    def __init__(self, send: Callable[[list[Group]], Awaitable[object]], *, hold_s: float = HOLD_S) -> None:
        self._send = send
        self._hold_s = hold_s
        self._held_until, self._hurry = 0.0, asyncio.Event()
        self._groups: list[Group] = []
        self._num_calls = 0  # under way
        self._some, self._none = asyncio.Event(), asyncio.Event()
        self._none.set()

    def add(self, groups: Sequence[Group], *, are_last: bool = False) -> None:
        """`are_last`: nothing else is under way, so no call is expected that could take them along."""
        self._groups += groups
        if are_last:
            self._held_until = 0.0
            self._hurry.set()
        self._none.clear()
        self._some.set()

    async def run(self) -> NoReturn:
        """Raises what `send` raises."""
        while True:
            await self._some.wait()
            await asyncio.sleep(0)  # whoever asks for more because these have finished takes them along
            while self._groups and (left_s := self._held_until - asyncio.get_running_loop().time()) > 0:
                self._hurry.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), left_s)
            if self._groups:
                with self._leaving() as groups:
                    await self._send(groups)

    @contextmanager
    def taken(self) -> Iterator[list[Group]]:
        """All that wait, around a call that is made anyway and sends them. One that fails leaves them undelivered:
        `emptied` never returns then, and whoever waits for it hears of the failure from the call.
        """
        now = asyncio.get_running_loop().time
        self._held_until = now() + self._hold_s
        with self._leaving() as groups:
            yield groups
        self._held_until = now() + self._hold_s

    @contextmanager
    def _leaving(self) -> Iterator[list[Group]]:
        groups, self._groups = self._groups, []
        self._some.clear()
        self._num_calls += 1
        yield groups
        self._num_calls -= 1
        if not self._groups and not self._num_calls:
            self._none.set()

    async def emptied(self) -> None:
        """Wait until all that was added is sent."""
        await self._none.wait()
