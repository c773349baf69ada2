"""Failures that cross a process: always as text, with the name of the part they happened in."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class PartFailed(RuntimeError):
    """A part of the run failed. `part` names it, `cause` is one line, `details` is its own traceback.

    It is text only: unpickling vLLM's or torch's exceptions in the driver would import those libraries: seconds.
    """

    exit_code = 1

    def __init__(self, part: str, cause: str, details: str = "") -> None:
        super().__init__(part, cause, details)
        self.part, self.cause, self.details = part, cause, details

    def __str__(self) -> str:
        return f"{self.part}: {self.cause}"


class Refused(ValueError):
    """What the user gave cannot be worked with, in one line: got, expected, fix. It needs no traceback."""


class InputRefused(PartFailed):
    """A part of the run refused what the user gave, before anything was done with it."""

    exit_code = 2

    def __str__(self) -> str:
        return self.cause


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
            raise PartFailed(_role(args[0]), cause, traceback.format_exc()) from None

    return wrapper


def _role(actor: Any) -> str:
    return actor.role
