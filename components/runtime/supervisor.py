"""Watches every part of a run, so that waiting for one never outlasts the death of another.

Among failures close in time, the one that explains the others is reported: a dead or stopped process before an error,
an error before a time-out of waiting for it (see `Kind`), and the first of two equal kinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from ..failures import Kind, PartFailed, kind_of
from .watch import RunWatch

T = TypeVar("T")
Ping = Callable[[], Awaitable[Any]]
Instead = Callable[[PartFailed], Any]

PULSE_S = 15.0
SILENT_S = 120.0
"""A part whose event loop does not answer for this long fails the run."""
GRACE_S = {Kind.ENGINE: 1.5, Kind.ERROR: 1.5, Kind.SILENT: 1.5, Kind.LOST: 4.0, Kind.TIMEOUT: 4.0}
"""How long to wait, by kind of failure, for another one that explains it."""


class Supervisor:
    """Holds one pending call per watched part; `wait` gives up as soon as any of them fails.

    The failure is reported to `watch` (the run's; None: processes are not watched), which starts the ending's deadline.
    """

    def __init__(self, watch: RunWatch | None = None) -> None:
        self._watched: dict[asyncio.Future[Any], str] = {}
        self._run_watch = watch
        self._replaceable: defaultdict[str, list[asyncio.Future[Any]]] = defaultdict(list)
        self._pings: dict[str, Ping] = {}
        self._root: asyncio.Future[PartFailed] | None = None
        self._one_more: asyncio.Future[None] | None = None  # done when one more is watched

    def watch(self, part: str, call: Awaitable[Any], *, instead: Instead | None = None) -> asyncio.Future[Any]:
        """`call` runs until the part ends: returning is fine, failing ends the run and names the part.

        `instead`: is called then, and the run goes on.
        """
        if self._run_watch is not None and not self._watched:
            machine = asyncio.ensure_future(self._run_watch.until_broken())
            self._watched[machine] = "machine"
        if instead is not None:
            return self._watch_replaceable(part, call, instead)
        future = asyncio.ensure_future(as_coroutine(call))
        self._watched[future] = part
        if self._one_more is not None:  # waits that are under way end with this one too
            self._one_more.set_result(None)
            self._one_more = None
        return future

    def watch_process(
        self, part: str, call: Awaitable[Any], *, pids: Iterable[int], instead: Instead | None = None
    ) -> None:
        """A part in separate processes; `call` is pending while it lives. `pids` are those on this machine."""
        self.watch(part, call, instead=instead)
        if self._run_watch is not None:
            self._run_watch.add(part, pids, instead=instead)

    def watch_pulse(
        self, part: str, ping: Ping, *, engine_pids: Iterable[int] = (), instead: Instead | None = None
    ) -> None:
        """The part is up: watch its event loop with `ping`, and also the processes that it started on this machine."""
        self._pings[part] = ping
        self.watch(part, self._pulse(part, ping), instead=instead)
        if self._run_watch is not None:
            self._run_watch.add(part, engine_pids, what="engine's process", instead=instead)

    def end_part(self, part: str) -> None:
        """A part that is to be replaced: it is watched no more, and what is left of it on this machine is killed."""
        for future in self._replaceable.pop(part, ()):
            future.cancel()
        self._pings.pop(part, None)
        if self._run_watch is not None:
            self._run_watch.kill(part)

    async def wait(
        self, call: Awaitable[T], *, what: str, timeout_s: float, deadline: str = "cluster.step_timeout_s"
    ) -> T:
        """The result of `call`. Raises `PartFailed` naming what failed, or which wait took too long.

        `deadline` names the setting that `timeout_s` came from.
        """
        main = asyncio.ensure_future(as_coroutine(call))
        try:
            async with asyncio.timeout(timeout_s):
                while not main.done():
                    if self._one_more is None:
                        self._one_more = asyncio.get_running_loop().create_future()
                    await asyncio.wait({main, self._one_more, *self._watched}, return_when=asyncio.FIRST_COMPLETED)
                    if failures := self._failures():
                        raise failures[0]
            return main.result()
        except TimeoutError as error:
            if main.done() and not main.cancelled():  # the call itself timed out and gives the reason
                failure = as_part_failure(what, error)
            else:
                cause = f"no answer for {timeout_s:g} s; raise {deadline} if that is normal here"
                failure = PartFailed(what, cause, kind=Kind.TIMEOUT)
            raise await self._explained(failure) from None
        except Exception as error:
            raise await self._explained(as_part_failure(what, error)) from None
        finally:
            main.cancel()

    def forget_all(self) -> None:
        """Call this before the parts are ended on purpose."""
        for future in [*self._watched, *(f for futures in self._replaceable.values() for f in futures)]:
            future.cancel()
        self._watched.clear()
        self._replaceable.clear()
        self._pings.clear()
        if self._run_watch is not None:
            self._run_watch.forget_parts()

    def _watch_replaceable(self, part: str, call: Awaitable[Any], instead: Instead) -> asyncio.Future[Any]:
        def ended(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                instead(as_part_failure(part, error))

        future = asyncio.ensure_future(as_coroutine(call))
        future.add_done_callback(ended)
        self._replaceable[part].append(future)
        return future

    def _failures(self) -> list[PartFailed]:
        """The failures of the watched parts so far; kept, because every other wait must end with them too."""
        failures = []
        for future, part in list(self._watched.items()):
            if not future.done():
                continue
            if not future.cancelled() and (error := future.exception()) is not None:
                failures.append(as_part_failure(part, error))
            else:
                del self._watched[future]
        return failures

    async def _explained(self, first: PartFailed) -> PartFailed:
        """The failure at the root of `first`, with which every wait of this run ends."""
        if self._root is None:
            self._root = asyncio.ensure_future(self._find_root(first))
        return await asyncio.shield(self._root)

    async def _find_root(self, first: PartFailed) -> PartFailed:
        """Give a death that explains `first` a moment to be seen, and ask every part whether it answers."""
        candidates = [first, *self._failures()]
        grace_s = max(GRACE_S.get(c.kind, 0.0) for c in candidates) if self._watched else 0.0
        silent = asyncio.ensure_future(self._silent(grace_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while min(c.kind for c in candidates) > Kind.STOPPED:
                    pending = {future for future in self._watched if not future.done()}
                    await asyncio.wait({silent, *pending}, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                    candidates = [first, *self._failures(), *self._evidence()]
                    if silent.done():
                        await asyncio.sleep(0.25)
        candidates = [first, *self._failures(), *self._evidence()]
        if first.kind >= Kind.LOST:
            candidates += await silent
        silent.cancel()
        root = min(candidates, key=lambda c: c.kind)
        if not root.details:  # the part's own message, if it still sent one, says more than the state of its process
            said = [c.details for c in candidates if c.part == root.part and c.details]
            root = type(root)(root.part, root.cause, *said[:1], kind=root.kind) if said else root
        if self._run_watch is not None:
            self._run_watch.failed(root)
        return root

    def _evidence(self) -> list[PartFailed]:
        return [] if self._run_watch is None else self._run_watch.evidence()

    async def _silent(self, within_s: float) -> list[PartFailed]:
        """The parts whose event loop does not answer within that time."""
        names = list(self._pings)
        answered = await asyncio.gather(*(self._answers(self._pings[name], within_s) for name in names))
        return [_silence(name, within_s) for name, has in zip(names, answered, strict=True) if not has]

    async def _pulse(self, part: str, ping: Ping) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            # Twice: if this event loop was the one that was blocked, the answer has arrived in the meantime.
            if not await self._answers(ping, SILENT_S) and not await self._answers(ping, 5.0):
                raise _silence(part, SILENT_S)

    async def _answers(self, ping: Ping, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await ping()
        except TimeoutError:
            return False
        except Exception:  # it is dead, which is detected elsewhere
            return True
        return True


def _silence(part: str, seconds: float) -> PartFailed:
    cause = (
        f"its event loop has not answered for {seconds:g} s: something in it blocks (an environment's own code? "
        "a generator's log names the line)"
    )
    return PartFailed(part, cause, kind=Kind.SILENT)


def as_part_failure(part: str, error: BaseException) -> PartFailed:
    """The message for the user: the failing part's own message if there is one."""
    # What an actor raised arrives as both a RayTaskError and the original's own type; `cause` is the original.
    original = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(original, PartFailed):
        return original
    if isinstance(error, ActorDiedError):
        return PartFailed(part, f"the process died ({_in_short(error)})", str(error), Kind.DIED)
    if isinstance(error, RayActorError):
        return PartFailed(part, f"it is unreachable ({_in_short(error)})", str(error), Kind.LOST)
    return PartFailed(part, f"{type(error).__name__}: {' '.join(str(error).split())}", str(error), kind_of(error))


def _in_short(error: RayActorError) -> str:
    """What Ray knows of a death, without its guesses: those stand in the details."""
    if error.actor_init_failed:
        return str(error).strip().splitlines()[-1][:200]
    text = " ".join(str(error).split())
    pid = re.search(r"\bpid: (\d+)", text)
    known = re.search(
        r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: There are some potential root causes|$)", text
    )
    if known is None:
        because = re.search(r"The actor is dead because (.*?)(?:\. |$)", text)
        said = because[1] if because else re.split(r"(?<=\.) ", text)[0]
    elif known[1] == "SYSTEM_ERROR" and "code 2. End of file" in known[2]:
        said = "it was killed from outside, ran out of memory, or crashed in native code"
    else:
        said = known[2]
    return (f"pid {pid[1]}: " if pid else "") + said.rstrip(".")[:200]


async def as_coroutine(call: Awaitable[T]) -> T:
    """A coroutine of `call`, which may be an object reference of Ray."""
    return await call


def together(calls: Iterable[Awaitable[T]]) -> asyncio.Future[list[T]]:
    """All results in order; the first failure fails them all."""
    return asyncio.gather(*map(as_coroutine, calls))
