"""Where a collector's wall-clock time goes: what its engine does, or what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

ACTIVITIES: tuple[str, ...] = (
    "asleep",
    "pause",
    "evaluate",
    "generate",
    "environment",
    "withheld",
    "wait_for_weights",
    "wait_for_slot",
)
"""In order of precedence: the activity at any moment is the first of these that something is in.

`asleep`: the trainer has the engine's devices. `pause`: weights are loaded, nothing is generated. `evaluate`: held-out
tasks. `generate`: the engine has a request. `environment`: rollouts are under way and none of them asks the engine for
anything. `withheld`: finished groups wait for the proof of their version. `wait_for_weights`: groups wait for weights
that are new enough. `wait_for_slot`: nothing is in flight.
"""


class ActivityClock:
    """Adds up seconds per activity; several things may be going on at once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._active = dict.fromkeys(ACTIVITIES[:-1], 0)
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._drained = dict.fromkeys(ACTIVITIES, 0.0)
        self._doing = {activity: _Doing(self, activity) for activity in ACTIVITIES[:-1]}

    def doing(self, activity: str) -> AbstractContextManager[None]:
        """A context in which `activity` is going on. Always the same object, as it is entered for every request."""
        return self._doing[activity]

    def drain(self) -> dict[str, float]:
        """Seconds per activity since the last call."""
        self._account()
        seconds, self._seconds = self._seconds, dict.fromkeys(ACTIVITIES, 0.0)
        self._drained = {a: s + seconds[a] for a, s in self._drained.items()}
        return seconds

    def total(self, activity: str) -> float:
        """Seconds in `activity` since the clock was made."""
        self._account()
        return self._drained[activity] + self._seconds[activity]

    def add(self, activity: str, by: int) -> None:
        """So many more are in `activity` from now on."""
        before = self._active[activity]
        if not before or not before + by:
            self._account()  # one of several that begins or ends changes nothing
        self._active[activity] = before + by

    def _account(self) -> None:
        now = self._now()
        activity = next((a for a, count in self._active.items() if count), ACTIVITIES[-1])
        self._seconds[activity] += now - self._since
        self._since = now


class IdleClock(AbstractContextManager[None]):
    """Adds up the seconds since it was made in which nobody was inside this context; several may be at once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._inside = 0
        self._idle_s = 0.0

    def __enter__(self) -> None:
        if not self._inside:
            self._idle_s += self._now() - self._since
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._since = self._now()

    @property
    def idle_s(self) -> float:
        return self._idle_s if self._inside else self._idle_s + self._now() - self._since


class RolloutClock(IdleClock):
    """The seconds of a rollout that count against its limit: all that it is outside of the engine, and inside of it
    those of the passes that worked on it. What it waits in the engine's queue is not its own doing.

    Of several sequences at once each counts for its share. A request that gets nothing for `patience_s` while it is
    inside is not waiting any more, it is lost: from there on all time counts.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, *, patience_s: float = 600.0) -> None:
        super().__init__(now)
        self._patience_s = patience_s
        self._worked_s = 0.0
        self._sign_at = self._since
        self.num_sequences = 0
        """Inside the engine now; the engine keeps it."""
        self.has_asked = False
        """Whether there was a request yet."""

    def begin(self) -> None:
        """Nothing before now counts."""
        self._since = self._now()

    def __enter__(self) -> None:
        if not self._inside:
            self._sign_at = self._now()
        self.has_asked = True
        super().__enter__()

    def worked(self, seconds: float) -> None:
        """The engine made tokens for one of the sequences, in a pass of so many seconds."""
        self._worked_s += seconds / self.num_sequences
        self._sign_at = self._now()

    @property
    def counted_s(self) -> float:
        lost_s = self._now() - self._sign_at - self._patience_s if self._inside else 0.0
        return self.idle_s + self._worked_s + max(0.0, lost_s)


class _Doing(AbstractContextManager[None]):
    __slots__ = ("_activity", "_clock")

    def __init__(self, clock: ActivityClock, activity: str) -> None:
        self._clock, self._activity = clock, activity

    def __enter__(self) -> None:
        self._clock.add(self._activity, 1)

    def __exit__(self, *_: object) -> None:
        self._clock.add(self._activity, -1)
