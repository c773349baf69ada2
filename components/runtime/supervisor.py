"""Watches every part of a run, so that waiting for one never outlasts the death of another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError

from ..failures import PartFailed

T = TypeVar("T")


class Supervisor:
    """Holds one pending call per watched part; `wait` gives up as soon as any of them fails."""

    def __init__(self) -> None:
        self._watched: dict[asyncio.Future[Any], str] = {}

    def watch(self, part: str, call: Awaitable[Any]) -> asyncio.Future[Any]:
        """`call` runs until the part ends: returning is fine, failing ends the run by the part's name."""
        future = asyncio.ensure_future(awaited(call))
        self._watched[future] = part
        return future

    async def wait(
        self, call: Awaitable[T], *, what: str, timeout_s: float, deadline: str = "cluster.step_timeout_s"
    ) -> T:
        """The result of `call`. Raises `PartFailed` naming what failed, or what was waited for and for how long.

        `deadline` names the setting that `timeout_s` came from.
        """
        main = asyncio.ensure_future(awaited(call))
        try:
            async with asyncio.timeout(timeout_s):
                while not main.done():
                    await asyncio.wait({main, *self._watched}, return_when=asyncio.FIRST_COMPLETED)
                    self._raise_failures()
            return main.result()
        except TimeoutError as error:
            if main.done() and not main.cancelled():  # the call itself timed out and says why
                raise as_part_failure(what, error) from None
            raise PartFailed(what, f"no answer for {timeout_s:g} s; raise {deadline} if that is normal here") from None
        except Exception as error:
            # A part that died often shows first as an error of one that was talking to it: give the death a moment.
            if self._watched and type(error) is not PartFailed:
                await asyncio.wait(self._watched, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failures()
            raise as_part_failure(what, error) from None
        finally:
            main.cancel()

    def forget_all(self) -> None:
        """The parts are about to be ended on purpose."""
        for future in self._watched:
            future.cancel()
        self._watched.clear()

    def _raise_failures(self) -> None:
        for future, part in list(self._watched.items()):
            if not future.done():
                continue
            if not future.cancelled() and (error := future.exception()) is not None:
                raise as_part_failure(part, error)  # kept: every other wait must end by it too
            del self._watched[future]


def as_part_failure(part: str, error: BaseException) -> PartFailed:
    """What the user is told: the failing part's own words where there are any."""
    # What an actor raised arrives as both a RayTaskError and the original's own type; `cause` is the original.
    original = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(original, PartFailed):
        return original
    if isinstance(error, RayActorError):
        return PartFailed(part, f"the process died ({' '.join(str(error).split())[:300]})", str(error))
    return PartFailed(part, f"{type(error).__name__}: {' '.join(str(error).split())}", str(error))


async def awaited(call: Awaitable[T]) -> T:
    """A coroutine of `call`, which may be an object reference of Ray."""
    return await call


def together(calls: Iterable[Awaitable[T]]) -> asyncio.Future[list[T]]:
    """All results in order; the first failure fails them all."""
    return asyncio.gather(*map(awaited, calls))
