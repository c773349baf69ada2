"""Weights in memory of a device: on a CPU, with main memory in its place, all but CUDA's own calls; these on a GPU."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leeway.config import ConfigError, load_config
from leeway.config.transports import TRANSPORTS, transport_options
from leeway.engines.hf_weights import OpenedHere
from leeway.transports.device_ipc import DeviceIpc
from leeway.transports.device_memory import (
    DeviceMemory,
    HostMemory,
    Opened,
    device_memory,
    places_from_json,
    places_to_json,
)
from leeway.transports.leases import Lease, LeaseFile
from leeway.transports.transport import (
    DevicePlace,
    NotKept,
    TransportSettings,
    WeightTransport,
    open_transport,
)
from leeway.weights import Publication, WeightSyncError, bucket_checks

from ..transport_contract import SIZES, Synced, TransportContract, received, send, version

WHOLE = sum(SIZES)


def ipc(parent: Path, **settings: Any) -> DeviceIpc:
    return DeviceIpc(HostMemory, parent=parent, **{"longest_s": 200.0, "keep": 1} | settings)


def opened(publication: Publication) -> Opened:
    return Opened(publication.manifest, publication.bucket_refs, HostMemory())


def holds(there: Opened, number: int) -> bool:
    return all(np.array_equal(a.numpy(), b) for a, b in zip(there.tensors, version(number)[1], strict=True))


class TestDeviceIpc(TransportContract):
    @pytest.fixture
    def ends(self, tmp_path: Path) -> Iterator[tuple[WeightTransport, WeightTransport]]:
        here, there = (ipc(tmp_path, keep=3) for _ in range(2))
        yield here, there
        here.close()
        assert not list(tmp_path.iterdir())

    def damage(self, publication: Publication, fault: str) -> Callable[[], None]:
        path = Path(os.fsdecode(publication.bucket_refs[0 if fault == "flip" else 1].handle))
        whole = path.read_bytes()
        if fault == "flip":
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(bytes([whole[-1] ^ 1]))
            return lambda: [path.write_bytes(whole), None][1]
        path.unlink()
        if fault == "short":
            path.write_bytes(whole[:-1])
        return lambda: [path.write_bytes(whole), None][1]

    def test_a_fault_that_passes_costs_another_fetch(self, ends: tuple[WeightTransport, WeightTransport]) -> None:
        here, there = ends
        publication = send(here, 1)
        undo, places = self.damage(publication, "flip"), there.places

        def mended(publication: Publication) -> Sequence[Any]:
            if synced.sync.num_refused:
                undo()
            return places(publication)

        there.places = mended  # type: ignore[method-assign]
        synced = Synced(there)
        asyncio.run(synced.serve(publication))
        assert (synced.holds(1), synced.sync.num_refused) == (True, 1)

    def test_a_link_that_stalls_is_named_at_the_deadline(
        self, ends: tuple[WeightTransport, WeightTransport], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is fetched: what may stall is the device, while it is read."""
        here, there = ends

        async def stalls(self: OpenedHere) -> None:
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "time", lambda now=loop.time: now() + 600)
            await asyncio.Event().wait()

        monkeypatch.setattr(OpenedHere, "check", stalls)
        synced = Synced(there, deadline_s=600.0, max_failures=0)
        with pytest.raises(WeightSyncError, match=r"transfer check: it was not read within 600 s"):
            asyncio.run(synced.serve(send(here, 1)))
        assert (synced.engine.loads, synced.engine.num_staged) == ([], 0)


def test_memory_is_used_again_and_what_is_read_is_left_alone(tmp_path: Path) -> None:
    here = ipc(tmp_path)
    reading = opened(send(here, 0))
    later = [send(here, number) for number in range(1, 6)]
    assert holds(reading, 0)
    assert here.device_bytes == 3 * WHOLE, "what is read, the newest, and the one before, which is the next one's"
    reading.close()
    for number in range(6, 9):
        later.append(send(here, number))
    assert here.device_bytes == 2 * WHOLE, "what an engine was slow for is given back"
    assert holds(opened(later[-1]), 8)
    with pytest.raises(NotKept, match="memory"):
        opened(later[0])
    here.close()


