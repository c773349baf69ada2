"""Where a collector's wall-clock time goes: what its engine does, or what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ACTIVITIES: tuple[str, ...] = (
    "pause",
    "evaluate",
    "generate",
    "environment",
    "withheld",
    "wait_for_weights",
    "wait_for_slot",
)
"""In order of precedence: the activity at any moment is the first of these that something is in.

`pause`: weights are loaded, nothing is generated. `evaluate`: held-out tasks. `generate`: the engine has a request.
`environment`: rollouts are under way and none of them asks the engine for anything. `withheld`: finished groups wait
for the proof of their version. `wait_for_weights`: groups wait for weights of their floor. `wait_for_slot`: nothing is
in flight.
"""


class ActivityClock:
    """Adds up seconds per activity; several things may be going on at once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._active = dict.fromkeys(ACTIVITIES[:-1], 0)
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        self._account()
        self._active[activity] += 1
        try:
            yield
        finally:
            self._account()
            self._active[activity] -= 1

    def drain(self) -> dict[str, float]:
        """Seconds per activity since the last call."""
        self._account()
        seconds, self._seconds = self._seconds, dict.fromkeys(ACTIVITIES, 0.0)
        return seconds

    def _account(self) -> None:
        now = self._now()
        activity = next((a for a, count in self._active.items() if count), ACTIVITIES[-1])
        self._seconds[activity] += now - self._since
        self._since = now
