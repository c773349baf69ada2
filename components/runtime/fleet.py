"""The generators of a stage, whose number may change while it runs, and what each of them does all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from .generators import Ask, Generator
from .supervisor import Supervisor


class Duty:
    """A call that every generator has under way, from its start on. It may end for each in its own time."""

    def __init__(self, ask: Ask[Any], supervisor: Supervisor, *, drains: bool) -> None:
        """`drains`: it ends for a generator that gets no more groups."""
        self.drains = drains
        self._ask = ask
        self._supervisor = supervisor
        self._calls: dict[Generator, asyncio.Future[Any]] = {}

    def begin(self, generator: Generator) -> None:
        self._calls[generator] = self._supervisor.watch(generator.role, generator.call_always(self._ask))

    def end(self, generator: Generator) -> None:
        self._calls.pop(generator).cancel()

    def stop(self) -> None:
        """For all: no successor is asked for it either."""
        for generator in [*self._calls]:
            self.end(generator)

    async def ended(self, *generators: Generator) -> None:
        """Wait until it has ended for these, or for all that there are by then."""
        while pending := [c for g, c in self._calls.items() if (not generators or g in generators) and not c.done()]:
            await asyncio.wait(pending)

    async def wound_up(self) -> None:
        """The same when nothing more will come: one whose process is lost has nothing to end, and its successor, which
        may have to wait for room as long as a machine is away, is not waited for.
        """
        while pending := {c: g for g, c in self._calls.items() if g.is_up and not c.done()}:
            await first_of(*pending, *(g.until_down() for g in pending.values()))


async def first_of(*waits: Awaitable[Any]) -> None:
    """Returns with the first of these; futures go on, coroutines do not. Raises nothing of theirs."""
    own = [asyncio.ensure_future(wait) for wait in waits if not asyncio.isfuture(wait)]
    try:
        await asyncio.wait([*own, *filter(asyncio.isfuture, waits)], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()


async def with_a_process(generators: Iterable[Generator]) -> list[Generator]:
    """Those that can be asked now; if there is none, waits until there is."""
    every = [*generators]
    while not (up := [g for g in every if g.is_up]):
        await first_of(*(g.until_up() for g in every))
    return up


class Fleet:
    """Iterate it for the generators that there are, those that are being replaced included.

    `make(index)` makes one, not yet started; `start(generator)` waits for one of the first to start. `retire(name)`:
    see `ReplayBuffer.retire`.
    """

    def __init__(
        self,
        make: Callable[[int], Generator],
        *,
        start: Callable[[Generator], Awaitable[None]],
        retire: Callable[[str], Awaitable[None]],
        supervisor: Supervisor,
    ) -> None:
        self._make = make
        self._start = start
        self._retire = retire
        self._supervisor = supervisor
        self._duties: list[Duty] = []
        self._all: dict[int, Generator] = {}
        self._leaving: list[Generator] = []

    def __iter__(self) -> Iterator[Generator]:
        return iter([*self._all.values()])

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Generator:
        return list(self)[index]

    def actors(self) -> list[Any]:
        """Of all processes that there are, those of generators that are leaving included."""
        return [g.actor for g in [*self, *self._leaving] if g.actor is not None]

    async def begin(self, number: int) -> None:
        """Start so many at once."""
        self._all = {index: self._make(index) for index in range(number)}
        await asyncio.gather(*(self._start(generator) for generator in self))

    def always(self, ask: Ask[Any], *, drains: bool = False) -> Duty:
        """Have every generator do this, those that come later too."""
        duty = Duty(ask, self._supervisor, drains=drains)
        self._duties.append(duty)
        for generator in self:
            duty.begin(generator)
        return duty

    async def finish(self) -> None:
        """What they did all the time was one run's, which has ended: nobody is asked for it any more. Waits for those
        that are being replaced: they would begin with that run, and go on in the next.
        """
        for generator in self:
            await generator.until_replaced()
        for duty in self._duties:
            if duty.drains:
                await duty.ended()
            duty.stop()
        self._duties.clear()

    async def join(self) -> Generator:
        """One more. It serves when it has pulled weights and passed every check. Raises what kept it from starting."""
        index = next(i for i in range(len(self._all) + 1) if i not in self._all)
        generator = self._make(index)
        await generator.join()
        self._all[index] = generator
        for duty in self._duties:
            duty.begin(generator)
        return generator

    async def leave(self, *, at_once: bool = False) -> int:
        """The last one goes, when it has finished what it holds, or `at_once`; returns how many groups were issued
        again.
        """
        index = max(self._all)
        generator = self._all.pop(index)
        self._leaving.append(generator)

        async def drained() -> None:
            await self._retire(generator.name)
            for duty in self._duties:
                if duty.drains:
                    await duty.ended(generator)

        await generator.until_gone_or(asyncio.sleep(0) if at_once else drained())
        for duty in self._duties:
            duty.end(generator)
        groups = await generator.leave()
        self._leaving.remove(generator)
        return groups
