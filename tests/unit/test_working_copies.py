"""A rank that is alone in half precision: it computes with copies, and gets what FSDP would give, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.trainer.sharding import reshard
from leeway.trainer.working_copies import ComputesWithCopies

from ..trainers import (
    SHARDED,
    VOCAB,
    batch_of,
    gradients,
    one_rank_trainer,
    published,
    random_trajectories,
)

pytestmark = pytest.mark.slow


def steps_of(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Logprobs, gradients of two steps of several passes, and weights afterwards."""
    found = []
    for seed in (1, 2):
        batch = batch_of(random_trajectories(seed, 8))
        batch.temperatures[::2] = 0.7  # which bfloat16 does not have
        found.append({"logprobs": trainer.token_logprobs(batch)})
        trainer.forward_backward(batch)
        found.append(gradients(trainer))
        trainer.score_canary()
        trainer.optim_step()
    return [*found, published(trainer)[2]]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "gradient_checkpointing": True, "head_dtype": "float32"},
        {"dtype": "bfloat16", "logprob_chunk_tokens": None},
        {"dtype": "float16"},
    ],
    ids=lambda changes: "+".join(map(str, changes.values())),
)
def test_the_numbers_are_those_of_fsdp(make, changes):
    changes = {"max_tokens_per_microbatch": 40, **changes}
    own, fsdp = make(**changes), make(**changes, **SHARDED)
    assert isinstance(own._model, ComputesWithCopies)
    assert not isinstance(fsdp._model, ComputesWithCopies)
    for mine, theirs in zip(steps_of(own), steps_of(fsdp), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


OTHERS: dict[str, dict[str, Any]] = {
    "olmo2": {"num_key_value_heads": 2},  # rotary tables in float32
    "xglm": {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},  # positions in float32
}


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_get_their_inputs_in_the_type_that_fsdp_gives_them(kind, group_of_one_rank, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, **(sizes | OTHERS[kind]))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    own, fsdp = (one_rank_trainer(tmp_path, dtype="bfloat16", attn="auto", **more) for more in ({}, SHARDED))
    for mine, theirs in zip(steps_of(own), steps_of(fsdp), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_weights_are_in_their_places_whenever_nothing_is_computed(make):
    trainer = make(dtype="bfloat16")
    weights = {id(p) for p in trainer._model.parameters()}
    batch = batch_of(random_trajectories(1, 6))

    def check() -> None:
        assert {id(p) for p in trainer._model.parameters()} == weights
        assert {p.dtype for p in trainer._model.parameters()} == {torch.float32}

    for work in (trainer.token_logprobs, trainer.evaluate, trainer.forward_backward):
        work(batch)
        check()
    trainer.publish()
    check()
    trainer._model(torch.tensor([[1, 2, 3]]), torch.tensor([0]), torch.tensor([2]), 1.0)  # without a backward pass
    assert {p.dtype for p in trainer._model.parameters()} == {torch.bfloat16}
    reshard(trainer._model)
    check()


def test_a_pass_that_fails_leaves_the_weights_in_their_places(make):
    trainer = make(dtype="bfloat16")
    with pytest.raises(IndexError):
        trainer._model(torch.tensor([[1_000]]), torch.tensor([0]), torch.tensor([2]), 1.0)
    assert {p.dtype for p in trainer._model.parameters()} == {torch.float32}


def test_every_pass_computes_with_the_weights_of_its_time(make):
    trainer = make(dtype="bfloat16")
    batch = batch_of(random_trajectories(1, 6))
    before = trainer.token_logprobs(batch)
    assert torch.equal(trainer.token_logprobs(batch), before)
    with torch.no_grad():
        for parameter in trainer._model.parameters():
            parameter.mul_(1.25)
    assert not torch.equal(trainer.token_logprobs(batch), before)


@pytest.mark.parametrize("sharded", [{}, SHARDED])
def test_a_step_counts_even_after_a_pass_without_a_backward_pass(make, sharded):
    trainer = make(dtype="bfloat16", **sharded)
    batch = batch_of(random_trajectories(1, 6))
    before = trainer.token_logprobs(batch)
    trainer.forward_backward(batch)
    trainer._model(torch.tensor([[1, 2, 3]]), torch.tensor([0]), torch.tensor([2]), 1.0)
    trainer.optim_step()
    assert not torch.equal(trainer.token_logprobs(batch), before)
