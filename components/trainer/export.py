"""Write a Hugging Face model directory that transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def write_hf(base: str, state: dict[str, torch.Tensor], directory: Path, *, trust_remote_code: bool = False) -> None:
    """Config, tokenizer and generation settings of `base` with the weights of `state`; appears whole or not at all."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    dtype = next(iter(state.values())).dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.save_pretrained(partial, state_dict=state)
    AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code).save_pretrained(partial)
    if os.path.exists(os.path.join(base, "generation_config.json")):
        GenerationConfig.from_pretrained(base).save_pretrained(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
