"""Weights in shared memory of the one machine on which trainer and engines run (on one GPU: `device_ipc.py`).

Rank 0 copies each bucket into a file in shared memory, once. An engine maps that file, checks it there and loads from
it: nothing is copied on the way, and the memory is the same for all engines. A file is never changed after it was
written; an engine that has it mapped keeps it, whatever happens to the trainer.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..weights import Manifest, Publication
from .device_ipc import DeviceIpc
from .device_memory import DeviceMemory, device_memory
from .files import read_whole
from .shared_memory import SharedFolder, bucket_name
from .transport import Held, TransportSettings


class Ipc:
    uses_held = False

    def __init__(self, *, keep: int = 1, parent: Path | None = None) -> None:
        """`parent`: of the folder for the files; None: /dev/shm."""
        self.keep = keep
        self._parent = parent
        self._folder: SharedFolder | None = None
        self._kept: list[tuple[str, int]] = []

    @classmethod
    def open(cls, settings: TransportSettings) -> Ipc | DeviceIpc:
        if settings.options.get("memory", "host") == "host":
            return cls(keep=settings.keep)
        return DeviceIpc(
            functools.partial(_device_memory, settings.device), longest_s=settings.timeout_s, keep=settings.keep
        )

    @property
    def memory_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._kept)

    def places(self, publication: Publication) -> Sequence[Path]:
        return [Path(ref) for ref in publication.bucket_refs]

    def begin(self, policy_version: int) -> _Outgoing:
        if self._folder is None:
            self._folder = SharedFolder(self._parent)
        return _Outgoing(self, self._folder)

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        await asyncio.to_thread(read_whole, Path(publication.bucket_refs[index]), into)
        return into.nbytes

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self._kept = []

    def _keep(self, name: str, num_bytes: int) -> None:
        assert self._folder is not None
        self._kept.append((name, num_bytes))
        for old, _ in self._kept[: -self.keep]:
            self._folder.remove_files(old)
        self._kept = self._kept[-self.keep :]


class _Outgoing:
    def __init__(self, ipc: Ipc, folder: SharedFolder) -> None:
        self._ipc = ipc
        self._folder = folder
        self._name = folder.new_name()
        self._sizes: list[int] = []

    def put(self, bucket: np.ndarray) -> None:
        np.copyto(self._folder.new_file(self._name, len(self._sizes), bucket.nbytes), bucket)
        self._sizes.append(bucket.nbytes)

    def commit(self, manifest: Manifest) -> Publication:
        folder = self._folder.path / self._name
        self._ipc._keep(self._name, sum(self._sizes))
        return Publication(manifest, [str(folder / bucket_name(index)) for index in range(len(self._sizes))])

    def discard(self) -> None:
        self._folder.remove_files(self._name)


def _device_memory(device: str, folder: Path | None) -> DeviceMemory:
    import torch  # here: a driver opens transports without it

    return device_memory(torch.device(device), folder)
