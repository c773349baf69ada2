"""Reads a model's files: each rank its own rows of every tensor, straight to where they stay.

    skeleton(path, attn)   the model without its weights: parameters on the meta device, other buffers as it makes them
    read_weights(lm, ...)  this rank's rows of every parameter, and every saved buffer     (once per model)
    fill(lm, weights)      puts them in, sharded or not (`tensors`)

A file's tensor is read in one piece if it is a parameter of the model under another name or its own, or one expert of
a parameter that stacks them. What transformers converts in any other way is read and converted whole, and then cut. So
a rank holds its rows and one tensor at a time. Nothing is unpickled: only safetensors files are read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file

from ..config.model_files import INDEX, DamagedWeights, indexed_files, tensors_in
from ..failures import Refused
from .shards import DTYPES, bytes_of, own_rows
from .tensors import by_tensor, saved_tensors, set_tensor

SINGLE = "model.safetensors"


class ModelRefusedError(Refused):
    """A model's files are not the model's, or no supported way of computing gives it the logprobs of transformers."""


def skeleton(path: str, attn: str) -> PreTrainedModel:
    """The model in float32 without weights: parameters and saved buffers on the meta device, the others computed."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefusedError(
            f"{path}: got quantized weights (quantization_config in its config.json), expected float32 or bfloat16; "
            "save it once dequantized, with transformers"
        )
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn, trust_remote_code=False
        )
    for name, buffer in list(lm.named_non_persistent_buffers()):
        set_tensor(lm, name, torch.empty_like(buffer, device="cpu"))
    for tensor in saved_tensors(lm).values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # what transformers leaves as it is
    lm.initialize_weights()
    return lm.eval()


