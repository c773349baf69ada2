"""All that a model's files hold, under their names: published, saved, converted, loaded and audited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.integrity import sealed
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer import checkpoint
from leeway.trainer.audit import published_weights
from leeway.trainer.checkpoint import CheckpointError
from leeway.trainer.convert import convert
from leeway.trainer.names import PublishedNames
from leeway.trainer.tensors import saved_tensors
from leeway.trainer.trainer import Trainer

from ..trainers import CANARY, VOCAB, all_rows, batch_of, published, random_trajectories

GEMMA3: dict[str, Any] = {"head_dim": 8, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
QUICK = ("qwen2", "mixtral", "gemma4_text")
EACH = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
WITH_BUFFERS = ["glm4_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("minimax_m2", "gemma4_text"))]


def save(folder: Path, family: str, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = AutoConfig.for_model(family, **(sizes | heads | ids | {"initializer_range": 0.3} | FAMILIES[family]))
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in saved_tensors(lm).values():
        if not isinstance(tensor, nn.Parameter):
            tensor.normal_(1.0, 0.5)  # at their first values nothing would show
    lm.save_pretrained(folder)
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(folder)
    return folder


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def whole_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = saved_tensors(trainer._model.lm)
    return {n: all_rows(t).detach().clone() for n, t in tensors.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH)
def test_what_is_published_has_the_names_and_values_of_the_files(make, tmp_path, family):
    trainer = make(save(tmp_path, family))
    manifest, _, tensors = published(trainer)
    expected = in_files(tmp_path)
    assert set(tensors) == set(expected) | ({"lm_head.weight"} & set(tensors))
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert manifest.canary.prompts == CANARY


@pytest.mark.slow
def test_a_family_that_only_renames_is_published_under_the_files_names_without_a_copy(make, tmp_path):
    text = AutoConfig.for_model(
        "gemma3_text",
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
        **GEMMA3,
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma3", text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    trainer = make(tmp_path)
    _, _, tensors = published(trainer)
    expected = in_files(tmp_path)
    assert "language_model.model.norm.weight" in expected
    assert set(tensors) - {"lm_head.weight"} == set(expected), "tied: published under both its names"
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    for plan, memory in trainer._gatherer.buckets():
        assert memory is not None
        assert trainer._gatherer.as_published(plan, memory)[1] is memory


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "minimax_m2"])
def test_tensors_are_put_together_again(tmp_path, family):
    lm = AutoModelForCausalLM.from_pretrained(save(tmp_path, family), dtype=torch.float32)
    names = PublishedNames(lm)
    for name, tensor in saved_tensors(lm).items():
        parts = names.split(name, tensor.detach())
        assert names.parts(name, tensor.shape) == set(parts)
        assert torch.equal(names.join(name, tensor.shape, parts), tensor), name


def test_a_family_whose_files_keep_several_tensors_as_one_is_refused():
    config = AutoConfig.for_model("hrm_text", vocab_size=VOCAB, hidden_size=48, intermediate_size=48)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"model\.path: got a HrmText\w+, whose files keep .* and .* as one tensor"):
        PublishedNames(lm)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_experts_of_an_older_version_come_back(make, tmp_path, bucket_bytes):
    trainer = make(save(tmp_path, "mixtral"), bucket_bytes=bucket_bytes, max_policy_lag=9)
    batch = batch_of(random_trajectories(1, 8))
    before = trainer.token_logprobs(batch)
    manifest, buckets, _ = published(trainer)
    trainer.forward_backward(batch)
    trainer.optim_step()
    now = trainer.token_logprobs(batch)
    assert (now - before).abs().max() > 0.01
    with published_weights(trainer._model, trainer._gatherer.names, manifest, buckets):
        assert torch.equal(trainer.token_logprobs(batch), before)
    assert torch.equal(trainer.token_logprobs(batch), now)


# ------------------------------------------------------------------------------------------------------- buffers


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_BUFFERS)
def test_buffers_are_saved_and_converted_as_they_are_in_any_type(make, tmp_path, family):
    """In bfloat16 too: a router's correction of its scores stays float32."""
    base = save(tmp_path / "base", family)
    expected = in_files(base)
    trainer = make(base)
    buffers = {name for name, t in saved_tensors(trainer._model.lm).items() if not isinstance(t, nn.Parameter)}
    assert buffers
    trainer.save(str(tmp_path / "hf"))
    assert same(in_files(tmp_path / "hf"), expected)
    step = tmp_path / "step-000001"
    trainer.save_state(str(step / "trainer"))
    (step / "state.json").write_text(sealed({"base_model": str(base)}))
    assert list(convert(step, dtype="bfloat16")) == [(step / "hf", True)]
    converted = in_files(step / "hf")
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        as_saved = tensor if converted[name].dtype is torch.float32 else tensor.bfloat16()
        assert torch.equal(converted[name], as_saved), name
    assert sum(t.dtype is torch.float32 for t in converted.values()) == len(buffers)


@pytest.mark.slow
def test_a_checkpoint_brings_its_buffers_and_one_without_them_is_refused(make, tmp_path, monkeypatch):
    base = save(tmp_path / "base", "glm4_moe")
    trainer = make(base)
    expected = whole_tensors(trainer)
    trainer.save_state(str(tmp_path / "trainer"))
    again = make(save(tmp_path / "other", "glm4_moe", seed=1))
    again.load_state(str(tmp_path / "trainer"))
    assert same(whole_tensors(again), expected)
    step = tmp_path / "old"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "saved_tensors", lambda model: dict(model.named_parameters()))
        again.save_state(str(step / "trainer"))
    with pytest.raises(CheckpointError, match=r"holds none of the model's 1 buffers .*e_score_correction_bias"):
        again.load_state(str(step / "trainer"))
    with pytest.raises(CheckpointError, match=r"1 tensors that .* has are not in the checkpoint.*score_correction"):
        list(convert(step, base_model=str(base)))
    assert [p.name for p in step.iterdir()] == ["trainer"]


@pytest.mark.slow
def test_an_audit_scores_with_the_buffers_that_were_published(make, tmp_path):
    trainer = make(save(tmp_path, "gemma4_text"))
    batch = batch_of(random_trajectories(1, 4))
    before = trainer.token_logprobs(batch)
    manifest, buckets, _ = published(trainer)
    for tensor in saved_tensors(trainer._model.lm).values():
        if not isinstance(tensor, nn.Parameter):
            tensor.mul_(2)
    now = trainer.token_logprobs(batch)
    assert (now - before).abs().max() > 0.01
    with published_weights(trainer._model, trainer._gatherer.names, manifest, buckets):
        assert torch.equal(trainer.token_logprobs(batch), before)
    assert torch.equal(trainer.token_logprobs(batch), now)
