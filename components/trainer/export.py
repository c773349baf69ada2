"""Write a Hugging Face model directory that transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .durable import sync, sync_tree


def write_hf(base: str, state: dict[str, torch.Tensor], directory: Path, *, trust_remote_code: bool = False) -> None:
    """Config, tokenizer and generation settings of `base` with the weights of `state`; appears whole or not at all."""
    hf_writer(base, state, directory, trust_remote_code=trust_remote_code)()


def hf_writer(
    base: str, state: dict[str, torch.Tensor], directory: Path, *, trust_remote_code: bool = False
) -> Callable[[], None]:
    """What `write_hf` does, in two parts: this one reads `base`, and what it returns writes, in any thread.

    The first is not for a thread beside others that make tensors: transformers changes the default dtype for a moment.
    """
    config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    dtype = next(iter(state.values())).dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code)
    generation = None
    if os.path.exists(os.path.join(base, "generation_config.json")):
        generation = GenerationConfig.from_pretrained(base)

    def write() -> None:
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial, state_dict=state)
        tokenizer.save_pretrained(partial)
        if generation is not None:
            generation.save_pretrained(partial)
        sync_tree(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        sync(directory.parent)

    return write
