"""How many groups an engine has room for, so that it is always full and its queue stays short."""

from __future__ import annotations

import asyncio
from collections import deque

from .clock import RolloutClock
from .progress import Progress

YOUNG_S = 1.0
"""A new group is expected to ask for its places within this time; after that it is busy elsewhere."""

REFILL_S = 0.25
"""To put a new sequence in the place of one that ended takes a call of the buffer, an environment, and a turn of each
process that shares a core with others: what ends in this time waits in the engine's queue beforehand."""

RATE_OVER_S = 2.0
"""Over so many seconds it is measured how fast sequences end: some waves of short answers, and a pause among them."""

FULL_FRAC = 0.9
"""Share of the KV cache from which nothing new is begun: what is there already grows."""


class Room:
    """Sequences that the engine can take on: more than its `places`, because what ends is replaced late. With long
    answers slightly more, with short ones up to twice as many. New groups may begin once half of this surplus is gone,
    and then as many as fill it: asking costs milliseconds, however many are asked for.

    A group in its environment holds no place, so that slow environments do not leave the engine empty: others begin
    meanwhile. `cache_tokens`: what fits into the KV cache (0: not known).
    """

    def __init__(self, progress: Progress, *, places: int, cache_tokens: int = 0) -> None:
        self._progress = progress
        self._places = places
        self._cache_tokens = cache_tokens
        self._young: dict[RolloutClock, tuple[int, float]] = {}
        self._ended: deque[tuple[float, int]] = deque()  # (moment, sequences that had ended by then)
        self._more = asyncio.Event()
        progress.on_less = self._more.set

    def groups(self, num_sequences: int) -> int:
        """Groups of so many sequences that may begin now, all of them together."""
        p, slack = self._progress, max(num_sequences, self._places // 8, min(self._places, self._num_ending()))
        young = self._num_young()
        inside = p.num_sequences + young
        is_full = bool(self._cache_tokens) and p.num_tokens > FULL_FRAC * self._cache_tokens
        if inside and (p.num_waiting > slack or is_full):
            return 0
        free = self._places + slack - inside
        if inside and free < slack // 2:
            return 0
        return max(0, free // num_sequences)

    def begin(self, clock: RolloutClock, num_sequences: int) -> None:
        """A group of so many sequences begins; `clock` knows of its requests."""
        self._young[clock] = (num_sequences, asyncio.get_running_loop().time() + YOUNG_S)
        self._more.set()  # the waiting call may wait only as long as this group is young

    async def more(self) -> None:
        """Wait until there may be more room; perhaps there is not."""
        try:
            async with asyncio.timeout(YOUNG_S if self._young else None):
                await self._more.wait()
        except TimeoutError:
            pass
        self._more.clear()

    def left(self) -> None:
        """A group ended, whether or not the engine knew of it."""
        self._more.set()

    def _num_ending(self) -> int:
        """Sequences that end while one is replaced, as fast as they have ended lately."""
        now, total = asyncio.get_running_loop().time(), self._progress.num_ended
        self._ended.append((now, total))
        while now - self._ended[0][0] > RATE_OVER_S and len(self._ended) > 2:
            self._ended.popleft()
        since, before = self._ended[0]
        # A wave of long answers, which may end within a moment, is no rate.
        return int((total - before) / max(now - since, RATE_OVER_S) * REFILL_S)

    def _num_young(self) -> int:
        now = asyncio.get_running_loop().time()
        self._young = {
            clock: (num, until) for clock, (num, until) in self._young.items() if clock.asked_at is None and until > now
        }
        return sum(num for num, _ in self._young.values())
