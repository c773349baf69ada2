"""Parameters under the names of the files that other tools read, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.trainer.audit import published_weights
from leeway.trainer.names import PublishedNames

from .test_trainer import CANARY, VOCAB, batch_of, make, model_path, published, random_trajectories  # noqa: F401

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2": {},
}


def save(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = AutoConfig.for_model(family, **(sizes | heads | {"initializer_range": 0.3} | EXPERTS[family]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", EXPERTS)
def test_what_is_published_has_the_names_and_values_of_the_files(make, tmp_path, family):  # noqa: F811
    trainer = make(save(tmp_path, family))
    manifest, _, tensors = published(trainer)
    expected = in_files(tmp_path)
    assert set(tensors) == set(expected) | ({"lm_head.weight"} & set(tensors))
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert manifest.canary.prompts == CANARY


@pytest.mark.parametrize("family", EXPERTS)
def test_parameters_are_put_together_again(tmp_path, family):
    lm = AutoModelForCausalLM.from_pretrained(save(tmp_path, family), dtype=torch.float32)
    names = PublishedNames(lm)
    for name, parameter in lm.named_parameters():
        parts = names.split(name, parameter.detach())
        assert names.parts(name, parameter.shape) == set(parts)
        assert torch.equal(names.join(name, parameter.shape, parts), parameter), name


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_experts_of_an_older_version_come_back(make, tmp_path, bucket_bytes):  # noqa: F811
    trainer = make(save(tmp_path, "mixtral"), bucket_bytes=bucket_bytes, max_policy_lag=9)
    batch = batch_of(random_trajectories(1, 8))
    before = trainer.token_logprobs(batch)
    manifest, buckets, _ = published(trainer)
    trainer.forward_backward(batch)
    trainer.optim_step()
    now = trainer.token_logprobs(batch)
    assert (now - before).abs().max() > 0.01
    with published_weights(trainer._model, manifest, buckets):
        assert torch.equal(trainer.token_logprobs(batch), before)
    assert torch.equal(trainer.token_logprobs(batch), now)
