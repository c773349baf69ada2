"""Generators whose processes never die, in tests of those who ask them for something."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any


class Standing:
    """In place of a `Generator`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.role = "generator-0"

    async def call(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        return await ask(self.actor)

    call_now = call_once = call
    is_up = True


def generators_of(*actors: Any) -> dict[str, Any]:
    """What `Parts` says of generators."""
    return {"generators": [Standing(actor) for actor in actors], "restarts": SimpleNamespace(left=10, over=[])}
