"""Write a Hugging Face model directory that transformers and vLLM can load, one part of the weights at a time."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.hub import cached_file

from ..integrity import FileSums, write_checksums
from .durable import sync, sync_tree
from .shards import write_safetensors
from .tensors import by_tensor, saved_tensors

logger = logging.getLogger(__name__)

COPIED = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.model",
    "tekken.json",
)
"""Copied unchanged if the base has them: stop tokens, and files for processors and other programs' tokenizers."""


class HFWriter:
    """Config, tokenizer and side files (`COPIED`) of `base`, a folder or a hub id, with parameters in `dtype`.

    The folder appears complete or not at all. Each `add` writes one file of weights and keeps nothing in memory.
    `finish` writes down the checksums of all files, and renames the folder to its final name. `shapes`: of the model's
    tensors, by name. `chat_template`: in place of the tokenizer's own.
    """

    def __init__(self, base: str, directory: Path, *, dtype: torch.dtype, chat_template: str | None = None) -> None:
        self._directory = directory
        self._partial = directory.with_name(directory.name + ".partial")
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        tensors = saved_tensors(self._model)
        self._dtype, self._parameters = dtype, {name for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._missing = {name: tuple(names) for names in by_tensor(tensors).values() for name in names}
        self._tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self._copied = _side_files(base)
        self._files: list[dict[str, int]] = []  # of each file: bytes by name
        self._sums: list[FileSums] = []
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add the next weights, by the names of the model's modules; tied ones once. On the CPU, of any dtype.

        Parameters are written in `dtype`, buffers unchanged: some must stay float32.
        """
        self._missing = {name: self._missing[name] for name in self.missing(tensors)}
        tensors = {name: t.to(self._dtype) if name in self._parameters else t for name, t in tensors.items()}
        # Some models store weights differently from their files, for example all experts of a layer in one tensor.
        tensors = revert_weight_conversion(self._model, dict(tensors))
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        sums, _ = write_safetensors(self._partial / _unnumbered(len(self._files)), tensors, metadata={"format": "pt"})
        self._sums.append(sums)
        self._files.append({name: tensor.nbytes for name, tensor in tensors.items()})

    def missing(self, more: Iterable[str] = ()) -> list[str]:
        """Tensors of the model that have not been added yet, and would not be with `more`; tied ones come together."""
        added = {tied for name in more for tied in self._missing.get(name, ())}
        return sorted(self._missing.keys() - added)

    def abandon(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def finish(self) -> None:
        assert not self._missing, f"not all of the model was written: {self.missing()[:3]} and others"
        # Without weights, it writes everything else.
        self._model.save_pretrained(self._partial, state_dict={})
        (self._partial / "model.safetensors").unlink(missing_ok=True)
        self._tokenizer.save_pretrained(self._partial)
        for name, path in self._copied.items():
            shutil.copyfile(path, self._partial / name)
        total = len(self._files)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
        if total == 1:
            names = ["model.safetensors"]
        else:
            weight_map = {weight: file for file, weights in zip(names, self._files, strict=True) for weight in weights}
            index = {"metadata": {"total_size": sum(sum(w.values()) for w in self._files)}, "weight_map": weight_map}
            (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for i, name in enumerate(names):
            (self._partial / _unnumbered(i)).rename(self._partial / name)
        write_checksums(self._partial, dict(zip(names, self._sums, strict=True)))
        sync_tree(self._partial)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._partial.rename(self._directory)
        sync(self._directory.parent)


def _side_files(base: str) -> dict[str, str]:
    """Paths of the `COPIED` files that `base` has, by name; for a hub id they are fetched unless cached."""
    found, unknown = {}, []
    for name in COPIED:
        try:
            path = cached_file(base, name, _raise_exceptions_for_missing_entries=False)
        except OSError:  # neither in the cache nor available from the hub
            unknown.append(name)
            continue
        if path is not None:
            found[name] = path
    if unknown:
        logger.warning("%s cannot be reached; not copied, if it has them: %s", base, ", ".join(unknown))
    return found


def _unnumbered(index: int) -> str:
    """The temporary name of a weights file while the total number is unknown."""
    return f"weights-{index}.partial"