def read_weights(
    lm: PreTrainedModel, path: str, *, rank: int = 0, num_ranks: int = 1, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """By first name of a `skeleton`'s tensors: this rank's rows of a parameter, all of a saved buffer; on `device`.

    Raises `ModelRefusedError` for files with other tensors than the model's, or of other shapes.
    """
    tensors = saved_tensors(lm)
    weights: dict[str, torch.Tensor] = {}
    tied = {name: names for names in by_tensor(tensors).values() for name in names}
    for name, rows in tensors_of(lm, path, rank=rank, num_ranks=num_ranks):
        rows = rows.to(device or rows.device)
        known = weights.setdefault(tied[name][0], rows)
        if known is not rows and not torch.equal(known, rows):
            raise ModelRefusedError(
                f"{path}: its files have different values for {' and '.join(tied[name])}, which its config.json "
                "makes one tensor; set tie_word_embeddings to false in it"
            )
    if missing := sorted({names[0] for names in tied.values()} - weights.keys()):
        raise ModelRefusedError(
            f"{path}: its files lack {len(missing)} tensors of {type(lm).__name__}, the first is {missing[0]}, "
            "expected all of them; take a complete model (its body alone, or a classifier, is none)"
        )
    return weights


def tensors_of(
    lm: PreTrainedModel, path: str, *, rank: int = 0, num_ranks: int = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `read_weights` reads, one tensor after the other, in main memory; a tied one for each entry of the files.

    `PublishedNames` of `lm` are complete from here on, before the first tensor is read. Raises `ModelRefusedError`.
    """
    files, tensors = ModelFiles(path), saved_tensors(lm)
    sources, unexpected = _sources(lm, files.shapes, set(tensors))
    if unexpected:
        raise ModelRefusedError(
            f"{path}: got {len(unexpected)} tensors in its files that {type(lm).__name__} does not have, the first is "
            f"{unexpected[0]}, expected those of its config.json alone; correct config.json, or take another model"
        )
    return (item for source in sources for item in source.read(files, lm, tensors, rank, num_ranks).items())


class ModelFiles:
    """The tensors in a model's safetensors files, by name. `bytes_read`: so far, without headers."""

    def __init__(self, path: str) -> None:
        """`path`: a folder or a hub id. Raises `ModelRefusedError` for files that are absent or damaged."""
        self._where: dict[str, tuple[Path, int, torch.dtype]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.bytes_read = 0
        try:
            for file in _files(path):
                start, entries = tensors_in(file)
                for name, entry in entries.items():
                    if entry["dtype"] not in DTYPES:
                        raise DamagedWeights(f"{file} ({name} is of type {str(entry['dtype'])[:20]}, which is unknown)")
                    shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
                    sizes = all(type(size) is int and size >= 0 for size in (*shape, first))
                    if not sizes or last - first != math.prod(shape) * DTYPES[entry["dtype"]].itemsize:
                        raise DamagedWeights(f"{file} ({name} of {last - first:,} bytes cannot be {list(shape)})")
                    self._where[name] = file, start + first, DTYPES[entry["dtype"]]
                    self.shapes[name] = shape
        except (DamagedWeights, KeyError, TypeError, ValueError) as error:
            raise ModelRefusedError(f"{path}: its weights are damaged: {error}; fetch or save it again") from None

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows `first` to `last` of a tensor (None: the rest of it), of the file's type, in main memory."""
        file, start, dtype = self._where[name]
        shape = self.shapes[name]
        if not shape:
            rows = torch.empty((), dtype=dtype)
        else:
            last = shape[0] if last is None else last
            rows = torch.empty((last - first, *shape[1:]), dtype=dtype)
            start += first * math.prod(shape[1:]) * dtype.itemsize
        if rows.numel():
            with file.open("rb", buffering=0) as stream:
                _read_into(stream.fileno(), start, bytes_of(rows), file)
        self.bytes_read += rows.nbytes
        return rows


@dataclass
class _Source:
    """What one tensor of the model, or several, are made of: tensors of the files, by pattern of a converter."""

    target: str
    converter: WeightConverter | None
    keys: dict[str, list[str]] = field(default_factory=dict)

    def read(
        self, files: ModelFiles, lm: PreTrainedModel, tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int
    ) -> dict[str, torch.Tensor]:
        """This rank's rows of the tensors that it makes, by name, in the type that the model has them in."""
        target = tensors[self.target]
        shape = tuple(target.shape)
        first, last = _rows(target, rank, num_ranks)
        if self.converter is None:
            ((key, *others),) = self.keys.values()
            if others or files.shapes[key] != shape:
                raise self._misshaped(lm, self.target, files.shapes[key], shape)
            return {self.target: files.read(key, first, last).to(target.dtype)}
        converter = deepcopy(self.converter)
        if stacks := _stacks_rows(converter):
            if any(len(keys) != shape[0] for keys in self.keys.values()):
                counts = ", ".join(f"{len(keys)} of {pattern}" for pattern, keys in self.keys.items())
                raise self._misshaped(lm, self.target, counts, shape)
            if first == last:
                return {self.target: torch.empty((0, *shape[1:]), dtype=target.dtype)}
        for pattern, keys in self.keys.items():
            for key in keys[first:last] if stacks else keys:
                converter.add_tensor(self.target, key, pattern, files.read(key).to(target.dtype))  # type: ignore[arg-type]
        made = converter.convert(self.target, model=lm, config=lm.config)
        rows = {}
        for name, tensor in made.items():
            whole = tensor[0] if isinstance(tensor, list) else tensor
            if name not in tensors:
                raise ModelRefusedError(f"{type(lm).__name__}: its files make a tensor {name}, which it does not have")
            first, last = _rows(tensors[name], rank, num_ranks)
            expected = tuple(tensors[name].shape)
            if tuple(whole.shape) != ((last - first, *expected[1:]) if stacks else expected):
                raise self._misshaped(lm, name, tuple(whole.shape), expected)
            # Copied, because a part of it would keep the whole.
            rows[name] = whole.contiguous() if stacks or last - first == len(whole) else whole[first:last].clone()
        return rows

    def _misshaped(self, lm: PreTrainedModel, name: str, got: Any, expected: Any) -> ModelRefusedError:
        return ModelRefusedError(
            f"{type(lm).__name__}: {name}: got {got} in its files, expected {expected} by its config.json; "
            "correct config.json, or take another model"
        )


def _sources(lm: PreTrainedModel, keys: Iterable[str], names: set[str]) -> tuple[list[_Source], list[str]]:
    """(what to read, keys that the model has no use for), as transformers maps a file's names to a model's."""
    transforms = get_model_conversion_mapping(lm)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known: dict[str, Any] = dict.fromkeys(names, True)
    sources: dict[str, _Source] = {}
    unexpected: list[str] = []
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, lm.base_model_prefix, known)
        if target not in names and key in names:
            target, pattern = key, None
        if target not in names:
            unexpected.append(key)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        source = sources.setdefault(target, _Source(target, converter))
        source.keys.setdefault(pattern or "", []).append(key)
    # Which of them are undone when weights are published and exported; transformers keeps the same note.
    lm._weight_conversions = [t for t in transforms if t.was_used()]  # type: ignore[assignment]
    ignored = "|".join(f"({p})" for p in [*(lm._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"])
    return list(sources.values()), [key for key in unexpected if re.search(ignored, key) is None]


def _stacks_rows(converter: WeightConverter) -> bool:
    """Whether each row of what it makes is one file's tensor of each pattern: experts, for example."""
    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and len(converter.target_patterns) == 1
        and all(isinstance(op, Concatenate) and op.dim > 0 for op in others)
    )


def _rows(tensor: torch.Tensor, rank: int, num_ranks: int) -> tuple[int, int]:
    """A rank's rows of a parameter; buffers are everywhere whole."""
    if not isinstance(tensor, nn.Parameter):
        rank, num_ranks = 0, 1
    return own_rows(tensor.shape[0] if tensor.dim() else 1, rank=rank, num_ranks=num_ranks)


def _files(path: str) -> list[Path]:
    """A model's weights: one file, or those that its index names."""

    def find(name: str) -> str | None:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False)

    if (file := find(SINGLE)) is not None:
        return [Path(file)]
    if (index := find(INDEX)) is None:
        raise ModelRefusedError(
            f"{path}: got no {SINGLE} and no {INDEX}, expected weights in safetensors; save it once more with "
            "transformers, in which save_pretrained writes them"
        )
    found = {name: find(name) for name in indexed_files(Path(index))}
    if absent := [name for name, file in found.items() if file is None]:
        raise DamagedWeights(f"{absent[0]} (nothing there, though {INDEX} names it)")
    return [Path(str(file)) for file in found.values()]


def _read_into(descriptor: int, start: int, data: memoryview, file: Path) -> None:
    while data:
        num_bytes = os.preadv(descriptor, [data], start)
        if not num_bytes:
            raise DamagedWeights(f"{file} (it ends at byte {start:,}, before its tensors do)")
        start, data = start + num_bytes, data[num_bytes:]
