"""A trainer's state on disk, sharded: everything that the next process needs to resume exactly.

    DIR/*.distcp, DIR/.metadata    torch.distributed.checkpoint: every rank writes its own shards
    DIR/state.json                 written last: policy version, ranks, the objective's own state, sizes of the
                                   files, SHA-256 of .metadata

    take_state (copies out)  ->  write_state (beside training, if that was a copy)        load_state

Weights, buffers, AdamW's moments and step counts are tensors under the model's own names for them, so any number of
ranks may load what any number saved. The learning-rate schedule has no state of its own: it follows the policy version.
Torch pickles `.metadata`; it is checked against the hash in state.json before anything reads it, and nothing else here
is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint import load as dcp_load  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .durable import write_durably
from .rng import rng_state, set_rng_state
from .sharding import reshard
from .tensors import by_tensor, saved_tensors
from .writing import on_all_ranks, write_shards

FORMAT = 1
STATE_FILE = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be loaded: it is incomplete, was changed, or belongs to another model."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that one rank has to write. `about`: the content of state.json."""

    tensors: dict[str, torch.Tensor]
    about: dict[str, Any]
    rank: int
    num_ranks: int


Parts = Mapping[str, tuple[nn.Module, torch.optim.AdamW]]
"""The trained models with their optimizers, keyed by the prefix of their parameters' names ("": the policy)."""


def take_state(
    *,
    parts: Parts,
    device: torch.device,
    rank: int,
    num_ranks: int,
    policy_version: int,
    objective: dict[str, float],
    copy: bool,
) -> TrainerState:
    """The current state of this rank; with `copy`, a snapshot in main memory that training does not change.

    A copy is as large as this rank's share of weights and optimizer state: 12 bytes per parameter, over the ranks.
    """
    tensors = _tensors(parts)
    if copy:
        tensors = {name: _copied(tensor) for name, tensor in tensors.items()}
    tensors |= {f"{_rng_prefix(rank)}{name}": state for name, state in rng_state(device).items()}
    about = {"format": FORMAT, "policy_version": policy_version, "num_ranks": num_ranks, "objective": objective}
    return TrainerState(tensors=tensors, about=about, rank=rank, num_ranks=num_ranks)


def write_state(
    directory: Path, state: TrainerState, *, group: dist.ProcessGroup | None = None, max_writers: int = 0
) -> None:
    """Write all of it into `directory` (a collective over `group`). It is on disk, not only in caches, on return.

    At most `max_writers` ranks write at a time (0: all of them). Complete once state.json is there. Raises
    `CheckpointWriteError` on every rank when one of them cannot write.
    """

    def begin() -> None:
        if state.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / STATE_FILE).unlink(missing_ok=True)

    def complete() -> None:
        if state.rank == 0:
            files = {
                "metadata_sha256": _sha256(directory / ".metadata"),
                "bytes": {p.name: p.stat().st_size for p in sorted(directory.glob("*.distcp"))},
            }
            write_durably(directory / STATE_FILE, json.dumps(state.about | files) + "\n")

    on_all_ranks(begin, directory, group)
    write_shards(directory, state.tensors, rank=state.rank, group=group, max_writers=max_writers)
    on_all_ranks(complete, directory, group)


def load_state(directory: Path, *, parts: Parts, device: torch.device, rank: int) -> dict[str, Any]:
    """Load what `write_state` wrote into models, optimizers and generators (a collective); returns state.json.

    Raises `CheckpointError` before anything is changed.
    """
    state = read_state(directory)
    tensors = _tensors(parts)
    reader = FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    _check_same_model(directory, tensors, saved)
    generators = {  # a rank that did not exist when it was saved keeps its seed
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(_rng_prefix(rank)) and isinstance(entry, TensorStorageMetadata)
    }
    dcp_load(tensors | generators, storage_reader=reader)
    set_rng_state({name.removeprefix(_rng_prefix(rank)): value for name, value in generators.items()}, device)
    return state


def read_state(directory: Path) -> dict[str, Any]:
    """The content of state.json, after checking that the files are the ones that were written."""
    try:
        state = json.loads((directory / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {directory}: no readable {STATE_FILE}: it was never completed") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {directory}: format {state.get('format')}, expected {FORMAT}")
    for name, size in state["bytes"].items():
        path = directory / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise CheckpointError(f"checkpoint {directory}: {name} has {found} bytes, {size} were written")
    if not (directory / ".metadata").exists() or _sha256(directory / ".metadata") != state["metadata_sha256"]:
        raise CheckpointError(f"checkpoint {directory}: .metadata does not match its SHA-256 in {STATE_FILE}")
    return state


def _tensors(parts: Parts) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name, as the live objects. A parameter that had no gradient yet has zero moments.

    Tied tensors are there once, under their first name.
    """
    tensors: dict[str, torch.Tensor] = {}
    for prefix, (model, optimizer) in parts.items():
        # After a forward pass alone (a canary) FSDP leaves the root's weights whole, in parameters that the optimizer
        # does not know: their moments would be saved as zeros.
        reshard(model)
        known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for tensor, (name, *_) in by_tensor(saved_tensors(model)).items():
            tensors[f"model.{prefix}{name}"] = tensor.detach()
            if not isinstance(tensor, nn.Parameter):
                continue  # a buffer, which is not trained
            assert tensor in known, f"{name} is not the optimizer's"
            moments = optimizer.state[tensor]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                moments["exp_avg"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
                moments["exp_avg_sq"] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
            tensors |= {f"optimizer.{prefix}{name}.{key}": value for key, value in moments.items()}
    return tensors


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """In main memory, sharded as before."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


def _check_same_model(directory: Path, tensors: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
    buffers = {name for name in tensors if name.startswith("model.") and f"optimizer{name[5:]}.step" not in tensors}
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found = {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in saved.items()
        if not name.startswith("rng.")
    }
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different and all(name in buffers and name not in found for name in different):
        raise CheckpointError(
            f"checkpoint {directory} holds none of the model's {len(different)} buffers (the first is "
            f"{different[0]}): it was saved by a version of Leeway that left them out; train again from model.path"
        )
    if different:
        name = different[0]
        raise CheckpointError(
            f"checkpoint {directory} belongs to another model: {len(different)} tensors differ, first {name}: "
            f"{found.get(name, 'absent')} in the checkpoint, {expected.get(name, 'absent')} in the model"
        )


def _rng_prefix(rank: int) -> str:
    return f"rng.{rank}."


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
