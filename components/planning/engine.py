"""One simulated engine: batched decoding as processor sharing, in time that is O(log n) per completion.

A forward pass over the running sequences takes

    pass_s  +  token_s * (tokens in the pass)

`pass_s` is what a pass costs however small it is (reading the weights, launching it), `token_s` what each token adds.
Decoding puts one token of each running sequence into a pass, so n sequences advance together at
1 / (pass_s + token_s n) tokens a second each: throughput rises with n and saturates at 1 / token_s. Prompts, and what
has to be recomputed after new weights, ride along in the passes at `token_s` per token.

All running sequences advance alike, so the engine keeps one position (tokens that a sequence would have sampled since
the beginning) and a heap of the positions at which sequences end, instead of counting tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

_ROUNDING = 1e-6
"""Seconds and tokens below this are rounding of the clock: far less than anything measured."""


class Chunk:
    """Some sequences of one group that are simulated as equally long: `size` sequences of `tokens` tokens each."""

    __slots__ = ("group", "prompt_tokens", "size", "started_at", "tokens")

    def __init__(self, group: Any, size: int, tokens: float, prompt_tokens: float) -> None:
        self.group = group
        self.size = size
        self.tokens = tokens
        self.prompt_tokens = prompt_tokens  # to be prefilled for the whole chunk
        self.started_at = 0.0


class SimulatedEngine:
    """Time runs by `advance`; every other method speaks of the moment that it reached."""

    __slots__ = (
        "_ends",
        "_loads",
        "_num_pushed",
        "_pass_s",
        "_prefilled",
        "_queue",
        "_room",
        "_running_starts",
        "_stall_s",
        "_token_s",
        "busy_s",
        "epoch",
        "held",
        "now",
        "paused",
        "position",
        "running",
        "slowdown",
        "version",
    )

    def __init__(self, *, pass_s: float, token_s: float, max_sequences: int) -> None:
        self._pass_s = pass_s
        self._token_s = token_s
        self._room = max_sequences
        self._queue: deque[Chunk] = deque()
        self._ends: list[tuple[float, int, Chunk]] = []
        self._num_pushed = 0
        self._running_starts = 0.0  # sum over running sequences of the position they started at
        self._prefilled = 0.0  # prompt tokens of what is running
        self._stall_s = 0.0  # prefill that is due before anybody samples on
        self._loads: list[tuple[float, int]] = [(0.0, 0)]  # (position, version from there on)
        self.now = 0.0
        self.position = 0.0
        self.running = 0
        self.version = 0
        self.paused = False
        self.held = False  # nothing new starts: what runs is being waited for
        self.slowdown = 1.0
        self.busy_s = 0.0
        self.epoch = 0  # of the completion that was scheduled last; older ones are void

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
        self.position += work_s / (self._pass_s + self._token_s * self.running)

    def next_end(self) -> float:
        """When the next sequence ends, if nothing changes until then; infinity if none will."""
        if self.paused or not self._ends:
            return math.inf
        left = max(0.0, self._ends[0][0] - self.position)
        work_s = self._stall_s + left * (self._pass_s + self._token_s * self.running)
        return self.now + work_s * self.slowdown

    def submit(self, chunks: Iterable[Chunk]) -> None:
        self._queue.extend(chunks)
        self._start_waiting()

    def finished(self) -> list[Chunk]:
        """The chunks that end here; those that waited for their room start."""
        done = []
        if self._stall_s > _ROUNDING:
            return done
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
        """Serve `version` from here on; `recompute`: prefill again all that is running."""
        self.version = version
        self._loads.append((self.position, version))
        if recompute and self.running:
            sampled = self.running * self.position - self._running_starts
            self._stall_s += self._token_s * (self._prefilled + sampled)

    def resume(self) -> None:
        self.paused = self.held = False
        if self._queue:
            self._start_waiting()

    def versions_of(self, chunk: Chunk) -> list[tuple[int, float]]:
        """(version, tokens per sequence) of a chunk that has finished, newest first."""
        if chunk.started_at >= self._loads[-1][0]:
            return [(self.version, chunk.tokens)]
        end = chunk.started_at + chunk.tokens
        spans = []
        for position, version in reversed(self._loads):
            if position < end:
                spans.append((version, end - max(position, chunk.started_at)))
                end = position
            if position <= chunk.started_at:
                break
        return spans

    def _start_waiting(self) -> None:
        queue = self._queue
        if self.held or self.paused:
            return
        while queue:
            chunk = queue[0]
            if self.running and self.running + chunk.size > self._room:
                return
            queue.popleft()
            chunk.started_at = self.position
            self.running += chunk.size
            self._running_starts += chunk.size * chunk.started_at
            self._prefilled += chunk.prompt_tokens
            self._stall_s += self._token_s * chunk.prompt_tokens
            self._num_pushed += 1
            heapq.heappush(self._ends, (self.position + chunk.tokens, self._num_pushed, chunk))
