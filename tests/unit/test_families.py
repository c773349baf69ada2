"""Models of every kind are scored as transformers scores them, or refused: heads, noise, windows, rotary embeddings."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.algorithms.objective import SupervisedObjective
from leeway.algorithms.preference import DPO, PreferenceObjective
from leeway.failures import InputRefused, as_text
from leeway.trainer.attention import NoLayoutError, packed_attention
from leeway.trainer.families import ModelRefusedError, load_model, logit_transform
from leeway.trainer.logprobs import LogitTransform
from leeway.trainer.scoring import ScoringModel
from leeway.trainer.sharding import checkpoint_activations, decoder_layers

from ..trainers import batch_of as trainer_batch_of
from ..trainers import in_pairs, random_trajectories
from .test_packing import SIZES, batch_of, groups, score


@pytest.fixture(scope="module")
def sweep() -> Any:
    """The benchmark of all families, as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "families.py"
    spec = importlib.util.spec_from_file_location("benchmark_families", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    """save(model type, **options) -> folder of a tiny random model."""

    def build(kind: str, **options: Any) -> str:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **(SIZES | options))
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        return str(folder)

    return build


# Of each, what the family has that others have not; the benchmark has all families.
EXPECTED = {
    "nemotron": ("not given the layout", "exact"),  # a decoder layer that drops keyword arguments
    "recurrent_gemma": ("nats", "exact"),  # a state that runs along the row; a cap of another name
    "qwen2_moe": ("nats", "exact"),  # a window that its attention is not told of
    "seed_oss": ("exact", "exact"),  # dropout on by default
    "mixtral": ("exact", "exact"),  # router noise
    "hyperclovax": ("exact", "exact"),  # logits_scaling multiplies
    "falcon_h1": ("kinds", "exact"),  # lm_head_multiplier
    "gemma2": ("exact", "eager"),  # sdpa drops the cap of its scores
    "gpt_oss": ("kinds", "eager"),  # attention sinks; no sdpa
    "modernbert-decoder": ("exact", "exact"),  # a layer between body and head
    "mpt": ("kinds", "exact"),  # a logit_scale that transformers does not read
    "opt": ("exact", "exact"),  # dropout in the decoder layer itself
    "phimoe": ("nats", "exact"),
    "llama4_text": ("kinds", "exact"),
    "doge": ("mask of its own", "exact"),
    "deepseek_v32": ("kinds", "exact"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPECTED)
def test_a_family_is_exact_or_refused(sweep, family, tmp_path):
    row = sweep.check(family, tmp_path / "model")
    packed, padded = EXPECTED[family]
    assert not row.is_wrong, row
    assert packed in row.packed, row
    assert padded in row.padded, row


def test_a_row_whose_layout_was_lost_is_refused_by_its_attention():
    q = torch.randn(1, 2, 4, 8)
    attend: Any = packed_attention
    with pytest.raises(NoLayoutError, match="Module was not given the layout"):
        attend(torch.nn.Module(), q, q, q, None)


@pytest.mark.slow
def test_packing_that_is_not_exact_falls_back_or_is_refused_by_name(save, caplog):
    folder = save("nemotron", num_key_value_heads=2)
    with caplog.at_level(logging.WARNING):
        model = load_model(folder)
    assert not model.is_packed
    assert "NemotronForCausalLM (nemotron): batches are computed as padded rows" in caplog.text
    with pytest.raises(ModelRefusedError) as refused:
        load_model(folder, packing="shared")
    message = str(refused.value)
    assert "\n" not in message
    assert "NemotronForCausalLM (nemotron): got train.packing=shared" in message
    assert "packed rows: NoLayoutError" in message
    assert message.endswith("set train.packing=auto, model.attn=auto")


@pytest.mark.slow
def test_an_attention_that_drops_something_is_refused_where_it_is_asked_for(save):
    folder = save("gemma2", query_pre_attn_scalar=8, attn_logit_softcapping=0.5)
    assert load_model(folder).is_packed
    assert load_model(folder, packing="padded").lm.config._attn_implementation == "eager"
    with pytest.raises(
        ModelRefusedError, match=r"padded rows in sdpa attention: they differ from transformers by [\d.]+ nats"
    ):
        load_model(folder, packing="padded", attn="sdpa")


@pytest.mark.slow
def test_a_model_that_looks_ahead_is_refused(save):
    with pytest.raises(ModelRefusedError, match="its tokens depend on those after them"):
        load_model(save("bert", is_decoder=False))


def test_there_is_no_training_mode():
    config = AutoConfig.for_model("opt", vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=1)
    config.num_attention_heads = 4
    model = ScoringModel(AutoModelForCausalLM.from_config(config), transform=LogitTransform())
    assert not any(module.training for module in model.train().modules())


class _Capped(torch.nn.Module):
    """A causal LM whose logits are made by `after` of its head's."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.after = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20), after
        self.config = AutoConfig.for_model("llama", vocab_size=20)

    def forward(self, input_ids: torch.Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.after(self.head(self.embed(input_ids))))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed


def transform_of(lm: Any) -> LogitTransform:
    return logit_transform(ScoringModel(lm, transform=LogitTransform()), torch.device("cpu"))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (lambda x: x, (None, 1.0)),
        (lambda x: x / 8.0, (None, 0.125)),
        (lambda x: x * 0.0625, (None, 0.0625)),
        (lambda x: 30.0 * torch.tanh(x / 30.0), (30.0, 1.0)),
        (lambda x: 0.3 * 5.0 * torch.tanh(x / 5.0), (5.0, 0.3)),
        (lambda x: 5.0 * torch.tanh(0.3 * x / 5.0), (5.0 / 0.3, 0.3)),
    ],
)
def test_what_a_model_does_to_its_logits_is_measured(after, expected):
    got = transform_of(_Capped(after))
    assert got.scale == pytest.approx(expected[1], rel=1e-6)
    assert got.cap == pytest.approx(expected[0], rel=1e-5) if expected[0] else got.cap is None


@pytest.mark.parametrize("after", [lambda x: x + torch.arange(20), lambda x: x.clamp(max=5), torch.softmax])
def test_logits_made_in_another_way_are_refused(after):
    lm = _Capped(after if after is not torch.softmax else lambda x: torch.softmax(x, -1))
    with pytest.raises(ModelRefusedError, match="neither a multiple of its head's nor capped"):
        transform_of(lm)


def longrope(save: Callable[..., str]) -> str:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16, **factors}
    return save("phi3", rope_parameters=rope, original_max_position_embeddings=16)


@pytest.mark.slow
def test_frequencies_are_those_of_the_runs_longest_sequence_at_any_split(save):
    folder, trajectories = longrope(save), groups(3)
    assert max(len(t.prompt_tokens) + len(t.response_tokens) for t in trajectories) > 16
    batch = batch_of(trajectories)
    model = load_model(folder, max_length=64)
    whole, parts = (score(model, batch, "shared", n) for n in (10_000, 8))
    torch.testing.assert_close(whole[0], parts[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(score(load_model(folder, max_length=64, packing="padded"), batch, "padded")[0], whole[0])
    # Beyond the original positions transformers takes the same ones, for a sequence of that length.
    long = max(trajectories, key=lambda t: len(t.prompt_tokens) + len(t.response_tokens))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logits = plain(torch.tensor([long.prompt_tokens + long.response_tokens])).logits[
        0, len(long.prompt_tokens) - 1 : -1
    ]
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.tensor(long.response_tokens)[:, None])[:, 0]
    torch.testing.assert_close(score(model, batch_of([long]), "shared")[0], expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_sequence_beyond_the_length_that_frequencies_are_for_is_refused(save):
    model = load_model(longrope(save), max_length=12)
    with pytest.raises(ValueError, match=r"rollout.max_model_len: got 12, .* expected at least \d+"):
        score(model, batch_of(groups(3)), "shared")


@pytest.mark.slow
def test_dynamic_frequencies_are_refused_where_every_length_has_its_own(save):
    folder = save("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0})
    assert load_model(folder, max_length=128).is_packed
    with pytest.raises(ModelRefusedError, match=r"rollout.max_model_len: got 129, expected at most 128"):
        load_model(folder, max_length=129)


@pytest.mark.slow
def test_the_comparison_sees_a_token_that_depends_on_the_length_of_another_sequence(save, monkeypatch):
    from leeway.trainer import families

    monkeypatch.setattr(families, "fix_rotary", lambda lm, longest: None)
    with pytest.raises(ModelRefusedError, match="they differ from transformers by"):
        load_model(longrope(save), max_length=64)


@pytest.mark.slow
def test_checkpointed_layers_give_the_same_gradient_without_noise(save):
    folder, batch = save("seed_oss", attention_dropout=0.2, residual_dropout=0.2), batch_of(groups(1))
    expected, model = score(load_model(folder), batch, "shared"), load_model(folder)
    calls = []
    for layer in decoder_layers(model.lm):
        checkpoint_activations(layer)
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    got = score(model, batch, "shared")
    assert len(calls) == 2 * len(decoder_layers(model.lm))  # once more in the backward pass
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0)
    assert all(torch.equal(got[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.slow
def test_preference_training_starts_at_ln_2_and_evaluation_repeats_itself(save, make):
    folder = Path(save("seed_oss", attention_dropout=0.2, residual_dropout=0.2))
    batch = trainer_batch_of(in_pairs(random_trajectories(0, 4)))
    trainer = make(folder, objective=PreferenceObjective(dpo=DPO(beta=0.1)), max_policy_lag=None)
    metrics = trainer.evaluate(batch)
    assert metrics["train/loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert trainer.evaluate(batch) == metrics
    trainer = make(folder, objective=SupervisedObjective(), max_policy_lag=None)
    assert trainer.evaluate(batch) == trainer.evaluate(batch)


def test_a_refusal_leaves_an_actor_as_one_line_and_exit_code_2():
    class Actor:
        role = "trainer rank 0"

        @as_text
        async def start(self) -> None:
            raise ModelRefusedError("SomeModel (some): got this,\n expected that")

    async def start() -> None:
        await Actor().start()

    with pytest.raises(InputRefused) as refused:
        asyncio.run(start())
    assert str(refused.value) == "SomeModel (some): got this, expected that"
    assert (refused.value.exit_code, refused.value.details) == (2, "")
