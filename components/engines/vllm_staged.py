"""One version as it lies in shared memory, checked, or in memory of this device, seen from vLLM's process."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..transports.device_memory import Opened, device_memory, places_from_json
from ..transports.shared_memory import bucket_name
from ..weights import Manifest, read_bucket
from .vllm_worker_env import MANIFEST, PLACES


@dataclass(frozen=True)
class Staged:
    """`buckets`: uint8, of the manifest's sizes. `opened`: of a version on this device, until `close`; `checks` are
    still to be done of it.
    """

    manifest: Manifest
    buckets: list[torch.Tensor]
    opened: Opened | None = None
    checks: Iterator[None] = field(default_factory=lambda: iter(()))

    @classmethod
    def in_folder(cls, folder: Path, device: torch.device) -> Staged:
        manifest = Manifest.from_json((folder / MANIFEST).read_text())
        if (folder / PLACES).exists():
            opened = Opened(manifest, places_from_json((folder / PLACES).read_text()), device_memory(device))
            return cls(manifest, opened.tensors, opened, opened.checks(manifest))
        return cls(manifest, [_mapped(folder / bucket_name(i)) for i in range(len(manifest.bucket_bytes))])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By published name, as views."""
        for index, bucket in enumerate(self.buckets):
            yield from read_bucket(self.manifest, index, bucket)

    def confirm(self) -> None:
        """What was copied from this device, or compared with it, was what had been checked."""
        if self.opened is not None:
            self.opened.confirm(self.manifest)

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()


def _mapped(path: Path) -> torch.Tensor:
    """A file's bytes, uint8. They stay mapped as long as a tensor of them is held, whatever happens to the file."""
    if not path.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    with path.open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
