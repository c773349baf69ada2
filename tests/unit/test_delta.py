"""Differences between versions: what travels, who can use it, and that it is exact."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.collector.engine import StagedWeights
from leeway.transports.delta import BLOCK, MAX_CHAIN, Delta, apply_change, take_change
from leeway.transports.files import Files, newest_publication
from leeway.transports.object_store import ObjectStore
from leeway.transports.transport import TransportSettings, open_transport
from leeway.weights import Publication, check_bucket

from ..transport_contract import SIZES, Synced, received, send, version

WHOLE = sum(SIZES)


def held(number: int) -> StagedWeights:
    return StagedWeights(*version(number))


async def fetched(transport: Delta, publication: Publication, has: StagedWeights | None = None) -> int:
    """How many bytes a receiver that has a version fetches of this one, which is right in every byte."""
    num_bytes = 0
    for index, size in enumerate(publication.manifest.bucket_bytes):
        into = np.empty(size, dtype=np.uint8)
        num_bytes += await transport.fetch(publication, index, into, has)
        check_bucket(publication.manifest, index, into)
    return num_bytes


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 5 * BLOCK), share=st.floats(0, 1))
def test_a_difference_is_exact(seed: int, size: int, share: float) -> None:
    generator = np.random.default_rng(seed)
    last = generator.integers(0, 256, size, np.uint8)
    bucket = last.copy()
    changed = generator.random(size) < share**3
    bucket[changed] = generator.integers(0, 256, int(changed.sum()), np.uint8)
    into = last.copy()
    if (change := take_change(last, bucket)) is None:
        assert np.array_equal(last, into), "nothing was done to it"
        return
    apply_change(change, into)
    assert np.array_equal(into, bucket)
    assert np.array_equal(last, bucket)
    assert change.nbytes <= size / 2


@given(change=st.binary(max_size=64), size=st.integers(0, 32))
def test_bytes_that_are_no_difference_are_refused(change: bytes, size: int) -> None:
    bucket = np.zeros(size, dtype=np.uint8)
    try:
        apply_change(np.frombuffer(change, dtype=np.uint8), bucket)
    except (ValueError, IndexError):
        return
    assert len(change) >= size % 2


@pytest.mark.slow
def test_a_receiver_that_has_the_last_version_fetches_what_changed() -> None:
    transport = Delta(ObjectStore.of_this_process())
    publications = [send(transport, number) for number in range(4)]
    assert asyncio.run(fetched(transport, publications[0])) == WHOLE
    one = asyncio.run(fetched(transport, publications[1], held(0)))
    assert one < 0.1 * WHOLE, "two bytes in a hundred, each as four"
    assert one < asyncio.run(fetched(transport, publications[3], held(0))) < 3.1 * one, "as many as it is behind"
    assert asyncio.run(fetched(transport, publications[3], held(3))) == 0
    assert WHOLE < asyncio.run(fetched(transport, publications[3])) < WHOLE + 3.1 * one, "it comes new"
    assert asyncio.run(fetched(transport, publications[2], held(9))) > WHOLE, "it has a version that nobody knows"


@pytest.mark.slow
def test_those_who_come_new_never_fetch_much_more_than_a_version() -> None:
    transport = Delta(ObjectStore.of_this_process())
    for number in range(3 * MAX_CHAIN):
        publication = send(transport, number)
        assert asyncio.run(fetched(transport, publication)) < 1.6 * WHOLE
        behind = max(0, number - MAX_CHAIN)
        assert asyncio.run(fetched(transport, publication, held(behind))) < (0.7 if number else 1.1) * WHOLE


def test_what_changes_everywhere_travels_whole_and_no_version_is_kept_for_it(tmp_path: Path) -> None:
    transport = open_transport(TransportSettings(name="files", folder=tmp_path, delta=True))
    _, buckets = version(0)
    for step in range(4):
        outgoing = transport.begin(step)
        for bucket in buckets:
            outgoing.put(bucket + np.uint8(step))
        outgoing.commit(version(step)[0])
    folders = [p for p in (tmp_path / "weights").iterdir() if p.is_dir()]
    assert len(folders) == 2
    assert {p.stat().st_size for p in folders[0].glob("*.bin")} == {*SIZES}


def test_a_version_that_was_given_up_is_the_base_of_none() -> None:
    transport = Delta(ObjectStore.of_this_process())
    send(transport, 0)
    outgoing = transport.begin(1)
    outgoing.put(version(1)[1][0])
    outgoing.discard()
    publication = send(transport, 2)
    assert asyncio.run(fetched(transport, publication, held(0))) == WHOLE
    assert transport.memory_bytes == WHOLE


def test_after_a_refused_version_all_of_the_next_one_is_fetched() -> None:
    """What a receiver holds is changed behind its back: the difference no longer gives what was published."""
    transport = Delta(ObjectStore.of_this_process())
    synced, first, second = Synced(transport), send(transport, 0), send(transport, 1)

    async def both() -> None:
        await synced.sync._sync(first)
        kept = synced.sync._held
        assert kept is not None
        kept.buckets[0][:] ^= 1
        await synced.sync._sync(second)
        assert (synced.sync.num_refused, synced.sync._held) == (1, None)
        await synced.sync._sync(second)

    asyncio.run(both())
    assert synced.holds(1)
    assert [report.fetched_bytes > WHOLE for report in synced.sync.drain_reports()] == [False, True]
    assert synced.engine.num_staged == 1, "the one that is held"


@pytest.mark.slow
def test_another_job_reads_the_newest_whole_version_and_all_that_is_needed_stays(tmp_path: Path) -> None:
    below = Files(tmp_path, keep=2)
    transport = Delta(below)
    publications = []
    for number in range(2 * MAX_CHAIN + 3):
        publications.append(send(transport, number))
        for publication in publications[-2:]:
            asyncio.run(received(transport, publication))
    newest = newest_publication(tmp_path)
    assert newest is not None
    assert newest.manifest.policy_version >= 2 * MAX_CHAIN + 2 - MAX_CHAIN
    assert asyncio.run(received(below, newest))[0].tobytes() == version(newest.manifest.policy_version)[1][0].tobytes()
    on_disk = sum(p.stat().st_size for p in tmp_path.rglob("*.bin"))
    assert on_disk < 4 * WHOLE
    with pytest.raises(FileNotFoundError):
        asyncio.run(received(transport, publications[0]))
