"""Weights in memory of the one device on which trainer and engine compute: in the pause, they do not leave it.

    rank 0, beside training:   bucket --copy--> memory of the device        one set of buckets for each version
    an engine, ahead:          open, read into main memory, check           beside generation
    the pause:                 copy from the device's memory to itself
    after:                     read back what it computes with; close

Sets of buckets are used again: memory that another process has open must not be freed. A set that a version has left
is free when no engine reads it (`leases.py`); until then the next version gets another set, so publishing waits for no
engine. After `longest_s` a set is taken back from an engine that reads it: it is alive, and stands still.

The checksum is that of the trainer's copy in main memory, so it covers both copies. It is checked on a copy in main
memory too: no GPU computes xxh3, or has to be trusted to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..weights import Manifest, Publication
from .device_memory import PIECE_BYTES, DeviceMemory
from .leases import Lease, LeaseFile
from .shared_memory import SharedFolder
from .transport import DevicePlace, Held

Open = Callable[[Path | None], DeviceMemory]
"""The device's memory in this process, and the folder for what a writer keeps in files (None: of a reader)."""


class DeviceIpc:
    """`longest_s`: how long an engine may read a version that a newer one has replaced."""

    uses_held = False
    memory_bytes = 0

    def __init__(self, device: Open, *, longest_s: float, keep: int = 1, parent: Path | None = None) -> None:
        self.keep = keep
        self._open, self._longest_s, self._parent = device, longest_s, parent
        self._folder: SharedFolder | None = None
        self._device: DeviceMemory | None = None
        self._kept: list[_Set] = []
        self._replaced: list[_Set] = []
        self._num_sets = 0

    @property
    def device_bytes(self) -> int:
        return sum(memory.nbytes for one in (*self._kept, *self._replaced) for memory in one.buckets)

    def places(self, publication: Publication) -> list[DevicePlace]:
        return publication.bucket_refs

    def begin(self, policy_version: int) -> _Outgoing:
        if self._folder is None:
            folder = SharedFolder(self._parent)
            try:
                self._device = self._open(folder.path)
            except BaseException:
                folder.remove()
                raise
            self._folder = folder
        return _Outgoing(self, self._free_set())

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        """Into main memory: for audits, and engines that compute somewhere else in this process."""
        await asyncio.to_thread(self._read, publication.bucket_refs[index], into)
        return into.nbytes

    def close(self) -> None:
        """What an engine still reads stays, until this process ends."""
        for one in (*self._kept, *self._replaced):
            if one.lease.claim():
                one.free()
        self._kept, self._replaced, self._device = [], [], None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _read(self, place: DevicePlace, into: np.ndarray) -> None:
        if place.num_bytes != into.nbytes:
            raise ValueError(f"the bucket has {place.num_bytes} bytes, expected {into.nbytes}")
        device = self._device or self._open(None)
        if place.device != device.name:
            raise ValueError(f"the bucket is in memory of {place.device}, this process computes on {device.name}")
        lease = Lease(Path(place.lease), place.number)
        try:
            memory = self._own(place)  # CUDA does not open what the same process shares
            memory = device.opened(place) if memory is None else memory
            for start in range(0, into.nbytes, PIECE_BYTES):
                piece = into[start : start + PIECE_BYTES]
                np.copyto(piece, device.read(memory, start, piece.nbytes))
            lease.check()
            del memory  # before the lease ends
        finally:
            lease.end()

    def _own(self, place: DevicePlace) -> Any:
        for one in (*self._kept, *self._replaced):
            for memory, (handle, offset) in zip(one.buckets, one.shared, strict=True):
                if str(one.lease.path) == place.lease and (handle, offset) == (place.handle, place.offset):
                    return memory
        return None

    def _free_set(self) -> _Set:
        for one in self._replaced:
            if one.lease.claim():
                self._replaced.remove(one)
                return one
        for one in self._replaced:
            if time.monotonic() - one.replaced_at > self._longest_s:
                self._replaced.remove(one)
                one.lease.take_back()
                return one
        assert self._folder is not None
        assert self._device is not None
        self._num_sets += 1
        return _Set(self._device, LeaseFile(self._folder.path / f"{self._num_sets:05d}.lease"))

    def _keep(self, one: _Set) -> None:
        if self._folder is None:
            raise RuntimeError("the transport was closed before this version was complete")
        self._kept.append(one)
        while len(self._kept) > self.keep:
            self._give_back(self._kept.pop(0))
        # One is for the next version. What else nobody reads was for an engine that was slow once.
        for other in self._replaced[:-1]:
            if other.lease.claim():
                self._replaced.remove(other)
                other.free()

    def _give_back(self, one: _Set) -> None:
        if self._folder is None:
            one.free()  # nobody was told of it
            return
        one.replaced_at = time.monotonic()
        self._replaced.append(one)


class _Set:
    """Memory for the buckets of one version, and how others open it."""

    def __init__(self, device: DeviceMemory, lease: LeaseFile) -> None:
        self._device, self.lease = device, lease
        self.buckets: list[Any] = []
        self.shared: list[tuple[bytes, int]] = []
        self.replaced_at = 0.0

    def fill(self, index: int, bucket: np.ndarray) -> DevicePlace:
        if index < len(self.buckets) and self.buckets[index].nbytes != bucket.nbytes:
            self._free_from(index)
        if index == len(self.buckets):
            memory = self._device.new(bucket.nbytes)
            self.shared.append(self._device.share(memory))
            self.buckets.append(memory)
        self._device.fill(self.buckets[index], bucket)
        handle, offset = self.shared[index]
        return DevicePlace(
            device=self._device.name,
            handle=handle,
            num_bytes=bucket.nbytes,
            offset=offset,
            lease=str(self.lease.path),
            number=self.lease.number,
        )

    def free(self) -> None:
        self._free_from(0)
        self.lease.remove()

    def _free_from(self, index: int) -> None:
        while len(self.buckets) > index:
            self.shared.pop()
            self._device.free(self.buckets.pop())


class _Outgoing:
    def __init__(self, transport: DeviceIpc, one: _Set) -> None:
        self._transport, self._set = transport, one
        self._places: list[DevicePlace] = []

    def put(self, bucket: np.ndarray) -> None:
        self._places.append(self._set.fill(len(self._places), bucket))

    def commit(self, manifest: Manifest) -> Publication:
        self._transport._keep(self._set)
        return Publication(manifest, self._places)

    def discard(self) -> None:
        self._transport._give_back(self._set)
