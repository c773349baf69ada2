"""Where a collector's wall-clock time goes: generating, waiting for a slot, or paused for new weights."""

from __future__ import annotations

import time
from collections.abc import Callable


class ActivityClock:
    """Adds up seconds per activity.

    The activity at any moment: paused, else generating if any group is in flight, else waiting.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._paused = False
        self._in_flight = 0
        self._seconds = {"generate": 0.0, "wait_for_slot": 0.0, "pause": 0.0}

    def set_paused(self, paused: bool) -> None:
        self._account()
        self._paused = paused

    def set_in_flight(self, count: int) -> None:
        self._account()
        self._in_flight = count

    def drain(self) -> dict[str, float]:
        """Seconds per activity since the last call."""
        self._account()
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _account(self) -> None:
        now = self._now()
        activity = "pause" if self._paused else "generate" if self._in_flight else "wait_for_slot"
        self._seconds[activity] += now - self._since
        self._since = now
