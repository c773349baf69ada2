"""Failures that cross process boundaries: always as text, with the name of the part that failed."""

from __future__ import annotations

import asyncio
import functools
import os
import time
import traceback
from collections.abc import Awaitable, Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from . import spans
from .redaction import redacted

P = ParamSpec("P")
T = TypeVar("T")


class EachCharacter(dict[int, str]):
    """For `str.translate`: what `as_text` makes of each character, remembered for some thousands of them."""

    def __init__(self, as_text: Callable[[str], str]) -> None:
        super().__init__()
        self._as_text = as_text

    def __missing__(self, code: int) -> str:
        text = self._as_text(chr(code))
        if len(self) < MOST_REMEMBERED:
            self[code] = text
        return text


MOST_REMEMBERED = 10_000


def printable(text: str) -> str:
    """The same text for a terminal or a log: what has no shape, but line ends and tabs, is written as an escape.

    Texts of data and models reach error messages; there, an escape sequence would set titles, hide lines, or worse.
    Secrets that this process knows are left out.
    """
    text = redacted(text)
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return text.translate(_PRINTABLE)


_PRINTABLE = EachCharacter(lambda c: c if c.isprintable() or c in "\n\t" else repr(c)[1:-1])


class Kind(IntEnum):
    """The kind of a failure. Among failures close in time, the one with the smallest kind explains the others."""

    CLUSTER = 0  # one of Ray's own processes died or is stopped: everything on the cluster fails with it
    DIED = 1  # a part's process died
    STOPPED = 2  # a part's process exists but does not run
    ENGINE = 3  # a part says that its engine died or hangs
    ERROR = 4  # a part itself raised an error
    SILENT = 5  # a part's event loop does not answer
    LOST = 6  # a part could not reach another one
    TIMEOUT = 7  # a wait took too long


PASSING = frozenset(Kind) - {Kind.ERROR}
"""What may be over when the part is started again. An error would be raised again."""


class PartFailed(RuntimeError):
    """A part of the run failed. `part` names it, `cause` is one line, `details` is its own traceback.

    It is text only, without the secrets that this process knows: unpickling vLLM's or torch's exceptions in the driver
    would import those libraries, which takes seconds.
    """

    exit_code = 1

    def __init__(self, part: str, cause: str, details: str = "", kind: Kind = Kind.ERROR) -> None:
        cause, details = printable(cause), printable(details)
        super().__init__(part, cause, details, kind)
        self.part, self.cause, self.details, self.kind = part, cause, details, kind

    def __str__(self) -> str:
        return f"{self.part}: {self.cause}"


class Refused(ValueError):
    """The user's input is unusable, in one line: got, expected, fix. It needs no traceback."""


class InputRefused(PartFailed):
    """A part of the run refused the user's input before using it."""

    exit_code = 2

    def __str__(self) -> str:
        return self.cause


class Watched:
    """Calls that every actor answers, so that the driver can tell whether it is alive and responsive."""

    async def wait_until_death(self) -> None:
        """Never returns: a pending call fails at once when the process dies."""
        await asyncio.Event().wait()

    async def answer(self) -> tuple[str, int]:
        """The machine and the process id; answers at once, unless something blocks the event loop."""
        return machine(), os.getpid()

    async def clock(self) -> float:
        """This machine's."""
        return time.time()

    async def open_spans(self, path: Path, part: str, clock_offset_s: float) -> None:
        """See `spans.SpanWriter`."""
        spans.open_writer(path, part=part, clock_offset_s=clock_offset_s)

    async def close_spans(self) -> None:
        spans.close_writer()


def machine() -> str:
    """The same text in all processes that can see each other by their ids: host names may be those of others too."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no Linux
        return os.uname().nodename


def as_text(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Decorate an async method of an actor that has a `role`: whatever it raises leaves as `PartFailed`."""

    @functools.wraps(method)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except PartFailed:
            raise
        except Refused as error:
            raise InputRefused(_role(args[0]), " ".join(str(error).split())) from None
        except Exception as error:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise PartFailed(_role(args[0]), cause, traceback.format_exc(), kind_of(error)) from None

    return wrapper


def _role(actor: Any) -> str:
    return actor.role


def kind_of(error: BaseException) -> Kind:
    """The kind of failure that an error raised by a part indicates."""
    if isinstance(error, TimeoutError):
        return Kind.TIMEOUT
    # Compared by name, so that parts without Ray, or without an engine, need not load it.
    names = {c.__name__ for c in type(error).__mro__}
    if "EngineLost" in names:
        return Kind.ENGINE
    return Kind.LOST if names & {"RayActorError", "ObjectLostError"} else Kind.ERROR
