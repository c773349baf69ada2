"""Which weights an engine serves, and the proof that they are the trainer's.

    ahead, while it generates   pull -> stage -> fetch every bucket, check its bytes; load beside what it computes with
    the pause                   what is left of the load; every one of the engine's tensors was published
    after, while it generates   read back what it computes with; score the canary -> `verified_version`

What fails before the pause never reached the engine: it continues with the weights proven before, and the version is
fetched again.
After the pause there are tokens of a version that is not verified yet: of what is in flight, and of groups that begin
now because they need this version (`generating_under`). Their holders wait in `until_verified`; if the proof fails, the
engine is quarantined and they are discarded.

An engine whose trainer has the same devices sleeps while that computes (`sleep`, `wake`). It serves nothing then, and
wakes by a load with all of the above.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .. import spans
from ..transports.transport import Fetches, NotKept, Place
from ..weights import CanaryGap, Manifest, Publication, Tolerance, WeightSyncError, check_bucket
from .engine import LoadsWeights, OnDevice, StagedWeights

logger = logging.getLogger(__name__)
T = TypeVar("T")

Pull = Callable[[int, float], Awaitable[Publication | None]]
"""pull(newer_than, timeout_s) -> the newest publication, or None when nothing newer came in time."""


OVERTAKEN_S = 1.0
"""Time for the parameter server to say whether there is a newer version than one that was not kept."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Before a version that did not arrive is fetched again, four times as long after each failure: a link that is cut for
a moment refuses all attempts at once."""
POLL_S = 10.0
"""How long one question to the parameter server may stay open; the next one follows at once, for as long as the
trainer has nothing newer."""


SMALL_BYTES = 1 << 20
"""Work on fewer bytes takes less time than handing it to a thread."""


async def _at_once() -> None: ...


async def _beside(num_bytes: int, work: Callable[..., T], *args: Any) -> T:
    """Work on this many bytes without blocking the event loop."""
    return work(*args) if num_bytes < SMALL_BYTES else await asyncio.to_thread(work, *args)


def _release_when_done(making: asyncio.Future[T], staged_of: Callable[[T], StagedWeights]) -> None:
    def release(made: asyncio.Future[T]) -> None:
        if not made.cancelled() and made.exception() is None:
            staged_of(made.result()).release()

    making.add_done_callback(release)


@dataclass(frozen=True)
class SyncReport:
    """One weight sync, in seconds: `ahead_s` to fetch, check and load ahead, `drain_s` and `pause_s` as in `LoadTimes`,
    `proof_s` from there to the end of the proof. Only in the pause nothing is generated.

    `served_gap`: on the canary; `tolerance`: what it was held to. `num_bytes`: of the version; `fetched_bytes`: those
    that came from the trainer.
    """

    ahead_s: float
    drain_s: float
    pause_s: float
    proof_s: float
    served_gap: CanaryGap
    tolerance: CanaryGap
    num_bytes: int
    fetched_bytes: int

    @property
    def sync_s(self) -> float:
        return self.ahead_s + self.drain_s + self.pause_s + self.proof_s


class WeightSync:
    """Keeps one engine's weights recent enough. `run` pulls for ever; the others wait for what it brings."""

    serves_unproven = True
    """Whether groups may begin under what was loaded: an engine of one version has nothing else."""

    def __init__(
        self,
        engine: LoadsWeights,
        pull: Pull,
        transport: Fetches,
        *,
        in_flight: str,
        tolerance: Tolerance,
        pull_every: int,
        deadline_s: float,
        paused: Callable[[], AbstractContextManager[None]],
        on_quarantine: Callable[[WeightSyncError], Awaitable[Any]],
        max_failures: int,
        verified_version: int = -1,
        finish_first: bool = False,
        retry_s: float = RETRY_S,
        caught_up: Callable[[], Awaitable[None]] = _at_once,
        asleep: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`finish_first`: no load before the groups that the weights are enough for have finished under them.

        `caught_up`: waits until what was in flight at the last load has got tokens under it: nobody gains from weights
        that are replaced before they were used.
        """
        self._engine = engine
        self._pull = pull
        self._transport = transport
        self._held: StagedWeights | None = None
        self._in_flight = in_flight
        self._tolerance = tolerance
        self._pull_every = pull_every
        self._deadline_s = deadline_s
        self._paused = paused
        self._on_quarantine = on_quarantine
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._caught_up = caught_up
        self._asleep = asleep
        self._sleeping = ExitStack()
        self._falling_asleep = asyncio.Lock()
        self._num_failures = 0
        self.num_quarantines = 0
        self.num_refused = 0
        """Versions that did not arrive whole, and were fetched again."""
        self._frozen = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._sleeps = asyncio.Event()  # the opposite: both are waited for
        self._slept_at = -1
        # Thousands of groups may wait for a few versions: each is woken once, by what it waits for.
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._waiting_changed = asyncio.Event()
        self._generating_changed = asyncio.Event()
        self._finish_first = finish_first
        self._num_generating = 0
        self._at_work_since: float | None = 0.0
        """Since when a published version waits for this engine alone; None: none does. Always, while nobody pulls."""
        self.verified_version = verified_version
        self.served_version = verified_version
        """What groups may begin under: newer than `verified_version` until that load is proven."""
        self._reports: list[SyncReport] = []
        self._closed = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    async def run(self) -> None:
        """Consumes publications until closed; waits for the parameter server.

        An engine that fails a check is quarantined: it serves nothing, and what it has in flight is given away, until a
        later load passes every check. Raises the `WeightSyncError` of the last of `max_failures` + 1 failures in a row.
        """
        self._at_work_since = None
        self._ended.clear()
        try:
            while not self._closed.is_set():
                await self._first(self._awake.wait())
                if self.verified_version >= 0:  # else it may stand still, and nothing in flight gets on before a load
                    await self._first(self._caught_up(), self._version_requested(self.verified_version))
                publication = await self._next_publication()
                if publication is not None and self._awake.is_set():  # else a newer one may be there when it wakes
                    await self._sync(publication)
        finally:
            self._at_work_since = asyncio.get_running_loop().time()
            self._hold(None)
            self._ended.set()

    async def _sync(self, publication: Publication) -> None:
        started = time.monotonic()
        staging = asyncio.ensure_future(self._staged(publication))
        try:
            with self._at_work():
                await self._first(staging)
        except WeightSyncError as error:
            self._hold(None)  # what the transport made of it is not what it should be: fetch all of it
            if not await self._is_overtaken(error):
                self._refuse(error)
                await self._first(asyncio.sleep(min(LONGEST_RETRY_S, self._retry_s * 4 ** (self._num_failures - 1))))
            return
        if self._closed.is_set():
            _release_when_done(staging, lambda result: result[0])
            return
        staged, fetched_bytes = staging.result()
        verified = False
        try:
            ahead_s = time.monotonic() - started
            with self._at_work():
                await self._drain()
            async with self._frozen:
                try:
                    with self._at_work():
                        await self._load_and_verify(staged, ahead_s, fetched_bytes)
                except WeightSyncError as error:
                    await self._quarantine(error)
                else:
                    self._num_failures = 0
                    verified = True
        finally:
            if verified and self._transport.uses_held:
                self._hold(staged)
            else:
                staged.release()
                self._hold(None)

    def _hold(self, staged: StagedWeights | None) -> None:
        """Keep what was verified for the transport, in the place of what was kept before."""
        if self._held is not None:
            self._held.release()
        self._held = staged

    def close(self) -> None:
        """No more pulls: `run` returns."""
        self._closed.set()

    async def ended(self) -> None:
        """After `close`: waits until the engine is no longer touched. A load ends first, a fetch is given up."""
        await self._ended.wait()

    def freeze_weights(self) -> asyncio.Lock:
        """While this lock is held the weights do not change (evaluation of one version)."""
        return self._frozen

    async def sleep(self) -> int:
        """Generate nothing and give the engine's memory back until `wake`; returns its bytes.

        A load or an evaluation under way ends first. What is in flight stays in flight.
        """
        async with self._falling_asleep:
            if not self._awake.is_set():
                return 0
            self._awake.clear()
            self._sleeps.set()
            await self._frozen.acquire()  # until `wake`: no load meanwhile
            self._slept_at = max(self._slept_at, self.verified_version)
            self.verified_version = self.served_version = -1
            released = await self._engine.sleep(in_flight=self._in_flight)
            self._sleeping.enter_context(self._asleep())
            return released

    def wake(self) -> None:
        """Load the newest version that there is, and go on."""
        if self._awake.is_set():
            return
        self._sleeping.close()
        self._frozen.release()
        self._sleeps.clear()
        self._awake.set()

    async def until_verified(self, policy_version: int) -> None:
        """Wait until weights of at least this version were proven.

        The deadline is for this engine: to fetch what was published, to make room for it, to load and prove it. It does
        not run while nothing newer is published, while an evaluation holds the weights, or while the engine sleeps:
        each of these ends by a deadline of its own, which names its part. Raises TimeoutError naming both versions.
        """
        await self._until(lambda: self.verified_version, policy_version)

    async def until_served(self, policy_version: int) -> None:
        """The same until groups may begin under such weights: whoever uses their tokens waits for the proof too."""
        await self._until(lambda: self.served_version, policy_version)

    async def until_all_verified(self) -> None:
        """Until all that was generated so far is of proven weights: what comes of bad ones means nothing."""
        await self.until_verified(self.served_version)

    async def _until(self, version: Callable[[], int], policy_version: int) -> None:
        now = asyncio.get_running_loop().time
        asked_at = now()
        while version() < policy_version:  # a load may be condemned before this runs again
            since = self._at_work_since
            left_s = self._deadline_s - (0.0 if since is None else now() - max(since, asked_at))
            if left_s <= 0:
                raise TimeoutError(
                    f"waited {self._deadline_s:g} s (cluster.step_timeout_s) for weights of version {policy_version} "
                    f"to be loaded and proven; this engine serves version {self.served_version}, and version "
                    f"{self.verified_version} is proven"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news_of(policy_version)

    def one_version(self) -> AbstractAsyncContextManager[int | None]:
        """Around a rollout: the version that all of it is sampled under; None: whichever is served at each token."""
        return nullcontext()

    @asynccontextmanager
    async def generating_under(self, min_policy_version: int) -> AsyncIterator[None]:
        """Around the generation of a group: waits for weights of version `min_policy_version` or newer."""
        await self.until_served(min_policy_version)
        self._num_generating += 1  # in the same turn of the loop in which the wait ended, so that no pull comes between
        try:
            yield
        finally:
            self._num_generating -= 1
            if not self._num_generating:
                self._generating_changed.set()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Around what a published version waits for here, and nowhere else."""
        self._at_work_since = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._at_work_since = None

    async def _news_of(self, policy_version: int) -> None:
        """Wait until a version of at least this one was loaded or proven, though perhaps it no longer counts."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(policy_version, set())
        waiting.add(news)
        if len(waiting) == 1:
            self._waiting_changed.set()
        try:
            await news
        finally:
            waiting.remove(news)
            if not waiting:
                del self._waiting[policy_version]
                self._generating_changed.set()

    def _prove(self, policy_version: int) -> None:
        self.verified_version = policy_version
        logger.info("serves version %d", policy_version)
        self._serve(policy_version)

    def _serve(self, policy_version: int) -> None:
        """Those that wait for this version, or an older one, look again."""
        self.served_version = policy_version
        for version, waiting in self._waiting.items():
            if version <= policy_version:
                for news in waiting:  # each leaves when it goes on: until then no pull may come between
                    if not news.done():
                        news.set_result(None)

    async def _next_publication(self) -> Publication | None:
        """The newest that is worth a pause; None when there was none in time, or when less has become enough."""
        newer_than = max(self.verified_version, self._slept_at - 1, self._next_version() - 1)
        pulling = asyncio.ensure_future(self._pull(newer_than, POLL_S))
        have = max(self.verified_version, self._slept_at - 1)
        limit = asyncio.timeout(POLL_S + self._deadline_s)
        try:
            async with limit:
                await self._first(pulling, self._version_requested(have, newer_than), self._sleeps.wait())
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(
                f"the parameter server did not say for {self._deadline_s:g} s (cluster.step_timeout_s) whether there "
                f"are weights newer than version {newer_than}"
            ) from None
        return pulling.result() if pulling.done() and not pulling.cancelled() else None

    async def _first(self, *waits: Awaitable[Any]) -> None:
        """Returns with the first of these to end, or when closed, and cancels the others; raises what it raised."""
        tasks = [asyncio.ensure_future(wait) for wait in (*waits, self._closed.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for task in done:
            task.result()

    async def _drain(self) -> None:
        """Groups have time-outs, and those that wait for newer weights have a deadline, so this ends."""
        if not self._finish_first:
            return
        while self._num_generating or any(version <= self.verified_version for version in self._waiting):
            self._generating_changed.clear()
            await self._generating_changed.wait()

    async def _version_requested(self, above: int, up_to: float = float("inf")) -> None:
        """Returns when a group waits for a version above one and not above another."""
        while not any(above < version <= up_to for version in self._waiting):
            self._waiting_changed.clear()
            await self._waiting_changed.wait()

    def _next_version(self) -> int:
        """Nothing older is worth a pause, unless a group that may not start yet needs it."""
        patient = self.verified_version + self._pull_every if self.verified_version >= 0 else 0
        return min([patient, *(v for v in self._waiting if v > self.verified_version)])

    async def _staged(self, publication: Publication) -> tuple[StagedWeights, int]:
        """A version in the engine's reach, every byte checked, and how many bytes of it came from the trainer.

        Raises WeightSyncError naming what did not arrive.
        """
        manifest = publication.manifest
        manifest.check()
        places = self._transport.places(publication)
        try:
            with spans.span("stage_weights", version=manifest.policy_version, bytes=manifest.num_bytes):
                staged = await self._memory_for(manifest, places)
        except FileNotFoundError as error:
            gone = (index for index, place in enumerate(places) if isinstance(place, Path) and not place.exists())
            lost = f"bucket {next(gone, 0) + 1} of {len(places)}"
            raise manifest.error("transfer", f"{lost} is not kept any more: {error}") from error
        except NotKept as error:
            raise manifest.error("transfer", f"it is not kept any more: {error}") from error
        fetched_bytes = 0
        try:
            deadline = asyncio.get_running_loop().time() + self._deadline_s
            with spans.span("fetch_weights", version=manifest.policy_version) as attrs:
                if staged.opened is not None:
                    await self._checked_there(manifest, staged.opened, deadline)
                for index, bucket in enumerate(staged.buckets):
                    if not places:
                        fetched_bytes += await self._fetched(publication, index, bucket, deadline)
                    await _beside(bucket.nbytes, check_bucket, manifest, index, bucket)
                attrs["bytes"] = fetched_bytes
        except BaseException:
            staged.release()
            raise
        return staged, fetched_bytes

    async def _memory_for(self, manifest: Manifest, places: Sequence[Place]) -> StagedWeights:
        staging = asyncio.ensure_future(_beside(manifest.num_bytes, self._engine.stage, manifest, places))
        try:
            return await asyncio.shield(staging)
        except asyncio.CancelledError:  # which no thread hears: what it makes is nobody's
            _release_when_done(staging, lambda staged: staged)
            raise

    async def _checked_there(self, manifest: Manifest, opened: OnDevice, deadline: float) -> None:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                await opened.check()
        except NotKept as error:
            raise manifest.error("transfer", f"it is not kept any more: {error}") from error
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = f"it was not read within {self._deadline_s:g} s (cluster.step_timeout_s)"
            raise manifest.error("transfer", why) from error

    async def _fetched(self, publication: Publication, index: int, bucket: np.ndarray, deadline: float) -> int:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return await self._transport.fetch(publication, index, bucket, self._held)
        except Exception as error:  # a transport's own, which the next attempt may not meet
            why = f"did not arrive: {type(error).__name__}: {error}"
            if limit.expired():
                why = f"did not arrive within {self._deadline_s:g} s (cluster.step_timeout_s)"
            what = f"bucket {index + 1} of {len(publication.manifest.bucket_bytes)}"
            raise publication.manifest.error("transfer", f"{what} {why}") from error

    async def _load_and_verify(self, staged: StagedWeights, ahead_s: float, fetched_bytes: int) -> None:
        manifest = staged.manifest
        paused = functools.partial(self._pausing, manifest.policy_version)
        times = await self._engine.load_weights(staged, in_flight=self._in_flight, paused=paused)
        loaded = time.monotonic()
        # Both to the end: where both fail, the read-back says more.
        proof = asyncio.gather(self._read_back(staged), self._canary_gap(manifest), return_exceptions=True)
        if self.serves_unproven:  # after the canary is on its way: no engine makes it wait for what begins now
            self._serve(manifest.policy_version)
        differs, gap = await proof
        for failure in (differs, gap):
            if isinstance(failure, BaseException):
                raise failure
        assert isinstance(gap, CanaryGap)
        self._prove(manifest.policy_version)
        self._reports.append(
            SyncReport(
                ahead_s=ahead_s + times.ahead_s,
                drain_s=times.drain_s,
                pause_s=times.pause_s,
                proof_s=time.monotonic() - loaded,
                served_gap=gap,
                tolerance=self._tolerance.limits,
                num_bytes=manifest.num_bytes,
                fetched_bytes=fetched_bytes,
            )
        )
        self._tolerance = self._tolerance.after(gap)

    @contextmanager
    def _pausing(self, policy_version: int) -> Iterator[None]:
        with spans.span("pause", version=policy_version), self._paused():
            yield

    async def _read_back(self, staged: StagedWeights) -> None:
        with spans.span("read_back", version=staged.manifest.policy_version):
            await self._engine.read_back(staged)

    async def _canary_gap(self, manifest: Manifest) -> CanaryGap:
        with spans.span("canary", version=manifest.policy_version):
            gap = await self._score(manifest)
        if not self._tolerance.allows(gap):
            raise manifest.error("compute", f"engine and trainer differ on the canary by {gap}; {self._tolerance}")
        return gap

    async def _score(self, manifest: Manifest) -> CanaryGap:
        return await self._engine.score(manifest.canary)

    async def _is_overtaken(self, error: WeightSyncError) -> bool:
        """Whether this version is gone because newer ones were published while this engine was about to fetch it: one
        on a slow link, or on a busy machine, among faster ones.
        """
        if not isinstance(error.__cause__, NotKept | FileNotFoundError):
            return False
        newer = await self._pull(error.policy_version, OVERTAKEN_S)
        if newer is not None:
            logger.info(
                "version %d: %d came before it was fetched", error.policy_version, newer.manifest.policy_version
            )
        return newer is not None

    def _refuse(self, error: WeightSyncError) -> None:
        """It never reached the engine, which continues with what was proven."""
        self._count_failure(error)
        self.num_refused += 1
        logger.error("refused, failure %d in a row: %s", self._num_failures, error)

    async def _quarantine(self, error: WeightSyncError) -> None:
        # Nothing that this engine holds was proven: not what it generated under this version, and not what comes next.
        self.verified_version = self.served_version = -1
        self._count_failure(error)
        self.num_quarantines += 1
        logger.error("quarantined, failure %d in a row: %s", self._num_failures, error)
        await self._on_quarantine(error)

    def _count_failure(self, error: WeightSyncError) -> None:
        self._num_failures += 1
        if self._num_failures > self._max_failures:
            raise error

    def stats(self) -> dict[str, float]:
        """Metrics of this moment, beside those of its reports."""
        return {}

    def drain_reports(self) -> list[SyncReport]:
        """The weight syncs since the last call."""
        reports, self._reports = self._reports, []
        return reports