def test_an_engine_that_comes_too_late_is_told_and_takes_the_newest(tmp_path: Path) -> None:
    here = ipc(tmp_path)
    synced, old = Synced(here, max_failures=0), send(here, 0)
    newest = [send(here, number) for number in (1, 2)][-1]

    async def both() -> None:
        await synced.server.publish(newest)
        await synced.sync._sync(replace(old, manifest=replace(old.manifest, policy_version=1)))
        await synced.sync._sync(newest)

    asyncio.run(both())
    assert (synced.sync.num_refused, synced.holds(2)) == (0, True)
    here.close()


def test_memory_is_taken_back_from_who_stands_still_and_it_finds_out(tmp_path: Path) -> None:
    here = ipc(tmp_path, longest_s=-1.0)
    publication = send(here, 0)
    still = opened(publication)
    send(here, 1)
    send(here, 2)  # in the memory of version 0
    assert here.device_bytes == 2 * WHOLE
    with pytest.raises(NotKept):
        for _ in still.checks(replace(publication.manifest, entries=[])):
            pass
    with pytest.raises(WeightSyncError, match=r"load check: .*cluster\.step_timeout_s.*another version by now"):
        still.confirm(publication.manifest)
    still.close()
    here.close()


def test_a_load_from_memory_that_was_taken_back_is_quarantined(tmp_path: Path) -> None:
    """The bytes are whole when they are checked, and another version's when they are copied."""
    here = ipc(tmp_path, longest_s=-1.0)
    synced, first = Synced(here, max_failures=0), send(here, 0)
    told: list[str] = []

    async def on_quarantine(error: WeightSyncError) -> None:
        told.append(error.check)

    synced.sync._on_quarantine = on_quarantine
    synced.sync._max_failures = 1
    load = synced.engine.load_weights

    async def late(staged: Any, **settings: Any) -> Any:
        send(here, 1), send(here, 2)
        return await load(staged, **settings)

    synced.engine.load_weights = late
    asyncio.run(synced.sync._sync(first))
    assert (told, synced.sync.verified_version) == (["load"], -1)
    here.close()


