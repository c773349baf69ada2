"""What every weight transport is held to: one suite, run over each of them.

A rig makes the trainer's end and the other end apart from each other, as two processes would.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leeway.collector.clock import ActivityClock
from leeway.collector.engine import LoadTimes, StagedWeights
from leeway.collector.weight_sync import WeightSync
from leeway.engines.hf_weights import OpenedHere, buckets_of, confirm
from leeway.param_server.server import ParameterServer
from leeway.transports.shared_memory import mapped
from leeway.transports.transport import DevicePlace, WeightTransport
from leeway.weights import (
    Canary,
    CanaryGap,
    CanaryPrompts,
    Manifest,
    Publication,
    TensorEntry,
    Tolerance,
    WeightSyncError,
    checksum_of,
    digest_of,
)

CANARY = Canary(CanaryPrompts(scored=[[1, 2]], cached=[[1, 2]]), [[-0.5]], [3], [-0.1])
SIZES = (3_000_000, 4096, 1)
FAULTS = [("flip", "bytes", "tensor b "), ("lose", "transfer", "bucket 2 of 3"), ("short", "", "bucket")]


@functools.cache
def version(number: int, checksum: Any = "sha256") -> tuple[Manifest, list[np.ndarray]]:
    """A version of three buckets with two tensors in the first, one of them under two names. One byte in a hundred, and
    the last one of each, is another in every version.
    """
    buckets = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(SIZES)]
    for i, bucket in enumerate(buckets):
        generator = np.random.default_rng([i, number])
        where = [*generator.integers(0, bucket.nbytes, bucket.nbytes // 100), bucket.nbytes - 1]
        bucket[where] = generator.integers(0, 256, len(where), np.uint8)
        bucket[-1] = number
        bucket.flags.writeable = False
    cut = SIZES[0] // 2
    spans = [("a", 0, 0, cut), ("tied", 0, 0, cut), ("b", 0, cut, SIZES[0] - cut), ("c", 1, 0, 4096), ("d", 2, 0, 1)]
    entries = [
        TensorEntry(name, "uint8", (size,), bucket, start, size, checksum_of(buckets[bucket][start:][:size], checksum))
        for name, bucket, start, size in spans
    ]
    return Manifest(number, entries, [b.nbytes for b in buckets], CANARY, digest_of(entries), checksum), buckets


def send(transport: WeightTransport, number: int) -> Publication:
    manifest, buckets = version(number)
    outgoing = transport.begin(number)
    for bucket in buckets:
        memory = bucket.copy()
        outgoing.put(memory)
    return outgoing.commit(manifest)


async def received(transport: WeightTransport, publication: Publication) -> list[np.ndarray]:
    into = [np.zeros(size, dtype=np.uint8) for size in publication.manifest.bucket_bytes]
    for index, memory in enumerate(into):
        await transport.fetch(publication, index, memory)
    return into


class Engine:
    """Takes what it is given; says what it serves."""

    def __init__(self) -> None:
        self.served: list[np.ndarray] = []
        self.loads: list[int] = []
        self.num_staged = 0

    def stage(self, manifest: Manifest, places: Any = ()) -> StagedWeights:
        opened = self.open(manifest, places) if places and isinstance(places[0], DevicePlace) else None
        self.num_staged += 1

        def release() -> None:
            self.num_staged -= 1
            if opened is not None:
                opened.close()

        if opened is not None:
            return StagedWeights(manifest, [], release, opened=opened)
        new = [np.zeros(n, dtype=np.uint8) for n in manifest.bucket_bytes] if not places else []
        return StagedWeights(manifest, new or [mapped(file) for file in places], release)

    def open(self, manifest: Manifest, places: Any) -> OpenedHere:
        return OpenedHere(manifest, places, torch.device("cpu"))

    async def load_weights(self, staged: StagedWeights, *, in_flight: str, paused: Any = nullcontext) -> LoadTimes:
        with paused():
            self.served = [b.numpy().copy() for b in buckets_of(staged)]
            confirm(staged)
        self.loads.append(staged.manifest.policy_version)
        return LoadTimes(0.0, 0.0)

    async def read_back(self, staged: StagedWeights) -> None: ...

    async def score(self, canary: Canary) -> CanaryGap:
        return CanaryGap(0.0, 0.0, 0.0)


class Synced:
    """An engine behind a transport, with the real weight sync and the real parameter server between them."""

    def __init__(self, transport: WeightTransport, **changes: Any) -> None:
        self.engine: Any = Engine()  # it never sleeps
        self.server, self.transport = ParameterServer(), transport
        settings: dict[str, Any] = {"deadline_s": 200.0, "max_failures": 2, "retry_s": 0.0} | changes
        self.sync = WeightSync(
            self.engine,
            lambda newer_than, timeout_s: self.server.pull(newer_than=newer_than, timeout_s=timeout_s),
            transport,
            in_flight="recompute",
            tolerance=Tolerance(1e-4),
            pull_every=1,
            paused=lambda: ActivityClock().doing("pause"),
            on_quarantine=self.never,
            **settings,
        )

    async def never(self, error: WeightSyncError) -> None:
        raise AssertionError(f"what did not arrive needs no quarantine: {error}")

    async def serve(self, publication: Publication) -> None:
        running = asyncio.create_task(self.sync.run())
        try:
            await self.server.publish(publication)
            while self.sync.verified_version < publication.manifest.policy_version:
                await asyncio.sleep(0.002)
                if running.done():
                    running.result()
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, WeightSyncError):
                await running

    def holds(self, number: int) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.engine.served, version(number)[1], strict=True))


class TransportContract:
    """A subclass has a fixture `ends`: (the trainer's end, another end), and `damage(publication, fault)`.

    `damage`: "flip" a byte on the way, "lose" a bucket, or cut one "short"; returns what undoes it.
    """

    def damage(self, publication: Publication, fault: str) -> Callable[[], None]:
        raise NotImplementedError

    def test_what_is_fetched_is_what_was_put(self, ends: tuple[WeightTransport, WeightTransport]) -> None:
        here, there = ends
        for number in range(3):
            publication = send(here, number)
            for got, want in zip(asyncio.run(received(there, publication)), version(number)[1], strict=True):
                assert np.array_equal(got, want)

    def test_a_bucket_belongs_to_the_transport_once_it_was_put(
        self, ends: tuple[WeightTransport, WeightTransport]
    ) -> None:
        here, there = ends
        manifest, buckets = version(4)
        outgoing = here.begin(4)
        for bucket in buckets:
            outgoing.put(bucket.copy())
        publication = outgoing.commit(manifest)
        del outgoing, buckets
        got = asyncio.run(received(there, publication))
        assert np.array_equal(got[0], version(4)[1][0])

    def test_a_version_that_is_given_up_leaves_nothing_and_the_next_one_is_whole(
        self, ends: tuple[WeightTransport, WeightTransport]
    ) -> None:
        here, there = ends
        outgoing = here.begin(0)
        outgoing.put(version(0)[1][0])
        outgoing.discard()
        publication = send(here, 1)
        assert np.array_equal(asyncio.run(received(there, publication))[1], version(1)[1][1])

    def test_an_engine_serves_it_after_every_check(self, ends: tuple[WeightTransport, WeightTransport]) -> None:
        here, there = ends
        synced = Synced(there)
        asyncio.run(synced.serve(send(here, 0)))
        assert synced.holds(0)
        assert synced.sync.verified_version == 0
        assert synced.engine.num_staged == 0, "what was staged is released"

    @pytest.mark.parametrize(("fault", "check", "names"), FAULTS)
    def test_what_is_damaged_on_the_way_reaches_no_engine_and_is_named(
        self,
        ends: tuple[WeightTransport, WeightTransport],
        fault: str,
        check: str,
        names: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("leeway.collector.weight_sync.OVERTAKEN_S", 0.01)
        here, there = ends
        synced, before, publication = Synced(there), send(here, 0), send(here, 1)

        async def serve_both() -> None:
            await synced.serve(before)
            self.damage(publication, fault)
            await synced.serve(publication)

        with pytest.raises(WeightSyncError, match=names) as refused:
            asyncio.run(serve_both())
        assert refused.value.check in (check, *(("bytes", "transfer") if not check else ()))
        assert refused.value.policy_version == 1
        assert synced.sync.num_refused == 2, "it was fetched again as often as it may be"
        assert synced.holds(0), "the engine goes on with what was proven"
        assert (synced.sync.verified_version, synced.engine.loads) == (0, [0])

    def test_an_entry_that_is_missing_is_named(self, ends: tuple[WeightTransport, WeightTransport]) -> None:
        here, there = ends
        synced, whole = Synced(there, max_failures=0), send(here, 0)
        entries = whole.manifest.entries[1:]
        with pytest.raises(WeightSyncError, match="bytes check: the manifest's digest is"):
            asyncio.run(synced.serve(replace(whole, manifest=replace(whole.manifest, entries=entries))))
        assert (synced.engine.loads, synced.engine.num_staged) == ([], 0)

    def test_a_fault_that_passes_costs_another_fetch(self, ends: tuple[WeightTransport, WeightTransport]) -> None:
        here, there = ends
        publication = send(here, 1)
        undo = self.damage(publication, "flip")
        fetch, fetched = there.fetch, 0

        async def mended_later(*args: Any) -> int:
            nonlocal fetched
            fetched += 1
            if fetched == 3:
                undo()
            return await fetch(*args)

        there.fetch = mended_later  # type: ignore[method-assign]
        synced = Synced(there)
        asyncio.run(synced.serve(publication))
        assert synced.holds(1)
        assert synced.sync.num_refused > 0

    def test_a_link_that_stalls_is_named_at_the_deadline(
        self, ends: tuple[WeightTransport, WeightTransport], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here, there = ends
        publication = send(here, 1)
        fetch = there.fetch

        async def stalls(publication: Publication, index: int, *others: Any) -> int:
            if index == 1:  # and the time until the deadline passes at once
                loop = asyncio.get_running_loop()
                monkeypatch.setattr(loop, "time", lambda now=loop.time: now() + 600)
                await asyncio.Event().wait()
            return await fetch(publication, index, *others)

        there.fetch = stalls  # type: ignore[method-assign]
        synced = Synced(there, deadline_s=600.0, max_failures=0)
        with pytest.raises(WeightSyncError, match=r"transfer check: bucket 2 of 3 did not arrive within 600 s"):
            asyncio.run(synced.serve(publication))
        assert synced.engine.loads == []
        assert synced.engine.num_staged == 0


def folder_of(publication: Publication) -> Path:
    return Path(publication.bucket_refs[0]).parent
