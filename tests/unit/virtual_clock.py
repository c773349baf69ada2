"""Time that passes only where everything waits, for tests of deadlines and of engines that are played."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer instead of sleeping; without one, nothing can ever happen again."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "deadlock: everything waits, and nothing is due at any time"
        self._clock.now += timeout
        return []
