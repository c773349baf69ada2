"""Sharded checkpoints to Hugging Face folders, in one process and without a run: what `leeway convert` does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..config.engines import is_local_path
from ..integrity import DamagedFileError
from ..weights import plan_buckets
from .checkpoint import STATE_DIR, STATE_FILE, CheckpointError, read_about, read_state, read_tensors
from .export import HFWriter
from .fsdp_files import FsdpWeights, fsdp_folders
from .shards import Index, load_rows

PREFIX = "model.lm."
PART_BYTES = 2**31
"""How much of a checkpoint is read at a time; also the size of one output file."""


def convert(path: Path, *, base_model: str | None = None, dtype: str | None = None) -> Iterator[tuple[Path, bool]]:
    """Give every checkpoint at or below `path` an hf/ folder next to its state; yields (folder, was it written).

    `path`: a run's folder, a checkpoint, or a folder in between or within. A checkpoint that has an hf/ is skipped.
    `base_model`: folder with config and tokenizer, for when the checkpoint does not name it or it has moved.
    `dtype` (default float32, as trained). Those that Trinity-RFT and veRL saved with FSDP are read too. Raises
    `CheckpointError`, also for other frameworks' checkpoints, by name.
    """
    steps = _steps(path)
    others = [] if steps else fsdp_folders(path)
    if not steps and not others:
        raise CheckpointError(_what_it_is(path))
    for source in steps or others:
        target = (source.parent if source.name == "actor" else source) / "hf"
        if target.exists():
            yield target, False
            continue
        (export_fsdp if others else export)(source, target, base_model=base_model, dtype=dtype)
        yield target, True


def export_fsdp(folder: Path, target: Path, *, base_model: str | None = None, dtype: str | None = None) -> None:
    """As `export`, of the files that Trinity-RFT's and veRL's ranks saved. Config and tokenizer are beside them."""
    weights = FsdpWeights(folder)
    base = base_model or str(folder / "huggingface")
    if base_model is None and not (folder / "huggingface" / "config.json").exists():
        raise CheckpointError(f"{folder}: no huggingface/config.json in it; give --base-model FOLDER")
    writer = _writer(folder, base, target, dtype)
    try:
        _check_shapes(folder, base, weights.shapes, writer)
        part: dict[str, torch.Tensor] = {}
        for name in writer.shapes:
            if name in weights.shapes and name in writer.missing(part):
                part[name] = weights.whole(name)
            if sum(tensor.nbytes for tensor in part.values()) >= PART_BYTES:
                writer.add(part)
                part = {}
        if part:
            writer.add(part)
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


def export(step: Path, target: Path, *, base_model: str | None = None, dtype: str | None = None) -> None:
    """Write the weights of one sharded checkpoint as the Hugging Face folder `target`; see `convert`."""
    if "adapts" in read_state(step / STATE_DIR):
        raise CheckpointError(
            f"{step}: its state holds adapters alone (model.lora), expected all weights; `leeway resume` the run, "
            "which ends with hf/ and adapter/, or set checkpoint.save_hf=always"
        )
    index = read_tensors(step / STATE_DIR)
    base = _base_of(step, base_model)
    writer = _writer(step, base, target, dtype)
    try:
        _check_same_model(step, base, index, writer)
        for weights in _weights(step / STATE_DIR, index):
            writer.add(weights)
            weights.clear()  # before the next part is read
    except BaseException as error:
        writer.abandon()
        if isinstance(error, DamagedFileError):
            raise CheckpointError(f"checkpoint {error}") from None
        raise
    writer.finish()


def _writer(step: Path, base: str, target: Path, dtype: str | None) -> HFWriter:
    try:
        return HFWriter(base, target, dtype=getattr(torch, dtype or "float32"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{step}: {base} cannot be its model: {' '.join(str(error).split())[:300]}") from None


def _steps(path: Path) -> list[Path]:
    """Checkpoints in, at or around `path`, except those still being written (or left half-written)."""
    for folder in (path, path.parent):
        if (folder / STATE_DIR / STATE_FILE).exists() or (folder / "dcp").is_dir():
            return [folder]
    found = {p.parents[1] for p in path.rglob(f"{STATE_DIR}/{STATE_FILE}")} | {
        p.parent for p in path.rglob("step-*/dcp")
    }
    return sorted(f for f in found if not any(part.endswith(".partial") for part in f.parts))


def _what_it_is(path: Path) -> str:
    if not path.exists():
        return f"{path}: nothing there; expected a run's folder or a checkpoint"
    megatron = (file for mark in ("mp_rank_*", "iter_*", "*.distcp") for file in path.rglob(mark))
    if next(megatron, None) is not None or re.fullmatch(r"iter_\d+|mp_rank_\d+.*|dist_ckpt", path.name):
        return f"{path}: a Megatron checkpoint, whose sharding is not supported; convert it with Megatron's own tools"
    expected = f"a folder like checkpoints/step-000050 with {STATE_DIR}/{STATE_FILE}"
    return f"{path}: no sharded checkpoint in it; expected {expected}"


def _base_of(step: Path, base_model: str | None) -> str:
    about = read_about(step) if (step / STATE_FILE).exists() else {}
    if base_model is not None:
        return base_model
    base = about.get("base_model")
    if base is not None and not isinstance(base, str):
        raise CheckpointError(
            f"{step}: got {str(base)[:80]} as base_model, expected a folder; give --base-model FOLDER"
        )
    if base is not None and not is_local_path(base) and not _is_cached(base):
        raise CheckpointError(f"{step}: its model {base} is not on this machine; give --base-model {base} to fetch it")
    if base is None or (Path(base).is_absolute() and not (Path(base) / "config.json").exists()):
        raise CheckpointError(
            f"{step}: the model's config is missing ({base or 'not noted'}); give --base-model FOLDER"
        )
    return base


def _is_cached(hub_id: str) -> bool:
    """Nothing is fetched because a file says so."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
    except ValueError:  # no name that the hub could have
        return False


def _check_same_model(step: Path, base: str, index: Index, writer: HFWriter) -> None:
    """Raise `CheckpointError` unless the checkpoint has each of the model's tensors in its shape, and no others.

    Before any of them is read: an index can claim any size.
    """
    found = {name.removeprefix(PREFIX): t.shape for name, t in index.tensors.items() if name.startswith(PREFIX)}
    _check_shapes(step, base, found, writer)


def _check_shapes(step: Path, base: str, found: Mapping[str, tuple[int, ...]], writer: HFWriter) -> None:
    for name, shape in found.items():
        expected = writer.shapes.get(name, "absent")
        if expected != shape:
            raise CheckpointError(f"{step} belongs to another model: {name} is {shape} in it, {expected} in {base}")
    if missing := writer.missing(found):
        raise CheckpointError(
            f"{step}: {len(missing)} tensors that {base} has are not in the checkpoint, the first is {missing[0]}; "
            "it belongs to another model"
        )


def _weights(directory: Path, index: Index) -> Iterator[dict[str, torch.Tensor]]:
    """All weights of a checkpoint, `PART_BYTES` of them at a time."""
    weights = [([n], saved.dtype, saved.shape) for n, saved in index.tensors.items() if n.startswith(PREFIX)]
    for plan in plan_buckets(weights, PART_BYTES):
        tensors = {span.names[0]: torch.empty(span.shape, dtype=span.dtype) for span in plan.spans}
        load_rows(directory, index, {name: (0, tensor) for name, tensor in tensors.items()})
        yield {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        del tensors
