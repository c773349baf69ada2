"""A trainer's state on disk, sharded: what the next process needs to go on as if nothing had happened.

    DIR/*.distcp, DIR/.metadata    torch.distributed.checkpoint: every rank writes its own shards
    DIR/state.json                 written last: policy version, ranks, what the objective has learned, sizes of the
                                   files, SHA-256 of .metadata

Weights, AdamW's moments and step counts are tensors under their parameters' names, so any number of ranks may load what
any number saved. The learning-rate schedule has no state of its own: it follows the policy version. Torch pickles
`.metadata`; it is checked against the hash in state.json before anything reads it, and nothing else here is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint import load as dcp_load  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint import save as dcp_save  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

FORMAT = 1
STATE_FILE = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be loaded: it is incomplete, was changed, or belongs to another model."""


def save_state(
    directory: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    rank: int,
    num_ranks: int,
    policy_version: int,
    objective: dict[str, float],
) -> None:
    """Write all of it into `directory` (a collective); on disk, not merely in caches, when the call returns.

    Complete once state.json is there. Raises OSError, or torch's CheckpointException, when it cannot be written.
    """
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / STATE_FILE).unlink(missing_ok=True)
    dist.barrier()
    state = _tensors(model, optimizer) | {_rng_key(rank): torch.get_rng_state()}
    dcp_save(state, storage_writer=FileSystemWriter(directory, single_file_per_rank=True, sync_files=True))
    if rank == 0:
        written = {
            "format": FORMAT,
            "policy_version": policy_version,
            "num_ranks": num_ranks,
            "objective": objective,
            "metadata_sha256": _sha256(directory / ".metadata"),
            "bytes": {p.name: p.stat().st_size for p in sorted(directory.glob("*.distcp"))},
        }
        write_durably(directory / STATE_FILE, json.dumps(written) + "\n")
    dist.barrier()


def load_state(directory: Path, *, model: nn.Module, optimizer: torch.optim.AdamW, rank: int) -> dict[str, Any]:
    """Put what `save_state` wrote into model, optimizer and generator (a collective); returns what state.json says.

    Raises `CheckpointError` before anything is changed.
    """
    state = read_state(directory)
    tensors = _tensors(model, optimizer)
    reader = FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    _check_same_model(directory, tensors, saved)
    if (key := _rng_key(rank)) in saved:  # a rank that did not exist then keeps its seed
        tensors[key] = torch.empty_like(torch.get_rng_state())
    dcp_load(tensors, storage_reader=reader)
    if key in tensors:
        torch.set_rng_state(tensors[key])
    return state


def read_state(directory: Path) -> dict[str, Any]:
    """What state.json says, after checking that the files are those that were written."""
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


def write_durably(path: Path, text: str) -> None:
    """Replace `path` in one step; after a crash there is the old content or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make what was created, renamed or removed in `directory` survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name, as the live objects. A parameter that had no gradient yet has zero moments."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            moments["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        tensors[f"model.{name}"] = parameter.detach()
        tensors |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
    return tensors


def _check_same_model(directory: Path, tensors: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found = {
        name: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in saved.items()
        if not name.startswith("rng.")
    }
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different:
        name = different[0]
        raise CheckpointError(
            f"checkpoint {directory} is of another model: {len(different)} tensors differ, first {name}: "
            f"{found.get(name, 'absent')} in the checkpoint, {expected.get(name, 'absent')} in the model"
        )


def _rng_key(rank: int) -> str:
    return f"rng.{rank}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
