"""Which weights an engine serves, and that nothing is believed before it was proven."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from leeway.collector import weight_sync
from leeway.collector.adapter_sync import AdapterSync
from leeway.collector.clock import ACTIVITIES, ActivityClock, IdleClock
from leeway.collector.engine import LoadTimes, StagedWeights
from leeway.collector.progress import Progress, Sampled
from leeway.collector.weight_sync import WeightSync
from leeway.param_server.server import ParameterServer
from leeway.transports.transport import Held, NotKept
from leeway.weights import (
    Canary,
    CanaryGap,
    CanaryPrompts,
    Manifest,
    Publication,
    Tolerance,
    WeightSyncError,
    digest_of,
)

CANARY = Canary(CanaryPrompts(scored=[[1, 2]], cached=[[1, 2]]), [[-0.5]], [3], [-0.1])


def publication(version: int) -> Publication:
    manifest = Manifest(version, [], [4], CANARY, digest_of([]))
    return Publication(manifest, [np.full(4, version, dtype=np.uint8)])


class FakeEngine:
    """Loads whatever it is given; `gap` is what its canary says of a version, `gate` holds the canary back."""

    def __init__(self) -> None:
        self.version = -1
        self.loads: list[int] = []
        self.scores: list[int] = []
        self.gap: Callable[[int], float] = lambda version: 0.0
        self.gate: asyncio.Event | None = None
        self.load_error: Exception | None = None
        self.read_back_error: Exception | None = None
        self.num_staged = 0
        self.in_flight = ""
        self.num_sleeps = 0

    def stage(self, manifest: Manifest, places: Any = ()) -> StagedWeights:
        self.num_staged += 1

        def release() -> None:
            self.num_staged -= 1

        return StagedWeights(manifest, [np.zeros(n, dtype=np.uint8) for n in manifest.bucket_bytes], release)

    async def load_weights(self, staged: StagedWeights, *, in_flight: str, paused: Any = nullcontext) -> Any:
        if self.load_error is not None:
            raise self.load_error
        with paused():
            assert [b.tolist() for b in staged.buckets] == [[staged.manifest.policy_version] * 4]
        self.version, self.in_flight = staged.manifest.policy_version, in_flight
        self.loads.append(self.version)
        return LoadTimes(drain_s=0.0, pause_s=0.25)

    async def sleep(self, *, in_flight: str) -> int:
        self.num_sleeps += 1
        return 4

    async def read_back(self, staged: StagedWeights) -> None:
        assert staged.manifest.policy_version == self.version
        if self.read_back_error is not None:
            raise self.read_back_error

    async def score(self, canary: Canary, *, version: int | None = None) -> CanaryGap:
        assert canary == CANARY
        if self.gate is not None:
            await self.gate.wait()
        self.scores.append(self.version)
        return CanaryGap(self.gap(self.version), 0.0, 0.0)


class Rig:
    """A weight sync between the real parameter server and a fake engine; its own transport."""

    uses_held = False

    def places(self, publication: Publication) -> tuple[()]:
        return ()

    def __init__(self, kind: Any = WeightSync, **changes: Any) -> None:
        self.engine, self.server = FakeEngine(), ParameterServer()
        self.pauses: list[bool] = []
        self.asked: list[int] = []
        settings: dict[str, Any] = {
            "in_flight": "recompute",
            "tolerance": Tolerance(1e-4),
            "pull_every": 1,
            "deadline_s": 600.0,
            "max_failures": 0,
            "retry_s": 0.0,
        }
        self.quarantines: list[str] = []
        self.weight_sync: WeightSync = kind(
            self.engine,
            self.pull,
            self,
            paused=self.paused,
            on_quarantine=self.quarantined,
            **(settings | changes),
        )
        self.faults: list[Exception | None] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pauses.append(True)
        try:
            yield
        finally:
            self.pauses.append(False)

    async def quarantined(self, error: WeightSyncError) -> None:
        self.quarantines.append(error.check)

    async def pull(self, newer_than: int, timeout_s: float) -> Publication | None:
        self.asked.append(newer_than)
        return await self.server.pull(newer_than=newer_than, timeout_s=timeout_s)

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        into[:] = publication.bucket_refs[index]
        return into.nbytes

    async def publish(self, version: int) -> None:
        await self.server.publish(publication(version))
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(scenario: Callable[[Rig, asyncio.Task[None]], Awaitable[None]], **changes: Any) -> None:
    """Run `scenario` beside a running weight sync."""

    async def main() -> None:
        rig = Rig(**changes)
        running = asyncio.create_task(rig.weight_sync.run())
        try:
            async with asyncio.timeout(120):
                await scenario(rig, running)
        finally:
            running.cancel()

    asyncio.run(main())


def test_a_published_version_is_loaded_proven_and_then_served():
    async def scenario(rig, running):
        assert rig.weight_sync.verified_version == -1
        waiter = asyncio.create_task(rig.weight_sync.until_verified(0))
        await settle()
        assert not waiter.done()
        await rig.publish(0)
        await asyncio.wait_for(waiter, 60)
        assert rig.weight_sync.verified_version == 0
        assert rig.engine.scores == [0]
        assert rig.engine.in_flight == "recompute"
        assert rig.pauses == [True, False]

    play(scenario)


def test_nothing_is_verified_before_its_canary_has_passed():
    async def scenario(rig, running):
        await rig.publish(0)
        rig.engine.gate = asyncio.Event()
        await rig.publish(1)
        waiter = asyncio.create_task(rig.weight_sync.until_verified(1))
        await settle()
        assert rig.engine.version == 1
        assert (rig.weight_sync.verified_version, waiter.done()) == (0, False)
        assert rig.pauses[-1] is False, "the canary is scored after resuming"
        rig.engine.gate.set()
        await asyncio.wait_for(waiter, 60)
        assert rig.weight_sync.verified_version == 1

    play(scenario)


@pytest.mark.parametrize("gap", [1.1e-4, 3.0, math.inf, math.nan])
def test_a_canary_that_differs_fails_the_weight_sync_by_number(gap):
    async def scenario(rig, running):
        rig.engine.gap = lambda version: gap if version == 1 else 1e-4  # exactly the tolerance passes
        await rig.publish(0)
        assert rig.weight_sync.verified_version == 0
        await rig.publish(1)
        with pytest.raises(
            WeightSyncError, match=r"version 1 failed the compute check: .* by .* nats.*tolerance is 0.0001"
        ):
            await asyncio.wait_for(running, 60)
        assert rig.weight_sync.verified_version == -1
        assert len(rig.weight_sync.drain_reports()) == 1

    play(scenario)


AUTO = Tolerance(3.0, 0.3, factor=2.0, least=0.01)


@pytest.mark.parametrize(
    ("gaps", "refused"),
    [
        # (scored, cached, mean) of each version, and what is said of the last
        ([(0.1, 0.0, 0.01), (0.59, 0.05, 0.019), (2.9, 0.2, 0.037)], None),  # 6 and 2 times what was proven before
        ([(0.1, 0.0, 0.01), (0.61, 0.0, 0.01)], r"came to 0.6 nats on scored prompts \(0.02 on average\), 0.06 after"),
        ([(0.05, 0.0, 0.02), (0.05, 0.0, 0.05)], r"\(0.04 on average\)"),  # a small error of every token
        ([(0.9, 0.01, 0.01), (0.9, 0.07, 0.01)], "0.06 after prompts in the prefix cache"),
        ([(0.0, 0.0, 0.0), (0.059, 0.059, 0.019)], None),  # the resolution of the type, where both round alike
        ([(0.0, 0.0, 0.0), (0.47, 0.0, 0.005)], None),  # and of one token eight times it
        ([(0.0, 0.0, 0.0), (0.49, 0.0, 0.0)], "came to 0.48 nats"),
        ([(0.0, 0.0, 0.0), (0.0, 0.061, 0.0)], "0.06 after prompts in the prefix cache"),
        ([(2.9, 0.0, 0.14), (2.9, 0.0, 0.27), (2.9, 0.0, 0.31)], r"\(0.3 on average\)"),  # never above the ceilings
        ([(2.9, 0.0, 0.14), (3.1, 0.0, 0.14)], r"came to 3 nats on scored prompts \(0.28 on average\)"),
        ([(3.1, 0.0, 0.1)], r"of an engine's first load at most 3 nats on scored prompts \(0.15 on average\)"),
        ([(0.2, 0.0, 0.16)], "of an engine's first load at most 3 nats"),
        ([(math.nan, 0.0, math.nan)], "of an engine's first load"),
    ],
)
def test_a_calibrated_tolerance_is_a_multiple_of_what_was_proven(gaps, refused):
    async def scenario(rig, running):
        async def score(canary):
            return CanaryGap(*gaps[rig.engine.version])

        rig.engine.score = score
        for version in range(len(gaps)):
            await rig.publish(version)
        if refused is None:
            assert rig.weight_sync.verified_version == len(gaps) - 1
            reports = rig.weight_sync.drain_reports()
            assert [r.served_gap for r in reports] == [CanaryGap(*gap) for gap in gaps]
            for report, (scored, _, mean) in zip(reports[1:], gaps, strict=False):
                assert report.tolerance.scored == pytest.approx(min(3.0, 6 * max(0.08, scored)))
                assert report.tolerance.mean == pytest.approx(2 * max(0.01, mean))
        else:
            with pytest.raises(WeightSyncError, match=f"version {len(gaps) - 1} failed the compute check.*{refused}"):
                await asyncio.wait_for(running, 60)

    play(scenario, tolerance=AUTO)


def test_a_load_that_fails_ends_the_weight_sync_and_the_pause():
    async def scenario(rig, running):
        await rig.publish(0)
        rig.engine.load_error = WeightSyncError("load", 1, "no published tensor reached lm_head")
        await rig.publish(1)
        with pytest.raises(WeightSyncError, match="load check: no published tensor reached lm_head"):
            await asyncio.wait_for(running, 60)
        assert rig.weight_sync.verified_version == -1
        assert rig.pauses in ([True, False], [True, False, True, False])  # it may fail before the engine stands still

    play(scenario)


def test_a_read_back_that_differs_after_resuming_quarantines_the_engine():
    async def scenario(rig, running):
        await rig.publish(0)
        rig.engine.read_back_error = WeightSyncError("load", 1, "weights differ from those published in layer 3")
        await rig.publish(1)
        with pytest.raises(WeightSyncError, match=r"version 1 failed the load check: .* layer 3"):
            await asyncio.wait_for(running, 60)
        assert rig.pauses == [True, False, True, False], "the engine generates while it is read back"
        assert rig.weight_sync.verified_version == -1
        assert rig.engine.num_staged == 0

    play(scenario)


def test_nothing_is_verified_before_it_was_read_back():
    async def scenario(rig, running):
        gate = asyncio.Event()

        async def read_back(staged: StagedWeights) -> None:
            assert rig.engine.num_staged == 1, "what it is compared to is still there"
            await gate.wait()

        rig.engine.read_back = read_back
        await rig.publish(0)
        assert (rig.engine.loads, rig.engine.scores, rig.weight_sync.verified_version) == ([0], [0], -1)
        gate.set()
        await asyncio.wait_for(rig.weight_sync.until_verified(0), 60)

    play(scenario)


def test_where_both_proofs_fail_the_read_back_says_where():
    async def scenario(rig, running):
        async def read_back(staged: StagedWeights) -> None:
            await settle()
            raise staged.manifest.error("load", "weights differ from those published in layer 3")

        rig.engine.read_back = read_back
        rig.engine.gap = lambda version: 1.0
        await rig.publish(0)
        with pytest.raises(WeightSyncError, match=r"load check: .* layer 3"):
            await asyncio.wait_for(running, 60)
        assert rig.engine.scores == [0]

    play(scenario)


def test_what_does_not_arrive_is_fetched_again_while_the_engine_goes_on():
    async def scenario(rig, running):
        await rig.publish(0)
        rig.faults = [OSError("the link is down"), RuntimeError("the node is gone")]
        await rig.publish(1)
        await asyncio.wait_for(rig.weight_sync.until_verified(1), 60)
        assert rig.engine.loads == [0, 1]
        assert (rig.weight_sync.num_refused, rig.weight_sync.num_quarantines, rig.quarantines) == (2, 0, [])
        rig.faults = [OSError("the link is down")] * 3
        await rig.publish(2)
        with pytest.raises(WeightSyncError, match=r"transfer check: bucket 1 of 1 did not arrive: OSError: the"):
            await asyncio.wait_for(running, 60)
        assert rig.weight_sync.verified_version == 1, "never in doubt"
        assert rig.engine.num_staged == 0

    play(scenario, max_failures=2)


@pytest.mark.parametrize("gone", [NotKept("not kept"), FileNotFoundError("no such file")])
def test_a_version_that_newer_ones_overtake_while_it_is_fetched_is_no_failure(gone):
    async def scenario(rig, running):
        await rig.publish(0)

        async def overtaken(asked, index, into, held=None):
            version = asked.manifest.policy_version
            if version < 5:
                await rig.server.publish(publication(version + 1))
                raise gone
            into[:] = version
            return into.nbytes

        rig.fetch = overtaken
        await rig.publish(1)
        await asyncio.wait_for(rig.weight_sync.until_verified(5), 60)
        assert (rig.engine.loads, rig.weight_sync.num_refused) == ([0, 5], 0)

        async def removed(asked, index, into, held=None):
            raise gone

        rig.fetch = removed
        await rig.publish(6)
        with pytest.raises(WeightSyncError, match="version 6 failed the transfer check"):
            await asyncio.wait_for(running, 60)

    play(scenario, max_failures=1)


def test_a_second_pause_waits_until_the_first_one_was_of_use_unless_a_group_waits():
    async def scenario(rig, running):
        await rig.publish(0)
        assert rig.engine.loads == [0]
        await rig.publish(1)
        assert rig.engine.loads == [0], "what is in flight has got no token under version 0 yet"
        used.set()
        await settle()
        assert rig.engine.loads == [0, 1]
        await rig.publish(2)
        await rig.publish(3)
        assert rig.engine.loads == [0, 1]
        await asyncio.wait_for(rig.weight_sync.until_verified(2), 60)
        assert rig.engine.loads == [0, 1, 3], "the newest, at once"

    used = asyncio.Event()

    async def caught_up() -> None:
        await used.wait()
        used.clear()

    play(scenario, caught_up=caught_up)


def test_whoever_was_in_flight_at_a_load_has_caught_up_with_its_next_token_or_its_end():
    async def main() -> None:
        progress = Progress()
        with progress.request("a", num_sequences=2, prompt_tokens=4):
            progress.passed(1.0, [Sampled("a", "a-0", 1, False)])  # the other one waits for a place
            progress.pause()
            progress.resume()
            waiting = asyncio.create_task(progress.caught_up())
            await settle()
            assert not waiting.done()
            progress.passed(2.0, [Sampled("a", "a-1", 1, False)])
            await settle()
            assert not waiting.done()
            progress.passed(3.0, [Sampled("a", "a-0", 1, False)])
            await asyncio.wait_for(waiting, 60)
            progress.resume()
            aborted = asyncio.create_task(progress.caught_up())
            await settle()
            assert not aborted.done()
        await asyncio.wait_for(aborted, 60)
        progress.resume()
        await asyncio.wait_for(progress.caught_up(), 60)

    asyncio.run(main())


def test_what_the_weights_are_enough_for_finishes_under_them_if_asked():
    async def scenario(rig, running):
        served: list[tuple[int, int, int]] = []
        release = asyncio.Event()

        async def group(needed: int) -> None:
            async with rig.weight_sync.generating_under(needed):
                started = rig.engine.version
                await release.wait()
                served.append((needed, started, rig.engine.version))

        await rig.publish(0)
        groups = [asyncio.create_task(group(needed)) for needed in (0, 1, 0, 2)]
        await settle()
        await rig.publish(1)
        await rig.publish(2)
        assert rig.engine.loads == [0]  # two groups are at work, though others wait for newer weights
        release.set()
        await asyncio.wait_for(asyncio.gather(*groups), 60)
        assert all(started == ended for _, started, ended in served)
        assert {needed: started for needed, started, _ in served} == {0: 0, 1: 1, 2: 2}
        assert rig.engine.loads == [0, 1, 2]

    play(scenario, finish_first=True)


def test_a_manifest_that_does_not_match_its_digest_never_reaches_the_engine():
    async def scenario(rig, running):
        good = publication(0)
        await rig.server.publish(
            dataclasses.replace(good, manifest=dataclasses.replace(good.manifest, digest="0" * 64))
        )
        with pytest.raises(WeightSyncError, match="bytes check"):
            await asyncio.wait_for(running, 60)
        assert rig.engine.loads == []
        assert rig.pauses == []

    play(scenario)


def test_versions_that_were_overtaken_are_never_loaded():
    async def scenario(rig, running):
        await rig.publish(0)
        rig.engine.gate = asyncio.Event()
        await rig.publish(1)
        for version in (2, 3, 4):  # while version 1 is being proven
            await rig.publish(version)
        rig.engine.gate.set()
        await asyncio.wait_for(rig.weight_sync.until_verified(4), 60)
        assert rig.engine.loads == [0, 1, 4]

    play(scenario)


@pytest.mark.parametrize(("pull_every", "loads"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (3, [0, 3, 6])])
def test_pull_every_limits_how_often_generation_pauses(pull_every, loads):
    async def scenario(rig, running):
        for version in range(7):
            await rig.publish(version)
        assert rig.engine.loads == loads

    play(scenario, pull_every=pull_every)


def test_a_version_that_a_group_needs_is_served_although_pull_every_would_wait():
    async def main() -> None:
        rig = Rig(pull_every=5)
        rig.engine.gate = asyncio.Event()
        running = asyncio.create_task(rig.weight_sync.run())
        await rig.publish(0)
        # Version 2 is asked for before the next pull is made: that pull is for 2, neither for 1 nor for 5.
        waiter = asyncio.create_task(rig.weight_sync.until_verified(2))
        await settle()
        rig.engine.gate.set()
        await settle()
        await rig.publish(1)
        assert rig.engine.loads == [0]
        await rig.publish(2)
        await asyncio.wait_for(waiter, 60)
        assert rig.engine.loads == [0, 2]
        running.cancel()

    asyncio.run(main())


def test_a_version_that_is_needed_during_a_pull_is_served_at_once():
    async def scenario(rig, running):
        await rig.publish(0)
        await rig.publish(1)  # not worth a pause by itself
        assert rig.engine.loads == [0]
        await asyncio.wait_for(rig.weight_sync.until_verified(1), 60)

    play(scenario, pull_every=2)


def test_where_the_oldest_is_pulled_versions_are_served_one_by_one_and_exactly():
    async def scenario(rig, running):
        rig.server = ParameterServer(keep=9)
        pull = rig.server.pull
        rig.server.pull = lambda **asked: pull(**asked, oldest=True)
        for version in range(6):
            await rig.publish(version)
        assert rig.weight_sync.verified_version == 0
        waiters = [asyncio.create_task(rig.weight_sync.until_verified(v)) for v in (4, 2, 3)]
        await asyncio.wait_for(asyncio.gather(*waiters), 60)
        assert rig.engine.loads == [0, 2, 3, 4]  # not 5, which is there, and not 4 before 2
        await settle()
        assert rig.engine.loads == [0, 2, 3, 4]

    play(scenario, pull_every=1000)


def test_while_it_is_held_the_weights_do_not_change():
    async def scenario(rig, running):
        await rig.publish(0)
        async with rig.weight_sync.freeze_weights():
            await rig.publish(1)
            await settle()
            assert rig.engine.loads == [0]
            assert rig.weight_sync.verified_version == 0
        await asyncio.wait_for(rig.weight_sync.until_verified(1), 60)

    play(scenario)


def test_an_engine_that_does_not_get_done_with_a_published_version_ends_the_wait_by_both_versions():
    async def scenario(rig, running):
        await rig.publish(3)
        rig.engine.gate = asyncio.Event()  # its proof never ends
        await rig.publish(7)
        with pytest.raises(
            TimeoutError, match=r"waited 0.05 s .* weights of version 7 .* serves version 7, and version 3 is proven"
        ):
            await rig.weight_sync.until_verified(7)

    play(scenario, deadline_s=0.05)


@pytest.mark.parametrize("whose", ["the trainer's", "an evaluation's", "the turn of the trainer"])
def test_a_wait_for_others_is_no_fault_of_the_engine_however_long_it_lasts(whose):
    """They have deadlines of their own, where they are."""

    async def scenario(rig, running):
        await rig.publish(0)
        if whose == "an evaluation's":
            await rig.weight_sync.freeze_weights().acquire()
            await rig.publish(1)
        if whose == "the turn of the trainer":
            await rig.weight_sync.sleep()
        waiters = [asyncio.create_task(rig.weight_sync.until_verified(1)) for _ in range(3)]
        await asyncio.sleep(0.4)  # many deadlines
        assert not any(waiter.done() for waiter in waiters)
        if whose == "an evaluation's":
            rig.weight_sync.freeze_weights().release()
        else:
            await rig.publish(1)
        if whose == "the turn of the trainer":
            rig.weight_sync.wake()
        await asyncio.wait_for(asyncio.gather(*waiters), 60)

    play(scenario, deadline_s=0.03)


def test_a_parameter_server_that_never_answers_ends_the_sync_by_name(monkeypatch):
    monkeypatch.setattr(weight_sync, "POLL_S", 0.01)

    async def scenario(rig, running):
        await asyncio.wait({running}, timeout=60)
        with pytest.raises(TimeoutError, match=r"the parameter server did not say for 0.02 s"):
            await running

    async def hangs(newer_than: int, timeout_s: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Rig, "pull", staticmethod(hangs))
    play(scenario, deadline_s=0.02)


def test_who_waits_costs_the_others_nothing():
    """Groups that come and go wake nobody else, however many wait for weights."""

    def turns_of_the_loop(num_waiting: int) -> int:
        calls = 0

        async def main() -> None:
            nonlocal calls
            rig, loop, release = Rig(), asyncio.get_running_loop(), asyncio.Event()
            running = asyncio.create_task(rig.weight_sync.run())
            await rig.publish(0)

            async def group() -> None:
                async with rig.weight_sync.generating_under(0):
                    await release.wait()

            waiters = [asyncio.create_task(rig.weight_sync.until_verified(1)) for _ in range(num_waiting)]
            served = [asyncio.create_task(group()) for _ in range(20)]
            await settle()
            call_soon = loop.call_soon

            def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
                nonlocal calls
                calls += 1
                return call_soon(*args, **kwargs)

            loop.call_soon = counted  # type: ignore[method-assign]
            late = [asyncio.create_task(rig.weight_sync.until_verified(1)) for _ in range(20)]
            release.set()
            await asyncio.gather(*served)
            await settle()
            loop.call_soon = call_soon  # type: ignore[method-assign]
            await rig.publish(1)
            await asyncio.gather(*waiters, *late)
            running.cancel()

        asyncio.run(main())
        return calls

    assert turns_of_the_loop(300) == turns_of_the_loop(3)


def test_reports_are_of_the_pulls_since_the_last_one():
    async def scenario(rig, running):
        rig.engine.gap = lambda version: version * 1e-5
        for version in (0, 1, 2):
            await rig.publish(version)
        reports = rig.weight_sync.drain_reports()
        assert [r.served_gap.largest for r in reports] == pytest.approx([0.0, 1e-5, 2e-5])
        assert {r.pause_s for r in reports} == {0.25}
        assert {r.num_bytes for r in reports} == {4}
        assert all(r.sync_s >= r.pause_s + r.proof_s >= r.pause_s for r in reports)
        assert rig.weight_sync.drain_reports() == []

    play(scenario)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_no_nan_is_lost_among_the_gaps_of_a_canary(at):
    """The largest of several gaps, one of which is not a number, is not a number."""
    from leeway.engines.vllm_engine import VllmEngine

    gaps = [1e-6] * 4
    gaps[at] = math.nan
    remaining = iter(gaps)

    async def next_gap(*_: Any) -> list[float]:
        return [next(remaining)]

    engine: Any = object.__new__(VllmEngine)
    engine._scored_gaps = engine._continued_gap = next_gap
    canary = Canary(CanaryPrompts(scored=[[1, 2]] * 2, cached=[[1, 2]] * 2), [[-0.5]] * 2, [3] * 2, [-0.1] * 2)
    assert not asyncio.run(engine.score(canary)).largest <= 1e-4


def test_a_canary_says_by_which_route_an_engine_differs():
    async def scenario(rig, running):
        rig.engine.score = lambda canary: answer(CanaryGap(2e-6, 0.5, 0.0))
        await rig.publish(0)
        with pytest.raises(
            WeightSyncError,
            match=r"2e-06 nats on scored prompts \(0 on average\), 0.5 after prompts in the prefix cache",
        ):
            await asyncio.wait_for(running, 60)

    async def answer(gap: CanaryGap) -> CanaryGap:
        return gap

    play(scenario)


@pytest.mark.parametrize("kind", [WeightSync, functools.partial(AdapterSync, max_versions=2)], ids=["all", "adapters"])
def test_groups_begin_when_their_version_is_loaded_but_adapters_only_when_it_is_proven(kind):
    """An engine that goes on with the new weights has no others; one that holds versions has one that was proven."""

    async def scenario(rig, running):
        await rig.publish(0)
        rig.engine.gate = asyncio.Event()
        begun = asyncio.create_task(rig.weight_sync.until_served(1))
        proven = asyncio.create_task(rig.weight_sync.until_verified(1))
        await rig.publish(1)
        assert (rig.engine.loads, rig.weight_sync.verified_version) == ([0, 1], 0)
        assert begun.done() is (kind is WeightSync)
        assert not proven.done()
        rig.engine.gate.set()
        await asyncio.wait_for(asyncio.gather(begun, proven), 60)
        assert rig.weight_sync.verified_version == 1

    play(scenario, kind=kind)


@pytest.mark.parametrize("check", ["load", "compute"])
def test_a_failed_check_quarantines_until_a_later_pull_passes_every_check(check):
    async def scenario(rig, running):
        await rig.publish(0)
        assert rig.weight_sync.verified_version == 0
        if check == "load":
            rig.engine.load_error = WeightSyncError("load", 1, "a layer was left out")
        else:
            rig.engine.gap = lambda version: 0.5 if len(rig.engine.scores) < 3 else 0.0  # wrong once more, then right
        await rig.publish(1)
        waiter = asyncio.create_task(rig.weight_sync.until_verified(0))
        beginning = asyncio.create_task(rig.weight_sync.until_served(0))
        await settle()
        if check == "load":
            # It tried as often as it may, and what was verified before counts no more.
            with pytest.raises(WeightSyncError, match="version 1 failed the load check: a layer was left out"):
                await running
            assert not waiter.done()
            assert not beginning.done()
            assert rig.quarantines == ["load"] * 2
            waiter.cancel()
            beginning.cancel()
        else:
            await asyncio.wait_for(waiter, 60)
            await asyncio.wait_for(beginning, 60)
            assert rig.quarantines == ["compute"]
            assert rig.engine.loads == [0, 1, 1]  # the same version again: nothing newer was there
            assert rig.weight_sync.verified_version == 1
            assert rig.weight_sync.num_quarantines == 1

    play(scenario, max_failures=2)


def test_a_quarantined_engine_may_prove_itself_with_the_next_version_and_failures_count_in_a_row():
    async def scenario(rig, running):
        rig.engine.gap = lambda version: 0.5 if rig.engine.loads.count(version) < 3 else 0.0
        for version in (0, 1, 2):  # each fails twice, then passes: never three in a row
            await rig.publish(version)
            await asyncio.wait_for(rig.weight_sync.until_verified(version), 60)
        assert rig.engine.loads == [0] * 3 + [1] * 3 + [2] * 3
        assert rig.weight_sync.num_quarantines == 6

    play(scenario, max_failures=2)


def test_the_clock_adds_up_to_wall_time():
    now = [0.0]
    clock = ActivityClock(lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += seconds

    nothing = dict.fromkeys(ACTIVITIES, 0.0)
    after(1)
    with clock.doing("environment"):
        after(2)
        with clock.doing("generate"), clock.doing("generate"):
            after(10)
            with clock.doing("pause"):  # a pause is a pause whatever is in flight
                after(100)
            after(20)
        after(1000)
        with clock.doing("withheld"):  # something else is still under way
            after(3)
    with clock.doing("wait_for_weights"):
        after(7)
    after(10_000)
    assert clock.drain() == nothing | {
        "generate": 30.0, "pause": 100.0, "environment": 1005.0, "wait_for_weights": 7.0, "wait_for_slot": 10_001.0,
    }  # fmt: skip
    after(5)
    assert clock.drain() == nothing | {"wait_for_slot": 5.0}
    assert clock.total("environment") == 1005.0, "whatever was drained"


def test_an_idle_clock_adds_up_what_is_outside():
    now = [0.0]
    clock = IdleClock(lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += seconds

    after(1)
    with clock:
        after(10)
        with clock:
            after(20)
        after(30)
        assert clock.idle_s == 1
    after(2)
    assert clock.idle_s == 3
    with clock:
        after(100)
    assert clock.idle_s == 3


def test_an_engine_that_sleeps_serves_nothing_and_wakes_by_a_load_of_the_newest_version():
    async def scenario(rig, running):
        await rig.publish(0)
        assert await rig.weight_sync.sleep() == 4
        waiter = asyncio.create_task(rig.weight_sync.until_verified(0))
        beginning = asyncio.create_task(rig.weight_sync.until_served(0))
        await rig.publish(1)
        await rig.publish(2)
        assert (rig.engine.loads, rig.weight_sync.verified_version, waiter.done()) == ([0], -1, False)
        assert not beginning.done()
        assert await rig.weight_sync.sleep() == 0, "it sleeps already"
        rig.weight_sync.wake()
        rig.weight_sync.wake()
        await asyncio.wait_for(waiter, 60)
        await asyncio.wait_for(beginning, 60)
        assert (rig.engine.loads, rig.weight_sync.verified_version) == ([0, 2], 2)
        assert rig.engine.num_sleeps == 1

    play(scenario)


def test_an_engine_that_slept_wakes_by_the_version_that_it_had_where_there_is_no_newer_one():
    """Its weights are gone. A group that may start under older ones still is no reason to ask for those."""

    async def scenario(rig, running):
        for version in (0, 1, 2):
            await rig.publish(version)
        await rig.weight_sync.sleep()
        waiters = [asyncio.create_task(rig.weight_sync.until_verified(version)) for version in (1, 2)]
        await settle()
        rig.asked.clear()
        rig.weight_sync.wake()
        await asyncio.wait_for(asyncio.gather(*waiters), 60)
        assert rig.engine.loads == [0, 1, 2, 2]
        assert rig.asked[0] == 1

    play(scenario)


def test_a_load_under_way_ends_before_the_engine_sleeps():
    async def scenario(rig, running):
        await rig.publish(0)
        rig.engine.gate = asyncio.Event()
        await rig.publish(1)
        sleeping = asyncio.create_task(rig.weight_sync.sleep())
        await settle()
        assert (rig.engine.num_sleeps, sleeping.done()) == (0, False)
        rig.engine.gate.set()
        await asyncio.wait_for(sleeping, 60)
        assert rig.engine.scores == [0, 1]
        assert rig.weight_sync.verified_version == -1

    play(scenario)


def test_a_closed_sync_lets_a_load_end_before_another_run_has_the_engine():
    async def scenario(rig, running):
        rig.engine.gate = asyncio.Event()
        await rig.publish(0)
        assert rig.engine.loads == [0]
        rig.weight_sync.close()
        ended = asyncio.create_task(rig.weight_sync.ended())
        await settle()
        assert not ended.done(), "what is loaded is being read back and scored"
        rig.engine.gate.set()
        await ended
        assert (rig.weight_sync.verified_version, rig.engine.num_staged) == (0, 0)

    play(scenario)


def test_a_closed_sync_gives_up_what_is_still_being_fetched():
    async def scenario(rig, running):
        stalled = asyncio.Event()

        async def stalls(*_: Any) -> int:
            stalled.set()
            await asyncio.Event().wait()
            return 0

        rig.fetch = stalls
        await rig.publish(0)
        await stalled.wait()
        rig.weight_sync.close()
        await rig.weight_sync.ended()
        await settle()
        assert (rig.engine.loads, rig.engine.num_staged) == ([], 0)

    play(scenario)


def test_memory_that_a_thread_makes_for_nobody_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leeway.collector.weight_sync.SMALL_BYTES", 0)
    making, go_on = threading.Event(), threading.Event()

    async def scenario(rig, running):
        stage, released = rig.engine.stage, asyncio.Event()

        def slow(*given: Any) -> StagedWeights:
            making.set()
            go_on.wait(60)
            staged = stage(*given)

            def release() -> None:
                staged.release()
                released.set()

            return dataclasses.replace(staged, release=release)

        rig.engine.stage = slow
        await rig.server.publish(publication(0))
        await asyncio.to_thread(making.wait, 60)
        running.cancel()
        await asyncio.wait([running])
        go_on.set()
        await asyncio.wait_for(released.wait(), 60)
        assert rig.engine.num_staged == 0

    play(scenario)


def test_a_version_is_fetched_again_after_a_while_and_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    sleep = asyncio.sleep

    async def sleeps(seconds: float, *given: Any) -> None:
        if seconds:
            waited.append(seconds)
        await sleep(0)

    async def scenario(rig, running):
        rig.faults = [ConnectionError("cut")] * 4
        monkeypatch.setattr(asyncio, "sleep", sleeps)
        await rig.publish(0)
        await asyncio.wait_for(rig.weight_sync.until_verified(0), 60)
        assert (waited, rig.weight_sync.num_refused) == ([1.0, 4.0, 16.0, 60.0], 4)

    play(scenario, max_failures=4, retry_s=1.0)
