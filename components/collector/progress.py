"""What an engine works on: whose sequences it made tokens for, what waits for a place, and whether it is still alive.

An engine reports every request, every other call, and every pass that made tokens. Three things follow:

- a rollout's time limit counts the passes that worked on it, and not the time that it waited in the engine's queue;
- groups start while the engine has places for them (`room.py`);
- an engine that has been asked for something and shows no sign of life is noticed, whatever it was asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from .clock import RolloutClock

LONGEST_NAP_S = 5.0


class EngineHung(RuntimeError):
    """The engine has work and shows no sign of life."""


class Sampled(NamedTuple):
    """What one pass did for one sequence: so many new tokens; `ended` with its last ones."""

    request_id: str
    sequence_id: str
    num_tokens: int
    ended: bool


@dataclass
class _Request:
    num_left: int
    prompt_tokens: float  # of each sequence; sequences of one prompt share its keys and values
    clock: RolloutClock | None
    begun: dict[str, float] = field(default_factory=dict)  # tokens held, by sequence that has begun and not ended


class Progress:
    """`num_sequences` are inside the engine; of those `num_waiting` have no token yet; all hold `num_tokens` of cache.
    `num_ended` got their last token so far.

    `on_less` is called whenever one of these has become smaller.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._requests: dict[str, _Request] = {}
        self._num_calls = 0
        self._paused = False
        self._sign_at = self._begun_at = self._passed_at = now()
        self._pass_s = 0.0
        self.num_sequences = 0
        self.num_waiting = 0
        self.num_tokens = 0.0
        self.num_ended = 0
        self.on_less: Callable[[], None] = lambda: None
        self._behind: set[str] = set()
        self._all_caught_up = asyncio.Event()
        self._all_caught_up.set()

    @contextmanager
    def request(
        self, request_id: str, *, num_sequences: int, prompt_tokens: int, clock: RolloutClock | None = None
    ) -> Iterator[None]:
        """Enter this around a request: `clock` learns how much of the engine's time its sequences get."""
        self._something_is_asked()
        request = _Request(num_sequences, prompt_tokens / num_sequences, clock)
        self._requests[request_id] = request
        self.num_sequences += num_sequences
        self.num_waiting += num_sequences
        if clock is not None:
            clock.num_sequences += num_sequences
        try:
            yield
        finally:
            del self._requests[request_id]
            self.num_sequences -= request.num_left
            self.num_waiting -= request.num_left - len(request.begun)
            self.num_tokens -= sum(request.begun.values())
            if clock is not None:
                clock.num_sequences -= request.num_left
            self._caught_up_with(request.begun)
            self.on_less()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around any other call that the engine must answer, paused or not."""
        self._something_is_asked()
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._sign_at = self._now()

    def pause(self) -> None:
        """From now on requests are not worked on, on purpose."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._sign_at = self._begun_at = self._now()
        self._behind = {sequence for request in self._requests.values() for sequence in request.begun}
        self._all_caught_up.clear()
        self._caught_up_with(())

    async def caught_up(self) -> None:
        """Wait until every sequence that was under way at the last `resume` has got a token since, or has ended."""
        await self._all_caught_up.wait()

    def _caught_up_with(self, sequences: Iterable[str]) -> None:
        self._behind.difference_update(sequences)
        if not self._behind:
            self._all_caught_up.set()

    def passed(self, at: float, sampled: Sequence[Sampled], *, after_load: bool = False) -> None:
        """A pass of the engine ended at `at`, by the clock that `now` reads. Parts of a pass share their moment.

        `after_load`: it is the first under new weights. How long it took is not known where the news of the load comes
        later than its own: it counts for nobody.
        """
        if at != self._passed_at:
            self._pass_s = 0.0 if after_load else max(0.0, at - max(self._passed_at, self._begun_at))
            self._passed_at = at
        self._sign_at = self._now()
        less = False
        for s in sampled:
            request = self._requests.get(s.request_id)
            if request is None:
                continue
            if request.clock is not None:
                request.clock.worked(self._pass_s)
            if s.sequence_id not in request.begun:
                request.begun[s.sequence_id] = request.prompt_tokens
                self.num_tokens += request.prompt_tokens
                self.num_waiting -= 1
            request.begun[s.sequence_id] += s.num_tokens
            self.num_tokens += s.num_tokens
            if s.ended:
                less = True
                self.num_tokens -= request.begun.pop(s.sequence_id)
                request.num_left -= 1
                self.num_sequences -= 1
                self.num_ended += 1
                if request.clock is not None:
                    request.clock.num_sequences -= 1
        if self._behind:
            self._caught_up_with(s.sequence_id for s in sampled)
        if less:
            self.on_less()

    def silent_s(self) -> float:
        """Seconds for which the engine has been asked for something and has given nothing."""
        return self._now() - self._sign_at if self._is_asked() else 0.0

    async def watch(self, stall_s: float) -> NoReturn:
        """Raise EngineHung when the engine is silent for `stall_s`."""
        loop, nap_s = asyncio.get_running_loop(), min(stall_s / 10, LONGEST_NAP_S)
        while True:
            asleep = loop.time()
            await asyncio.sleep(nap_s)
            if loop.time() - asleep > 2 * nap_s:
                self._sign_at = self._now()  # this loop stood still: what the engine said may lie unread
            elif self.silent_s() > stall_s:
                asked = f"{self.num_sequences} sequences" if not self._num_calls else "a call (weights, a pause)"
                raise EngineHung(
                    f"the inference engine hangs: it has {asked} to answer and gave no sign of life for "
                    f"rollout.engine_stall_s = {stall_s:g} s"
                )

    def _is_asked(self) -> bool:
        return bool(self._num_calls or (self._requests and not self._paused))

    def _something_is_asked(self) -> None:
        if not self._is_asked():
            self._sign_at = self._begun_at = self._now()
