"""One simulated engine: batched decoding as processor sharing, in time that is O(log n) per completion.

A forward pass over the running sequences takes

    pass_s  +  token_s * (tokens in the pass)

`pass_s` is what a pass costs however small it is (reading the weights, launching it), `token_s` what each token adds.
Decoding puts one token of each running sequence into a pass, so n sequences advance together at
1 / (pass_s + token_s n) tokens a second each: throughput rises with n and saturates at 1 / token_s. Prompts, and what
has to be recomputed after new weights, ride along in the passes at `token_s` per token, at most `prefill_budget` of
them in a pass; the pass that ends a prompt samples the first token of its response.

All running sequences advance alike, so the engine keeps one position (tokens that a sequence would have sampled since
the beginning) and a heap of the positions at which sequences end, instead of counting tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ROUNDING = 1e-6
"""Seconds and tokens below this are rounding of the clock: far less than anything measured."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Sequences of one group that are simulated as equally long: `size` sequences of `tokens` tokens each."""

    group: Any
    size: int
    tokens: float
    prompt_tokens: float  # to be prefilled for the whole chunk
    started_at: float = 0.0
    version: int = 0  # the version it was started under, which samples its first token


class SimulatedEngine:
    """Time moves only by `advance`; every other method refers to the current time."""

    def __init__(self, *, pass_s: float, token_s: float, max_sequences: int, prefill_budget: float = math.inf) -> None:
        self._pass_s = pass_s
        self._token_s = token_s
        self._room = max_sequences
        self._queue: deque[Chunk] = deque()
        self._ends: list[tuple[float, int, Chunk]] = []
        self._num_pushed = 0
        self._running_starts = 0.0  # sum over running sequences of the position they started at
        self._prefilled = 0.0  # prompt tokens of what is running
        self._stall_s = 0.0  # prefill that must finish before sampling continues
        self._budget = prefill_budget
        self._portion = 0.0  # prompt tokens that share this stall
        self._ahead = 0.0  # tokens that the running sequences gain when this stall ends
        self._more = False  # the budget is used up: the rest of the queue comes after this stall
        self._loads: list[tuple[float, int]] = [(0.0, 0)]  # (position, version from there on)
        self.now = 0.0
        self.position = 0.0
        self.running = 0
        self.version = 0
        self.paused = False
        self.held = False  # nothing new starts until the running sequences end
        self.slowdown = 1.0
        self.busy_s = 0.0
        self.epoch = 0  # of the completion that was scheduled last; older ones are invalid

    def advance(self, now: float) -> None:
        elapsed = now - self.now
        self.now = now
        if self.paused or not self.running or elapsed <= 0.0:
            return
        self.busy_s += elapsed
        work_s = elapsed / self.slowdown
        if self._stall_s > 0.0:
            stalled = min(work_s, self._stall_s)
            self._stall_s -= stalled
            work_s -= stalled
            if self._stall_s <= _ROUNDING:
                self.position += self._ahead
                self._ahead = 0.0
        if not self._more:
            self.position += work_s / (self._pass_s + self._token_s * self.running)

    def next_end(self) -> float:
        """When the next sequence ends, if nothing changes until then; infinity if none will."""
        if self.paused or not self._ends:
            return math.inf
        left = 0.0 if self._more else max(0.0, self._ends[0][0] - self.position - self._ahead)
        work_s = self._stall_s + left * (self._pass_s + self._token_s * self.running)
        return self.now + work_s * self.slowdown

    def submit(self, chunks: Iterable[Chunk]) -> None:
        self._queue.extend(chunks)
        self._start_waiting()

    def finished(self) -> list[Chunk]:
        """The chunks that end now; chunks that waited for room start."""
        done = []
        if self._stall_s > _ROUNDING:
            return done
        self._portion = 0.0
        limit = self.position + _ROUNDING
        while self._ends and self._ends[0][0] <= limit:
            _, _, chunk = heapq.heappop(self._ends)
            self.running -= chunk.size
            self._running_starts -= chunk.size * chunk.started_at
            self._prefilled -= chunk.prompt_tokens
            done.append(chunk)
        if self._queue:
            self._start_waiting()
        return done

    def load(self, version: int, *, recompute: bool) -> None:
        """Serve `version` from now on; `recompute`: prefill everything that is running again."""
        self.version = version
        self._loads.append((self.position, version))
        if recompute and self.running:
            sampled = self.running * self.position - self._running_starts
            self._stall_s += self._token_s * (self._prefilled + sampled)

    def passes_s(self, count: int) -> float:
        """Seconds until `count` more passes are over, or fewer if less work is running or waiting for prefill."""
        if not self.running:
            return 0.0
        most_s = math.inf if math.isinf(self._budget) else count * self._budget * self._token_s
        passes_s = count * (self._pass_s + self._token_s * self.running)
        return (min(self._stall_s, most_s) + passes_s) * self.slowdown

    def resume(self) -> None:
        self.paused = self.held = False
        if self._queue:
            self._start_waiting()

    def versions_of(self, chunk: Chunk) -> list[tuple[int, float]]:
        """(version, tokens per sequence) of a chunk that has finished, newest first."""
        if chunk.version == self.version:
            return [(self.version, chunk.tokens)]
        end = chunk.started_at + chunk.tokens - 1
        spans = []
        for position, version in reversed(self._loads):
            if position < end:
                spans.append((version, end - max(position, chunk.started_at)))
                end = position
            if position <= chunk.started_at:
                break
        return [*spans, (chunk.version, 1.0)]

    def _start_waiting(self) -> None:
        queue = self._queue
        if self.held or self.paused:
            if self._stall_s <= _ROUNDING:
                self._more = False  # the rest of the queue waits for new weights; running sequences continue without it
            return
        if self._more and self._stall_s > _ROUNDING:
            return
        if queue and (
            self._more or not self.running
        ):  # a separate pass; otherwise the prompts join the passes of running sequences
            self._stall_s += self._pass_s + self._token_s * self.running
            self._ahead = 1.0 if self.running else 0.0  # running sequences sample a token in that pass too
        self._more = False
        while queue:
            chunk = queue[0]
            if self.running and self.running + chunk.size > self._room:
                return
            if self._portion and self._portion + chunk.prompt_tokens > self._budget:
                self._more = True
                return
            queue.popleft()
            self._portion += chunk.prompt_tokens
            chunk.version = self.version
            chunk.started_at = self.position + self._ahead
            self.running += chunk.size
            self._running_starts += chunk.size * chunk.started_at
            self._prefilled += chunk.prompt_tokens
            self._stall_s += self._token_s * chunk.prompt_tokens
            self._num_pushed += 1
            heapq.heappush(self._ends, (chunk.started_at + chunk.tokens - 1, self._num_pushed, chunk))
