"""One version as it lies in shared memory, checked, or in memory of this device, seen from vLLM's process."""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator
from pathlib import Path

import torch

from ..transports.device_memory import PIECE_BYTES, Opened, device_memory, places_from_json
from ..transports.shared_memory import bucket_name
from ..weights import Manifest, read_bucket
from .slices import Slices
from .vllm_worker_env import MANIFEST, PLACES


class Staged:
    """Of a version on this device, `checks` are still to be done; it is open until `close`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.manifest = manifest = Manifest.from_json((folder / MANIFEST).read_text())
        self.checks = Slices()
        self._device = device
        self._opened: Opened | None = None
        self._mapped: list[torch.Tensor] = []
        if (folder / PLACES).exists():
            self._opened = Opened(manifest, places_from_json((folder / PLACES).read_text()), device_memory(device))
            self.checks = Slices(self._opened.checks(manifest))
        else:
            self._mapped = [_mapped(folder / bucket_name(i)) for i in range(len(manifest.bucket_bytes))]

    @property
    def buckets(self) -> list[torch.Tensor]:
        """uint8"""
        return self._mapped if self._opened is None else self._opened.tensors

    @property
    def is_on_device(self) -> bool:
        return all(bucket.device.type == self._device.type for bucket in self.buckets)

    def fetched(self) -> Generator[None, None, dict[str, torch.Tensor]]:
        """The tensors on this device, copied piece by piece. Whoever proves a load compares it with those of before:
        nobody has checked these.
        """
        tensors = {}
        for index, bucket in enumerate(self.buckets):
            here = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            for start in range(0, bucket.nbytes, PIECE_BYTES):
                here[start : start + PIECE_BYTES].copy_(bucket[start : start + PIECE_BYTES])
                yield
            tensors |= dict(read_bucket(self.manifest, index, here))
        return tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By published name, as views."""
        for index, bucket in enumerate(self.buckets):
            yield from read_bucket(self.manifest, index, bucket)

    def confirm(self) -> None:
        """What was copied from this device, or compared with it, was what had been checked."""
        if self._opened is not None:
            self._opened.confirm(self.manifest)

    def close(self) -> None:
        """Whoever has tensors of it has let go of them."""
        self.checks, self._mapped = Slices(), []
        if self._opened is not None:
            self._opened.close()


def _mapped(path: Path) -> torch.Tensor:
    """A file's bytes, uint8. They stay mapped as long as a tensor of them is held, whatever happens to the file."""
    if not path.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    with path.open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
