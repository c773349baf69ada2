"""Write a Hugging Face model directory that transformers and vLLM load, a part of the weights at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from .durable import sync, sync_tree


class HFWriter:
    """Config, tokenizer and generation settings of `base` with weights in `dtype`; appears whole or not at all.

    Each `add` writes one file of weights and keeps nothing of it. `finish` puts the folder in its place.
    """

    def __init__(self, base: str, directory: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> None:
        self._directory = directory
        self._partial = directory.with_name(directory.name + ".partial")
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        self._tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code)
        self._generation = None
        if os.path.exists(os.path.join(base, "generation_config.json")):
            self._generation = GenerationConfig.from_pretrained(base)
        self._files: list[dict[str, int]] = []  # of each file: bytes by name
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The next weights, by the names of the model's modules; tied ones once. On the CPU, in `dtype`."""
        # Some models hold their weights otherwise than their files do, with all experts of a layer in one, say.
        tensors = revert_weight_conversion(self._model, dict(tensors))
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, self._partial / _unnumbered(len(self._files)), metadata={"format": "pt"})
        self._files.append({name: tensor.nbytes for name, tensor in tensors.items()})

    def finish(self) -> None:
        # With no weights it writes all the rest.
        self._model.save_pretrained(self._partial, state_dict={})
        (self._partial / "model.safetensors").unlink(missing_ok=True)
        self._tokenizer.save_pretrained(self._partial)
        if self._generation is not None:
            self._generation.save_pretrained(self._partial)
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
        sync_tree(self._partial)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._partial.rename(self._directory)
        sync(self._directory.parent)


def _unnumbered(index: int) -> str:
    """A file of weights while it is not known how many there will be."""
    return f"weights-{index}.partial"