READER = """
import os, sys, time
from leeway.transports.device_memory import HostMemory, Opened, places_from_json
from leeway.weights import Manifest
manifest, places = sys.stdin.readline(), sys.stdin.readline()
manifest = Manifest.from_json(manifest)
opened = Opened(manifest, places_from_json(places), HostMemory())
for _ in opened.checks(manifest): pass
print("reads", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_reader_that_is_killed_keeps_no_memory(tmp_path: Path) -> None:
    here = ipc(tmp_path)
    publication = send(here, 0)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reader = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{publication.manifest.to_json()}\n{places_to_json(publication.bucket_refs)}\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "reads\n"
    for number in range(1, 4):
        send(here, number)
    assert here.device_bytes == 3 * WHOLE, "it reads version 0"
    reader.send_signal(signal.SIGKILL)
    reader.communicate()
    for number in range(4, 6):
        send(here, number)
    assert here.device_bytes == 2 * WHOLE
    here.close()


@pytest.mark.slow
def test_what_a_killed_sender_leaves_is_whole_for_its_readers_and_removed_by_the_next(tmp_path: Path) -> None:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, f"{places_to_json(send(ipc(tmp_path), 0).bucket_refs)}\n".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as told:
        places = places_from_json(told.readline())
    reading = Opened(version(0)[0], places, HostMemory())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in reading.checks(version(0)[0]):
        pass
    reading.confirm(version(0)[0])
    after = ipc(tmp_path)
    send(after, 1)
    assert not Path(places[0].lease).exists()
    assert holds(reading, 0), "it has it open"
    with pytest.raises(NotKept, match="given its memory up"):
        Opened(version(0)[0], places, HostMemory())
    reading.close()
    after.close()


def test_a_version_that_was_given_up_needs_no_memory_of_its_own(tmp_path: Path) -> None:
    here = ipc(tmp_path)
    for number in range(4):
        outgoing = here.begin(number)
        outgoing.put(version(number)[1][0])
        outgoing.discard()
    assert here.device_bytes == SIZES[0]
    assert holds(opened(send(here, 5)), 5)
    here.close()


def test_what_is_still_on_its_way_when_the_transport_is_closed_is_given_back(tmp_path: Path) -> None:
    here = ipc(tmp_path)
    outgoing = here.begin(0)
    outgoing.put(version(0)[1][0])
    memory = Path(os.fsdecode(outgoing._places[0].handle))
    assert memory.exists()
    here.close()
    with pytest.raises(RuntimeError, match="closed before this version was complete"):
        outgoing.commit(version(0)[0])
    outgoing.discard()
    assert not outgoing._set.buckets
    with pytest.raises(OSError):
        os.fstat(outgoing._set.lease._file)


@pytest.mark.parametrize("piece_bytes", [1, 1000, 4096, 1 << 20])
def test_what_is_checked_in_pieces_is_checked_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    number = 4096 // piece_bytes or 1
    manifest, buckets = version(0)
    for flipped in (None, 0, 2048, 4095):
        small = buckets[1].copy()
        if flipped is not None:
            small[flipped] ^= 1
        checks = bucket_checks(manifest, 1, 4096, lambda at, size, b=small: b[at : at + size], piece_bytes=piece_bytes)
        if flipped is None:
            assert len(list(checks)) >= number
        else:
            with pytest.raises(WeightSyncError, match="tensor c does not match"):
                list(checks)
    if piece_bytes == 1 << 20:
        monkeypatch.setattr("leeway.transports.device_ipc.PIECE_BYTES", piece_bytes)
        here = ipc(tmp_path)
        assert np.array_equal(asyncio.run(received(here, send(here, 0)))[0], buckets[0])
        here.close()


def test_an_audit_reads_what_its_own_process_shares(tmp_path: Path) -> None:
    class LikeCuda(HostMemory):
        def opened(self, place: DevicePlace) -> torch.Tensor:
            raise RuntimeError("a process cannot open what it shares itself")

    here = DeviceIpc(LikeCuda, longest_s=200.0, keep=2, parent=tmp_path)
    publications = [send(here, number) for number in range(4)]
    assert np.array_equal(asyncio.run(received(here, publications[2]))[0], version(2)[1][0])
    with pytest.raises(NotKept):
        asyncio.run(received(here, publications[0]))
    here.close()


def test_a_bucket_on_another_device_is_refused_by_name(tmp_path: Path) -> None:
    here = ipc(tmp_path)
    publication = send(here, 0)
    elsewhere = [replace(place, device="GPU-1") for place in publication.bucket_refs]
    with pytest.raises(
        WeightSyncError, match=r"bucket 1 of 3 is in memory of GPU-1, this engine computes on CPU-.*memory=host"
    ):
        Opened(publication.manifest, elsewhere, HostMemory())
    with pytest.raises(ValueError, match="in memory of GPU-1"):
        asyncio.run(here.fetch(Publication(publication.manifest, elsewhere), 0, np.empty(SIZES[0], np.uint8)))
    here.close()


@pytest.mark.parametrize(
    "text",
    ["3", "[3]", "[{}]", "[" * 100_000, "nothing", '[{"device": "GPU-1"}]'],
)
def test_places_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of buckets|Expecting value"):
        places_from_json(text)


@pytest.mark.parametrize(
    "change", [{"handle": 3}, {"handle": "xyz"}, {"num_bytes": "1"}, {"number": True}, {"more": 1}, {"lease": None}]
)
def test_a_place_takes_texts_and_numbers_only(change: dict[str, Any]) -> None:
    import json

    place = DevicePlace("GPU-1", b"\0handle", 7, 64, "/dev/shm/lease", 2)
    text = places_to_json([place])
    assert places_from_json(text) == [place]
    with pytest.raises(ValueError):
        places_from_json(json.dumps([json.loads(text)[0] | change]))


def test_a_place_of_other_bytes_than_were_published_is_refused(tmp_path: Path) -> None:
    here = ipc(tmp_path)
    publication = send(here, 0)
    first, *others = publication.bucket_refs
    for wrong in (replace(first, num_bytes=1 << 40), replace(first, offset=-64)):
        with pytest.raises(WeightSyncError, match="not what was published"):
            Opened(publication.manifest, [wrong, *others], HostMemory())
    link = tmp_path / "link"
    link.symlink_to(os.fsdecode(first.handle))
    with pytest.raises(WeightSyncError, match="bucket 1 of 3 cannot be opened"):
        Opened(publication.manifest, [replace(first, handle=os.fsencode(link)), *others], HostMemory())
    here.close()


def test_a_lease_ends_with_the_process_that_holds_it_and_never_begins_on_something_else(tmp_path: Path) -> None:
    writer = LeaseFile(tmp_path / "lease")
    reader = Lease(writer.path, writer.number)
    assert not writer.claim()
    reader.check()
    reader.end()
    assert writer.claim()
    with pytest.raises(NotKept):
        Lease(writer.path, writer.number - 1)
    other = Lease(writer.path, writer.number)
    writer.take_back()
    with pytest.raises(NotKept):
        other.check()
    del other  # its descriptor is still open: it reads until it says that it does not
    gc.collect()
    assert not writer.claim()
    writer.remove()


def test_where_it_is_chosen() -> None:
    on_gpu = ["cluster.device=cuda", "param_server.transport=ipc"]
    together, asked = "cluster.placement=together", "param_server.transport_options.memory=device"
    assert transport_options(load_config("quickstart", ["param_server.transport=ipc"])) == {"memory": "host"}
    assert transport_options(load_config("quickstart", on_gpu)) == {"memory": "host"}, "each has a GPU of its own"
    config = load_config("quickstart", [*on_gpu, together])
    assert transport_options(config) == {"memory": "device"}
    assert "no MIG" in TRANSPORTS["ipc"].needs(config)
    with pytest.raises(ConfigError, match=r"transport_options\.memory: got 'device', expected host, unless trainer"):
        load_config("quickstart", [*on_gpu, asked])
    with pytest.raises(ConfigError, match="one of host, device"):
        load_config("quickstart", ["param_server.transport=ipc", "param_server.transport_options.memory=gpu"])


def test_it_is_opened_by_its_option(tmp_path: Path) -> None:
    settings = TransportSettings(name="ipc", folder=tmp_path, options={"memory": "device"}, keep=2, timeout_s=7.0)
    transport = open_transport(settings)
    assert isinstance(transport, DeviceIpc)
    assert (transport.keep, transport._longest_s) == (2, 7.0)
    there = open_transport(settings)
    assert np.array_equal(asyncio.run(received(there, send(transport, 0)))[0], version(0)[1][0])
    transport.close()


# ------------------------------------------------------------------------------------------------------- on a GPU

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU_READER = "import torch" + READER.replace("HostMemory()", "device_memory(torch.device('cuda'))").replace(
    "HostMemory,", "device_memory,"
)


def cuda(folder: Path | None) -> DeviceMemory:
    return device_memory(torch.device("cuda"))


@pytest.mark.gpu
@on_a_gpu
def test_another_process_reads_a_gpus_memory_and_leaves_none_of_it_behind(tmp_path: Path) -> None:
    here = DeviceIpc(cuda, longest_s=200.0, parent=tmp_path)
    publication = send(here, 0)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reader = subprocess.Popen(
        [sys.executable, "-c", GPU_READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{publication.manifest.to_json()}\n{places_to_json(publication.bucket_refs)}\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "reads\n", "every byte was checked there"
    for number in range(1, 4):
        send(here, number)
    assert here.device_bytes == 3 * WHOLE
    reader.kill()
    reader.communicate()
    for number in range(4, 6):
        send(here, number)
    assert here.device_bytes == 2 * WHOLE
    assert np.array_equal(asyncio.run(received(here, send(here, 6)))[0], version(6)[1][0])
    here.close()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() < WHOLE, "nothing waits for a reader that is gone"


@pytest.mark.gpu
@on_a_gpu
def test_a_gpu_goes_by_its_uuid_and_opens_nothing_of_another(tmp_path: Path) -> None:
    memory = device_memory(torch.device("cuda"))
    assert memory.name == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    place = DevicePlace(memory.name, bytes(64), 64, 0, "", 1)
    with pytest.raises(RuntimeError, match="does not open it"):
        memory.opened(place)
