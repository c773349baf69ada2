"""How the ranks write: a limited number at a time. If one fails, all raise its one-line reason."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .shards import Written, is_of_first_copy, write_shard


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written: which rank, why, how much it had to write and how much space is free."""


def write_shards(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    *,
    rank: int,
    num_ranks: int,
    group: dist.ProcessGroup | None = None,
    max_writers: int = 0,
    by_machine: bool = False,
) -> list[Written] | None:
    """Each rank writes its own file (a collective over `group`); rank 0 gets what all of them wrote, in their order.

    At most `max_writers` ranks (0: all) write at a time: storage that many nodes share is faster with few writers than
    with all. `by_machine`: so many machines, each with all of its ranks. Raises `CheckpointWriteError` on every rank.
    Of tensors that are not sharded, rank 0 writes its copy; the states of generators belong to one rank each. Of
    several copies of the weights, the first one is written.
    """

    def is_own(name: str, tensor: torch.Tensor) -> bool:
        return is_of_first_copy(tensor) if isinstance(tensor, DTensor) else rank == 0 or name.startswith("rng.")

    own = {name: tensor for name, tensor in tensors.items() if is_own(name, tensor)}
    written: list[Written] = []

    def write() -> None:
        written.append(write_shard(directory, own, rank=rank))

    machines: list[Any] = [None] * num_ranks
    if max_writers and by_machine:
        dist.all_gather_object(machines, socket.gethostname(), group=group)
    turns = turns_of(machines if by_machine else range(num_ranks), max_writers)
    for turn in range(1 + max(turns)):
        is_mine = turns[rank] == turn
        on_all_ranks(write if is_mine else None, directory, group, num_bytes=_num_bytes(own))
    of_all: list[Any] | None = [None] * num_ranks if rank == 0 else None
    dist.gather_object(written[0], of_all, dst=0, group=group)
    return of_all


def turns_of(writers: Sequence[Any], max_writers: int) -> list[int]:
    """In which turn each rank writes; `writers`: its machine, or itself; at most `max_writers` of them in one, 0: all.

    Neighbours, which share a node, are in different turns.
    """
    order = list(dict.fromkeys(writers))
    num_turns = -(-len(order) // max_writers) if max_writers else 1
    return [order.index(writer) % num_turns for writer in writers]


def on_all_ranks(
    work: Callable[[], None] | None,
    directory: Path,
    group: dist.ProcessGroup | None = None,
    *,
    num_bytes: int | None = None,
) -> None:
    """Run `work` (None: nothing to do here) on each rank and wait for all (a collective). One failure fails all.

    `num_bytes`: how much it has to write, for the message.
    """
    failure: Exception | None = None
    try:
        if work is not None:
            work()
    except Exception as error:
        failure = error
    causes: list[tuple[str, int | None] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(causes, (_cause_of(failure), num_bytes) if failure else None, group=group)
    for rank, cause in enumerate(causes):
        if cause is not None:
            raise could_not_write(directory, f"rank {rank}", *cause) from failure


def could_not_write(directory: Path, who: str, cause: str, num_bytes: int | None = None) -> CheckpointWriteError:
    """In one line; `num_bytes`: how much there was to write."""
    needed = "" if num_bytes is None else f"; it had to write {num_bytes / 1e6:.1f} MB"
    return CheckpointWriteError(
        f"checkpoint {directory}: {who} could not write it: {cause}{needed}, {_room(directory)}; "
        "earlier checkpoints are unchanged: free some space, then continue with checkpoint.resume=auto"
    )


def _cause_of(error: BaseException) -> str:
    """The operating system's message from the exception chain: libraries wrap it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return " ".join(str(found).split()) if found else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _room(directory: Path) -> str:
    while not directory.exists():
        directory = directory.parent
    return f"{shutil.disk_usage(directory).free / 1e6:.1f} MB are free at {directory}"


def _num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())
