"""Generators whose processes may die: each is a place that stays, with one process in it after the other.

    generator-0   process 1 ------x  start  process 2 ----------------------x  start  process 3 ----
    collect()     asked .............. asked again ............................ asked again ........ done

What a dead process held is issued again by the replay buffer; its successor serves nothing before it has pulled weights
and passed every check. So neither the bound nor exactly-once knows of the change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from ..failures import Kind, PartFailed
from .supervisor import Instead, Supervisor, as_coroutine, as_part_failure

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ask = Callable[[Any], Awaitable[T]]
"""From an actor's handle to a call of it."""
Made = Callable[[Any, Callable[[], None]], None]
Launch = Callable[[Callable[[], None], Made, Instead | None], Awaitable[str]]
"""`launch(placed, made, instead)` starts a process and has it watched, and returns the name under which the process
asks for groups. It calls `placed()` when there is room for it, and `made(actor, leave)` as soon as there is an actor;
`leave()` frees its place when it is gone.
"""

KILL_S = 10.0
LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True)
class Restart:
    """A generator that was replaced. `down_s`: until its successor served verified weights. `groups`: were lost with it
    and issued again. `at`: by `time.time`.
    """

    part: str
    cause: str
    at: float
    down_s: float
    groups: int


@dataclass
class Restarts:
    """What the generators of a stage share: `left` of `allowed` restarts, and those that are over.

    `tell`: is told in one line. `lost(name)`: takes from a process all that it held; returns how many groups.
    """

    allowed: int
    backoff_s: float
    start_timeout_s: float
    tell: Callable[[str], None]
    lost: Callable[[str, str], Awaitable[int]]
    left: int = field(init=False)
    over: list[Restart] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.allowed

    def take(self, failure: PartFailed) -> None:
        """One restart; raises PartFailed if there is none left."""
        if not self.left:
            raise PartFailed(
                failure.part,
                f"{failure.cause}; all {self.allowed} restarts are used up (cluster.restarts)",
                failure.details,
                failure.kind,
            )
        self.left -= 1


class _Lost(Exception):
    """The process that was asked is gone."""


class _Process:
    """One process. `lost` is set when it is given up, whatever it is doing."""

    def __init__(self) -> None:
        self.actor: Any = None
        self.leave: Callable[[], None] = lambda: None
        self.name = ""
        self.lost: asyncio.Future[PartFailed] = asyncio.get_running_loop().create_future()


