"""Sharded checkpoints to Hugging Face folders, in one process and without a run: what `leeway convert` does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint import load as dcp_load  # pyright: ignore[reportPrivateImportUsage]

from ..weights import plan_buckets
from .checkpoint import STATE_FILE, CheckpointError, read_state
from .export import HFWriter

PREFIX = "model.lm."
PART_BYTES = 2**31
"""How much of a checkpoint is read at a time; also the size of one output file."""


def convert(path: Path, *, base_model: str | None = None, dtype: str | None = None) -> Iterator[tuple[Path, bool]]:
    """Give every checkpoint at or below `path` an hf/ folder next to its dcp/; yields (folder, whether it was written).

    `path`: a run's folder, a checkpoint, or a folder in between or within. A checkpoint that has an hf/ is skipped.
    `base_model`: folder with config and tokenizer, for when the checkpoint does not name it or it has moved.
    `dtype` (default float32, as trained). Raises `CheckpointError`, also for other frameworks' checkpoints, by name.
    """
    steps = _steps(path)
    if not steps:
        raise CheckpointError(_what_it_is(path))
    for step in steps:
        target = step / "hf"
        if target.exists():
            yield target, False
            continue
        read_state(step / "dcp")
        base = _base_of(step, base_model)
        writer = HFWriter(base, target, dtype=getattr(torch, dtype or "float32"))
        for weights in _weights(step / "dcp"):
            writer.add(weights)
        if missing := writer.missing():
            writer.abandon()
            raise CheckpointError(
                f"{step}: {len(missing)} tensors that {base} has are not in the checkpoint, the first is {missing[0]}; "
                "it belongs to another model, or was saved by a version of Leeway that left out buffers"
            )
        writer.finish()
        yield target, True


def _steps(path: Path) -> list[Path]:
    """Checkpoints in, at or around `path`, except those still being written (or left half-written)."""
    for folder in (path, path.parent):
        if (folder / "dcp" / STATE_FILE).exists():
            return [folder]
    found = {p.parents[1] for p in path.rglob(f"dcp/{STATE_FILE}")}
    return sorted(f for f in found if not any(part.endswith(".partial") for part in f.parts))


def _what_it_is(path: Path) -> str:
    if not path.exists():
        return f"{path}: nothing there; expected a run's folder or a checkpoint"
    megatron = [*path.rglob("latest_checkpointed_iteration.txt"), *path.rglob("mp_rank_*")]
    if megatron or re.fullmatch(r"iter_\d+|mp_rank_\d+.*", path.name):
        return f"{path}: a Megatron checkpoint, whose sharding is not supported; convert it with Megatron's own tools"
    return f"{path}: no sharded checkpoint in it; expected a folder like checkpoints/step-000050 with dcp/{STATE_FILE}"


def _base_of(step: Path, base_model: str | None) -> str:
    if base_model is not None:
        return base_model
    note = step / STATE_FILE
    base = json.loads(note.read_text()).get("base_model") if note.exists() else None
    if base is None or (Path(base).is_absolute() and not (Path(base) / "config.json").exists()):
        raise CheckpointError(
            f"{step}: the model's config is missing ({base or 'not noted'}); give --base-model FOLDER"
        )
    return base


def _weights(directory: Path) -> Iterator[dict[str, torch.Tensor]]:
    """All weights of a checkpoint, `PART_BYTES` of them at a time."""
    reader = FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    weights = [
        ([name], entry.properties.dtype, entry.size)  # type: ignore[union-attr]
        for name, entry in saved.items()
        if name.startswith(PREFIX)
    ]
    for plan in plan_buckets(weights, PART_BYTES):
        tensors = {place.names[0]: torch.empty(place.shape, dtype=place.dtype) for place in plan.places}
        dcp_load(tensors, storage_reader=reader, no_dist=True)
        yield {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        del tensors
