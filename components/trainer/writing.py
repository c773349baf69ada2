"""How the ranks write: a limited number at a time; if one of them fails, all of them raise its one-line reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint import save as dcp_save  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.api import CheckpointException


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written: which rank, why, how much it had to write and how much space is free."""


def write_shards(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    *,
    rank: int,
    group: dist.ProcessGroup | None = None,
    max_writers: int = 0,
) -> None:
    """This rank's shards with torch.distributed.checkpoint (a collective over `group`).

    Raises `CheckpointWriteError` on every rank. Torch's own exception is not an `Exception`: no handler would catch it.
    """
    writer = _InTurns(directory, rank=rank, group=group, max_writers=max_writers)
    try:
        dcp_save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        failed, (cause, _) = min(error.failures.items())
        raise CheckpointWriteError(_in_one_line(directory, failed, cause, _num_bytes(tensors))) from None


def on_all_ranks(work: Callable[[], None] | None, directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Run `work` (None: nothing to do here) on each rank and wait for all (a collective). One failure fails all."""
    failure: Exception | None = None
    try:
        if work is not None:
            work()
    except Exception as error:
        failure = error
    causes: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(causes, _cause_of(failure) if failure else None, group=group)
    for rank, cause in enumerate(causes):
        if cause is not None:
            raise CheckpointWriteError(_in_one_line(directory, rank, cause)) from failure


class _InTurns(FileSystemWriter):
    """Ranks write in turns: storage that many nodes share is faster with few writers than with all."""

    def __init__(self, directory: Path, *, rank: int, group: dist.ProcessGroup | None, max_writers: int) -> None:
        super().__init__(directory, single_file_per_rank=True, sync_files=True)
        self._rank, self._group = rank, group
        num_ranks = dist.get_world_size(group)
        self._num_turns = -(-num_ranks // max_writers) if max_writers else 1

    def write_data(self, plan: Any, planner: Any) -> Any:
        result: Any = None
        failure: BaseException | None = None
        for turn in range(self._num_turns):
            if self._rank % self._num_turns == turn:  # neighbours, which share a node, in different turns
                try:
                    result = super().write_data(plan, planner)
                except BaseException as error:  # raised after all turns; otherwise the other ranks would wait for ever
                    failure = error
            if turn < self._num_turns - 1:
                dist.barrier(self._group)
        if failure is not None:
            raise failure
        return result


def _in_one_line(directory: Path, rank: int, cause: BaseException | str, num_bytes: int | None = None) -> str:
    needed = "" if num_bytes is None else f"; it had to write {num_bytes / 1e6:.1f} MB"
    return (
        f"checkpoint {directory}: rank {rank} could not write it: {_cause_of(cause)}{needed}, {_room(directory)}; "
        "earlier checkpoints are unchanged: free some space, then continue with checkpoint.resume=auto"
    )


def _cause_of(error: BaseException | str) -> str:
    """The operating system's message from the exception chain: torch reports failed writes as C++ errors."""
    if isinstance(error, str):
        return error
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return " ".join(str(found).split()) if found else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _room(directory: Path) -> str:
    while not directory.exists():
        directory = directory.parent
    return f"{shutil.disk_usage(directory).free / 1e6:.1f} MB are free at {directory}"


def _num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(_local(t).numel() * t.element_size() for t in tensors.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
