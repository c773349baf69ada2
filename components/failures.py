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


def as_text(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Decorate an async method of an actor that has a `role`: whatever it raises leaves as `PartFailed`."""

    @functools.wraps(method)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except PartFailed:
            raise
        except Exception as error:
            actor: Any = args[0]
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise PartFailed(actor.role, cause, traceback.format_exc()) from None

    return wrapper
