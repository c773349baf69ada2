"""Weights that Trinity-RFT and veRL saved with FSDP: `model_world_size_4_rank_0.pt`, ..., one file for each rank.

They are torch's files, which hold a pickle. Only torch's restricted reader opens them, with the classes of DTensor and
no others: a file that asks for anything else is refused, and nothing of it runs. Tensors stay in the files until they
are put together. These files have no checksums: a byte that was flipped is not found.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from .checkpoint import CheckpointError

FIRST = "model_world_size_*_rank_0.pt"


def fsdp_folders(path: Path) -> list[Path]:
    """Folders in, at or around `path` that hold a policy's weights; a critic's are left out."""
    for folder in (path, path.parent):
        if any(folder.glob(FIRST)):
            return [folder]
    return sorted({file.parent for file in path.rglob(FIRST) if file.parent.name != "critic"})


class FsdpWeights:
    """The tensors of one checkpoint, by the model's own names. Raises CheckpointError for files that do not fit."""

    def __init__(self, folder: Path) -> None:
        found = [re.fullmatch(r"model_world_size_(\d{1,5})_rank_0\.pt", file.name) for file in folder.glob(FIRST)]
        sizes = [int(match[1]) for match in found if match]
        if len(sizes) != 1:
            raise CheckpointError(f"{folder}: got the files of {len(sizes)} runs, expected those of one world size")
        self._folder, self._world = folder, sizes[0]
        self._parts: list[dict[str, torch.Tensor]] = []
        while not self._is_complete():
            rank = len(self._parts)
            if rank == self._world:
                raise CheckpointError(f"{folder}: the parts of {self._world} ranks do not make up the whole tensors")
            self._parts.append(self._rank(rank))
            if self._parts[rank].keys() != self._parts[0].keys():
                raise CheckpointError(f"{folder}: ranks 0 and {rank} have tensors of different names")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._parts[0].items()}

    def whole(self, name: str) -> torch.Tensor:
        """One tensor, put together from the ranks of a replica."""
        parts = [shard[name] for shard in self._parts]
        dim = _sharded_dim(parts[0], name)
        if dim is None:
            return parts[0]._local_tensor if isinstance(parts[0], DTensor) else parts[0]
        tensor = torch.cat([part._local_tensor for part in parts if isinstance(part, DTensor)], dim=dim)
        if tuple(tensor.shape) != self.shapes[name]:
            got, expected = tuple(tensor.shape), self.shapes[name]
            raise CheckpointError(f"{self._folder}: the parts of {name} make up {got}, expected {expected}")
        return tensor

    def _is_complete(self) -> bool:
        """Whether the ranks that were read hold everything: those after them, if any, are replicas."""
        if not self._parts:
            return False
        for name, tensor in self._parts[0].items():
            dim = _sharded_dim(tensor, name)
            if dim is not None:
                own = [part[name] for part in self._parts]
                rows = sum(part._local_tensor.shape[dim] for part in own if isinstance(part, DTensor))
                if rows < tensor.shape[dim]:
                    return False
            elif self._world > 1 and not isinstance(tensor, DTensor) and tensor.numel() > 1:
                raise CheckpointError(
                    f"{self._folder}: {name} is not said to be sharded or whole; it was saved otherwise"
                )
        return True

    def _rank(self, rank: int) -> dict[str, torch.Tensor]:
        file = self._folder / f"model_world_size_{self._world}_rank_{rank}.pt"
        try:
            _check_is_stored(file)
            with _only_dtensors():
                state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            if not isinstance(state, dict) or not all(
                isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
            ):
                raise CheckpointError(f"{file}: expected tensors by name")
            for name, tensor in state.items():
                _sharded_dim(tensor, name)
        except CheckpointError:
            raise
        except Exception as error:  # a crafted file can make the reader raise anything
            why = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{file} cannot be read as weights: {type(error).__name__}: {why}") from None
        return dict(state)


def _sharded_dim(tensor: torch.Tensor, name: str) -> int | None:
    """The dimension that the ranks of a replica share; None where each has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    *outer, last = tensor.placements
    if not all(type(placement) is Replicate for placement in outer) or type(last) not in (Shard, Replicate):
        raise CheckpointError(f"{name} is placed as {tensor.placements}, expected what FSDP does")
    if type(last) is Replicate:
        return None
    assert isinstance(last, Shard)
    dim = last.dim
    if not 0 <= dim < min(tensor.ndim, tensor._local_tensor.ndim):
        raise CheckpointError(f"{name} of shape {tuple(tensor.shape)} is sharded along dimension {dim}")
    return dim


def _check_is_stored(file: Path) -> None:
    """Refuse anything but torch's own archive, whose entries are not compressed: they take no more than the file."""
    if not zipfile.is_zipfile(file):
        raise CheckpointError(f"{file} is no file of torch.save, or is cut short")
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise CheckpointError(f"{file} has compressed entries, which torch does not write")


@contextmanager
def _only_dtensors() -> Iterator[None]:
    """The restricted reader may build what torch itself allows of DTensors. What other libraries allow it is not."""
    allowed: list[Any] = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([each for each in allowed if each.__module__.startswith("torch.distributed.")])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)
