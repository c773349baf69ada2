"""Which weights an engine serves, and the proof that they are the trainer's.

A version goes through: pulled -> loaded (bytes and coverage checked) -> resumed -> canary passed = `verified`. Tokens
of a version that is loaded and not yet verified exist, because the canary can only be scored after resuming; whoever
holds them waits in `until_verified`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..weights import Manifest, WeightSyncError
from .engine import LoadsWeights

logger = logging.getLogger(__name__)

Pull = Callable[[int, float], Awaitable[tuple[Manifest, AsyncIterator[np.ndarray]] | None]]
"""pull(newer_than, timeout_s) -> the newest publication, or None when nothing newer came in time."""


POLL_S = 10.0
"""How long one question to the parameter server may stay open; the next one follows at once."""


@dataclass(frozen=True)
class PullReport:
    """One pull: its seconds, the largest gap on the canary, and its size.

    `pull_s`: from noticing a version to serving it; of that `canary_s` for the proof, `drain_s` until the engine stood
    still (it generates meanwhile), and `pause_s` without generation.
    """

    pull_s: float
    canary_s: float
    drain_s: float
    pause_s: float
    served_gap: float
    num_bytes: int


class WeightSync:
    """Keeps one engine's weights recent enough. `run` pulls for ever; the others wait for what it brings."""

    def __init__(
        self,
        engine: LoadsWeights,
        pull: Pull,
        *,
        in_flight: str,
        tolerance: float,
        pull_every: int,
        deadline_s: float,
        paused: Callable[[], AbstractContextManager[None]],
        on_quarantine: Callable[[WeightSyncError], Awaitable[Any]],
        max_failures: int,
        verified_version: int = -1,
        finish_first: bool = False,
    ) -> None:
        """`finish_first`: no pull before the groups that the weights are enough for have finished under them."""
        self._engine = engine
        self._pull = pull
        self._in_flight = in_flight
        self._tolerance = tolerance
        self._pull_every = pull_every
        self._deadline_s = deadline_s
        self._paused = paused
        self._on_quarantine = on_quarantine
        self._max_failures = max_failures
        self._num_failures = 0
        self.num_quarantines = 0
        self._frozen = asyncio.Lock()
        # Thousands of groups may wait for a few versions: each is woken once, by what it waits for.
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._waiting_changed = asyncio.Event()
        self._generating_changed = asyncio.Event()
        self._finish_first = finish_first
        self._num_generating = 0
        self.verified_version = verified_version
        self._pulls: list[PullReport] = []
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Consumes publications until closed; waits for the parameter server.

        An engine that fails a check is quarantined: it serves nothing, and what it has in flight is given away, until a
        later pull passes every check. Raises the `WeightSyncError` of the last of `max_failures` + 1 failures in a row.
        """
        while not self._closed.is_set():
            newer_than = max(self.verified_version, self._next_version() - 1)
            pulling = asyncio.ensure_future(self._pull(newer_than, POLL_S))
            wanted = asyncio.ensure_future(self._older_version_requested(newer_than))
            closed = asyncio.ensure_future(self._closed.wait())
            try:
                await asyncio.wait({pulling, wanted, closed}, return_when=asyncio.FIRST_COMPLETED)
                pulled = pulling.result() if pulling.done() else None  # an older one is enough now: ask again
            finally:
                pulling.cancel()
                wanted.cancel()
                closed.cancel()
            if pulled is not None:
                await self._drain()
                async with self._frozen:
                    try:
                        await self._load_and_verify(*pulled)
                    except WeightSyncError as error:
                        await self._quarantine(error)
                    else:
                        self._num_failures = 0

    def close(self) -> None:
        """No more pulls: `run` returns."""
        self._closed.set()

    def freeze_weights(self) -> asyncio.Lock:
        """While this lock is held the weights do not change (evaluation of one version)."""
        return self._frozen

    async def until_verified(self, policy_version: int) -> None:
        """Wait until weights of at least this version were proven. Raises TimeoutError naming both versions."""
        if self.verified_version >= policy_version:
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                while self.verified_version < policy_version:  # a proof may be taken back before this runs again
                    await self._proof_of(policy_version)
        except TimeoutError:
            raise TimeoutError(
                f"waited {self._deadline_s:g} s for weights of version {policy_version}; "
                f"this engine serves version {self.verified_version}"
            ) from None

    @asynccontextmanager
    async def generating_under(self, min_policy_version: int) -> AsyncIterator[None]:
        """Around the generation of a group: waits for weights of version `min_policy_version` or newer."""
        await self.until_verified(min_policy_version)
        self._num_generating += 1  # in the same turn of the loop in which the wait ended, so that no pull comes between
        try:
            yield
        finally:
            self._num_generating -= 1
            if not self._num_generating:
                self._generating_changed.set()

    async def _proof_of(self, policy_version: int) -> None:
        """Wait until a version of at least this one was proven, though perhaps it no longer counts."""
        proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(policy_version, set())
        waiting.add(proven)
        if len(waiting) == 1:
            self._waiting_changed.set()
        try:
            await proven
        finally:
            waiting.remove(proven)
            if not waiting:
                del self._waiting[policy_version]
                self._generating_changed.set()

    def _prove(self, policy_version: int) -> None:
        self.verified_version = policy_version
        for version, waiting in self._waiting.items():
            if version <= policy_version:
                for proven in waiting:  # each leaves when it goes on: until then no pull may come between
                    if not proven.done():
                        proven.set_result(None)

    async def _drain(self) -> None:
        """Groups have time-outs, and those that wait for newer weights have a deadline, so this ends."""
        if not self._finish_first:
            return
        while self._num_generating or any(version <= self.verified_version for version in self._waiting):
            self._generating_changed.clear()
            await self._generating_changed.wait()

    async def _older_version_requested(self, newer_than: int) -> None:
        """Returns when a group needs a version that a pull for something newer than `newer_than` would pass over."""
        while not any(self.verified_version < version <= newer_than for version in self._waiting):
            self._waiting_changed.clear()
            await self._waiting_changed.wait()

    def _next_version(self) -> int:
        """Nothing older is worth a pause, unless a group that may not start yet needs it."""
        patient = self.verified_version + self._pull_every if self.verified_version >= 0 else 0
        return min([patient, *(v for v in self._waiting if v > self.verified_version)])

    async def _load_and_verify(self, manifest: Manifest, buckets: AsyncIterator[np.ndarray]) -> None:
        started = time.monotonic()
        manifest.check()
        times = await self._engine.load_weights(manifest, buckets, in_flight=self._in_flight, paused=self._paused)
        loaded = time.monotonic()
        gap = await self._engine.score(manifest.canary)
        if not gap.within(self._tolerance):
            raise WeightSyncError(
                "compute",
                manifest.policy_version,
                f"engine and trainer differ on the canary by {gap}; "
                f"param_server.served_tolerance is {self._tolerance:g}",
            )
        self._prove(manifest.policy_version)
        self._pulls.append(
            PullReport(
                pull_s=time.monotonic() - started,
                canary_s=time.monotonic() - loaded,
                drain_s=times.drain_s,
                pause_s=times.pause_s,
                served_gap=gap.largest,
                num_bytes=manifest.num_bytes,
            )
        )

    async def _quarantine(self, error: WeightSyncError) -> None:
        # Nothing that this engine holds was proven: not what it generated under this version, and not what comes next.
        self.verified_version = -1
        self._num_failures += 1
        if self._num_failures > self._max_failures:
            raise error
        self.num_quarantines += 1
        logger.error("quarantined, failure %d in a row: %s", self._num_failures, error)
        await self._on_quarantine(error)

    def drain_reports(self) -> list[PullReport]:
        """The pulls since the last call."""
        reports, self._pulls = self._pulls, []
        return reports
