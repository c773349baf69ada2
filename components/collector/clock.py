"""Where a collector's wall-clock time goes: what its engine does, or what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from .. import spans

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

WAITS = {
    "asleep": {"for": "trainer", "why": "it has the devices"},
    "environment": {"for": "environment", "why": "no rollout asks the engine for anything"},
    "withheld": {"for": "weights", "why": "finished groups wait for the proof of their version"},
    "wait_for_weights": {"for": "weights", "why": "groups wait for weights that are new enough"},
    "wait_for_slot": {"for": "slot", "why": "no group may start"},
}
"""Those in which the engine has nothing to do, as the attributes of a span."""


class ActivityClock:
    """Adds up seconds per activity; several things may be going on at once. What it waits for is recorded as spans."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = self._changed_at = now()
        self._activity = ACTIVITIES[-1]
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
        self._record()  # what it waits for now is seen while it waits
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
        self._active[activity] = before + by
        if before and before + by:
            return  # one of several that begins or ends changes nothing
        self._account()
        activity = next((a for a, count in self._active.items() if count), ACTIVITIES[-1])
        if activity != self._activity:
            self._record()
            self._activity = activity

    def _account(self) -> None:
        now = self._now()
        self._seconds[self._activity] += now - self._since
        self._since = now

    def _record(self) -> None:
        if self._activity in WAITS and self._since - self._changed_at >= spans.SHORTEST_S:
            spans.record("wait", self._changed_at, self._since, **WAITS[self._activity])
        self._changed_at = self._since


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

    def __init__(
        self, now: Callable[[], float] = time.monotonic, *, patience_s: float = 600.0, group: int | None = None
    ) -> None:
        """`group`: whose time outside of the engine is recorded as spans (None: it is not)."""
        super().__init__(now)
        self._group = group
        self._patience_s = patience_s
        self._worked_s = 0.0
        self._sign_at = self._since
        self.num_sequences = 0
        """Inside the engine now; the engine keeps it."""
        self.asked_at: float | None = None
        """When the first request began; None: there was none yet."""

    def begin(self) -> None:
        """Nothing before now counts."""
        self._since = self._now()

    def __enter__(self) -> None:
        if not self._inside:
            self._sign_at = self._now()
            self._record(self._sign_at)
            if self.asked_at is None:
                self.asked_at = self._sign_at
        super().__enter__()

    def end(self) -> float:
        """The rollout is over; returns when the engine gave its last answer."""
        self._record(self._now())
        return self._since

    def _record(self, now: float) -> None:
        if self._group is not None and now - self._since >= spans.SHORTEST_S:
            spans.record("environment", self._since, now, group=self._group)

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