class Generator:
    """One generator; `call` outlives its processes.

    Given up is a process that died or is stopped, whose engine died or hangs, or whose event loop does not answer. An
    error that it raised ends the run: its successor would raise it too.
    """

    def __init__(self, role: str, launch: Launch, *, supervisor: Supervisor, restarts: Restarts) -> None:
        self.role = role
        self._launch = launch
        self._supervisor = supervisor
        self._restarts = restarts
        self._process: _Process | None = None
        self._newest: _Process | None = None
        self._is_up, self._is_down = asyncio.Event(), asyncio.Event()
        self._is_down.set()
        self._replacing: asyncio.Future[None] | None = None
        self._is_leaving = False
        self._num_callers = 0
        self._no_caller = asyncio.Event()
        self._gone = asyncio.Event()  # while it was leaving

    async def start(self) -> None:
        """Its first process; raises what kept it from starting. The deadline is the caller's."""
        await self._start(_Process())

    async def join(self) -> None:
        """The same in a run that goes on without it: nothing is left of one that does not start in time."""
        try:
            await self._start_in_time(_Process(), waits_for_room=False)
        except BaseException:
            await self.leave()
            raise

    async def call(self, ask: Ask[T]) -> T:
        """The answer to `ask(actor)`; if the process is lost before, that of its successor. Raises what it raised."""
        with self._calling():
            return await self.call_always(ask)

    async def call_once(self, ask: Ask[T]) -> T | None:
        """The same without a wait for a successor, which may have to wait for room: None if the process is lost."""
        with self._calling():
            return await self.call_now(ask)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        self._num_callers += 1
        try:
            yield
        finally:
            self._num_callers -= 1
            if not self._num_callers:
                self._no_caller.set()

    async def call_always(self, ask: Ask[T]) -> T:
        """The same for what it does all the time: it may leave in the middle of it."""
        while True:
            await self._is_up.wait()
            assert self._process is not None
            try:
                return await self._ask(self._process, ask)
            except _Lost:
                continue

    async def call_now(self, ask: Ask[T]) -> T | None:
        """As `call_once`, and nobody's leaving waits for it."""
        if not self._is_up.is_set():
            return None
        assert self._process is not None
        try:
            return await self._ask(self._process, ask)
        except _Lost:
            return None

    async def until_gone_or(self, work: Awaitable[Any]) -> None:
        """Wait for `work`, after which it may leave. If its process is lost before, nobody replaces it."""
        while self._num_callers:  # they get their answer, if need be from a successor
            self._no_caller.clear()
            await self._no_caller.wait()
        self._is_leaving = True
        if self._replacing is not None:
            return
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._gone.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def leave(self) -> int:
        """End it for good; returns how many groups were issued again."""
        self._is_leaving = True
        self._set_up(False)
        if self._replacing is not None:
            self._replacing.cancel()
        assert self._newest is not None, "start() comes first"
        return await self._remove(self._newest, PartFailed(self.role, "it has left"))

    @property
    def name(self) -> str:
        """Under which its process asks for groups."""
        return self._process.name if self._process is not None else ""

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    async def until_up(self) -> None:
        """Returns when it has a process, which may be lost again."""
        await self._is_up.wait()

    async def until_replaced(self) -> None:
        """Returns when no successor is on its way, and the last one serves proven weights; or with what kept it from
        that, which ends the run.
        """
        while self._replacing is not None and not self._replacing.done():
            await asyncio.wait({self._replacing})

    async def until_down(self) -> None:
        """Returns when it has none, which may be replaced."""
        await self._is_down.wait()

    @property
    def actor(self) -> Any:
        """Of the process that is there now, or was last, also of one that is starting."""
        return self._newest.actor if self._newest is not None else None

    async def _ask(self, process: _Process, ask: Ask[T]) -> T:
        asking = asyncio.ensure_future(as_coroutine(ask(process.actor)))
        try:
            await asyncio.wait({asking, process.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise _Lost
            return asking.result()
        except RayActorError as error:
            self._may_be_lost(process, as_part_failure(self.role, error))
            raise
        except PartFailed as error:
            failure = as_part_failure(self.role, error)  # as it left the actor: Ray's own has a traceback for a text
            if failure.kind == Kind.ENGINE:
                self._may_be_lost(process, failure)
            raise failure from None
        finally:
            asking.cancel()

    def _may_be_lost(self, process: _Process, failure: PartFailed) -> None:
        if self._restarts.allowed:
            self._give_up(process, failure)
            raise _Lost from None

    def _give_up(self, process: _Process, failure: PartFailed) -> None:
        if process.lost.done():
            return
        process.lost.set_result(failure)
        if process is not self._process:  # whoever starts it hears of it
            return
        self._set_up(False)
        if self._is_leaving:
            self._gone.set()
        elif self._replacing is None:
            self._replacing = self._supervisor.watch(self.role, self._replaced(process, failure))

    async def _start(self, process: _Process, *, placed: Callable[[], None] = lambda: None) -> None:
        def made(actor: Any, leave: Callable[[], None]) -> None:
            process.actor, process.leave = actor, leave

        self._newest = process
        instead = (lambda failure: self._give_up(process, failure)) if self._restarts.allowed else None
        launching = asyncio.ensure_future(self._launch(placed, made, instead))
        try:
            await asyncio.wait({launching, process.lost}, return_when=asyncio.FIRST_COMPLETED)
            if process.lost.done():
                raise process.lost.result()
            process.name = launching.result()
        except Exception as error:
            raise as_part_failure(self.role, error) from None
        finally:
            launching.cancel()
        self._process = process
        self._set_up(True)

    def _set_up(self, is_up: bool) -> None:
        for event, holds in ((self._is_up, is_up), (self._is_down, not is_up)):
            event.set() if holds else event.clear()

    async def _start_in_time(self, process: _Process, *, waits_for_room: bool) -> None:
        """`waits_for_room`: however long that takes. Whether the run can wait for it, the trainer's deadline says."""
        timeout_s = self._restarts.start_timeout_s

        def placed() -> None:
            if waits_for_room:
                limit.reschedule(asyncio.get_running_loop().time() + timeout_s)

        limit = asyncio.timeout(None if waits_for_room else timeout_s)
        try:
            async with limit:
                await self._start(process, placed=placed)
        except TimeoutError:
            waited = f"it did not start within {timeout_s:g} s (cluster.start_timeout_s)"
            raise PartFailed(self.role, waited, kind=Kind.TIMEOUT) from None

    async def _replaced(self, process: _Process, failure: PartFailed) -> None:
        """Start processes until one serves."""
        now = asyncio.get_running_loop().time
        began, at, groups, in_a_row = now(), time.time(), 0, 0
        first = failure
        while True:
            groups += await self._remove(process, failure)
            self._restarts.take(failure)
            self._restarts.tell(f"warning: {failure}; starting it again, {self._restarts.left} restarts left")
            if in_a_row:
                await asyncio.sleep(min(LONGEST_BACKOFF_S, self._restarts.backoff_s * 2.0 ** (in_a_row - 1)))
            in_a_row += 1
            process = _Process()
            try:
                await self._start_in_time(process, waits_for_room=True)
            except PartFailed as error:
                failure = error
                continue
            try:
                await self._ask(process, lambda actor: actor.until_verified.remote(0))
            except _Lost:
                failure = process.lost.result()
                continue
            down_s = now() - began
            self._restarts.over.append(Restart(self.role, first.cause, at, down_s, groups))
            self._restarts.tell(f"{self.role} serves again, after {down_s:.1f} s; {groups} groups were issued again")
            self._replacing = None
            return

    async def _remove(self, process: _Process, failure: PartFailed) -> int:
        """Whatever is left of it ends; returns how many groups it held."""
        self._supervisor.end_part(self.role)
        if process.actor is not None:
            await _kill(process.actor, self.role)
            process.leave()
        return await self._restarts.lost(process.name, failure.cause) if process.name else 0


async def _kill(actor: Any, role: str) -> None:
    try:
        async with asyncio.timeout(KILL_S):  # killing asks Ray, which may itself not answer
            await asyncio.to_thread(ray.kill, actor)
    except TimeoutError:
        logger.warning("%s: Ray did not kill its process within %g s", role, KILL_S)
