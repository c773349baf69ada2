"""Options of a step: what decays, what is skipped, and mixed precision, compiled layers and offloading that change
where and how fast it is computed, not what."""

from __future__ import annotations

import math
import resource
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.config.learning import OptimizerConfig
from leeway.failures import Refused
from leeway.trainer.offload import Offload
from leeway.trainer.optimizer import LossScale, Stepper
from leeway.trainer.sharding import sharding_units

from ..trainers import OPTIMIZER, batch_of, gradients, published, random_trajectories


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "spared"),
    [
        ("all", set()),
        ("matrices", {"bias", "norm"}),
        ("hidden_matrices", {"bias", "norm", "embed_tokens", "lm_head"}),  # the head is tied to the embedding
    ],
)
def test_weight_decay_acts_on_what_it_is_told(make, decay, spared):
    trainer = make(decay=decay)
    before = published(trainer)[2]
    batch = batch_of(random_trajectories(0, 4))
    batch.advantages.zero_()  # no gradient: what moves has decayed
    trainer.forward_backward(batch)
    trainer.optim_step()
    for name, tensor in published(trainer)[2].items():
        kept = 1.0 if any(word in name for word in spared) else 1 - OPTIMIZER.lr * OPTIMIZER.weight_decay
        torch.testing.assert_close(tensor, before[name] * kept, msg=name)


# -------------------------------------------------------------------------------------------------------- float16


@pytest.mark.slow
def test_float16_keeps_gradients_that_it_could_not_hold(make):
    """Of many tokens each has a gradient below float16's smallest number, 6e-8."""
    batch = batch_of(random_trajectories(0, 6))
    batch.advantages.mul_(1e-7)
    exact, half = make(), make(dtype="float16")
    for trainer in (exact, half):
        trainer.forward_backward(batch)
    scale, expected = half._loss_scale.metrics()["train/loss_scale"], gradients(exact)
    for name, gradient in gradients(half).items():
        assert (gradient / scale - expected[name]).norm() <= 3e-2 * expected[name].norm(), name


@pytest.mark.slow
def test_a_step_that_overflows_is_skipped_counted_and_halves_the_scale(make):
    trainer = make(dtype="float16", max_skipped_steps=0, max_policy_lag=100)
    before, batch = published(trainer)[0].digest, batch_of(random_trajectories(0, 6))
    batch.advantages.mul_(100.0)
    scales = []
    for _ in range(40):
        trainer.forward_backward(batch)
        metrics = trainer.optim_step()
        scales.append(metrics["train/loss_scale"])
        if math.isfinite(metrics["train/grad_norm"]):
            break
        assert published(trainer)[0].digest == before
    halved = len(scales) - 1
    assert halved >= 1, "nothing overflowed"
    assert scales == [LossScale.FIRST / 2 ** min(n, halved) for n in range(1, len(scales) + 1)]
    assert metrics["train/skipped_steps"] == halved
    assert published(trainer)[0].digest != before


@pytest.mark.slow
def test_what_no_scale_repairs_ends_the_run(make):
    trainer = make(dtype="float16", max_skipped_steps=0, max_policy_lag=100)
    trainer._loss_scale.load_state_dict({"value": 2.0, "good_steps": 0})
    trainer.forward_backward(broken_batch())
    trainer.optim_step()
    trainer.forward_backward(broken_batch())
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        trainer.optim_step()


def test_a_loss_scale_grows_again_and_is_restored():
    scale, saved = LossScale(enabled=True), LossScale(enabled=True)
    assert scale.adapt(is_finite=False)
    for _ in range(LossScale.GROWS_AFTER - 1):
        assert not scale.adapt(is_finite=True)
    saved.load_state_dict(scale.state_dict())
    assert saved.metrics()["train/loss_scale"] == LossScale.FIRST / 2
    saved.adapt(is_finite=True)
    assert saved.metrics()["train/loss_scale"] == LossScale.FIRST


def test_without_float16_a_loss_is_not_touched():
    loss, scale = torch.tensor(3.0), LossScale(enabled=False)
    assert scale * loss is loss
    assert (scale.adapt(is_finite=False), scale.metrics(), scale.state_dict()) == (False, {}, {})


# ----------------------------------------------------------------------------------------------------- not finite


def broken_batch() -> Any:
    batch = batch_of(random_trajectories(0, 4))
    batch.advantages[3] = math.inf
    return batch


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(make):
    good, digests = batch_of(random_trajectories(1, 6)), []
    for broken_first in (False, True):
        trainer = make(max_skipped_steps=1)
        if broken_first:
            before = published(trainer)[0].digest
            trainer.forward_backward(broken_batch())
            metrics = trainer.optim_step()
            assert metrics["train/skipped_steps"] == 1
            assert not math.isfinite(metrics["train/grad_norm"])
            assert trainer.policy_version == 1, "the batch is spent, and the lag of what follows is counted from here"
            assert published(trainer)[0].digest == before
        trainer.forward_backward(good)
        assert trainer.optim_step()["train/skipped_steps"] == float(broken_first)
        digests.append(published(trainer)[0].digest)
    assert digests[0] == digests[1], "not even AdamW's moments remember it"


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run(make):
    trainer = make(max_skipped_steps=2, max_policy_lag=9)
    for batch in (broken_batch(), broken_batch(), batch_of(random_trajectories(1, 6)), broken_batch(), broken_batch()):
        trainer.forward_backward(batch)
        trainer.optim_step()
    trainer.forward_backward(broken_batch())
    with pytest.raises(FloatingPointError, match=r"at policy version 5, 3 in a row .optimizer.max_skipped_steps is 2"):
        trainer.optim_step()


# ---------------------------------------------------------------------------------------------------- where and how


@pytest.mark.slow
def test_bfloat16_computes_and_float32_remembers(make):
    # Steps of 1e-5: far below what bfloat16 can tell apart at weights of 0.3.
    trainer = make(dtype="bfloat16", lr=1e-5, eps=1e-12, weight_decay=0.0)
    used = []
    layer = trainer._model.lm.model.layers[0].mlp.gate_proj
    layer.register_forward_pre_hook(lambda module, args: used.extend((module.weight.dtype, args[0].dtype)))
    before = {n: local(p).detach().clone() for n, p in trainer._model.named_parameters()}
    trainer.forward_backward(batch_of(random_trajectories(1, 8)))
    assert set(used) == {torch.bfloat16}
    assert {g.dtype for g in gradients(trainer).values()} == {torch.float32}
    trainer.optim_step()
    for name, parameter in trainer._model.named_parameters():
        moments = trainer._optimizer.state[parameter]
        assert local(parameter).dtype == moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.float32
        moved = (local(parameter) - before[name]).abs()
        assert 0 < moved.max() < 2e-5, name
        assert (moved > 0).float().mean() > 0.5 or "embed" in name, name


def two_steps(make: Any, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of the first step, weights after the second."""
    trainer = make(max_tokens_per_microbatch=40, **changes)
    trainer.forward_backward(batch_of(random_trajectories(1, 8)))
    first = gradients(trainer)
    trainer.optim_step()
    trainer.forward_backward(batch_of(random_trajectories(2, 5)))
    trainer.optim_step()
    return first, published(trainer)[2]


def check_close(got: tuple[dict, dict], expected: tuple[dict, dict]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.long("compiling takes a minute")
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_compiled_layers_take_the_same_steps(make, gradient_checkpointing):
    expected = two_steps(make)
    torch.compiler.reset()
    counters.clear()
    check_close(two_steps(make, compile=True, gradient_checkpointing=gradient_checkpointing), expected)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@pytest.mark.slow
def test_offloaded_weights_take_the_same_steps(make):
    check_close(two_steps(make, cpu_offload=True), two_steps(make))


@pytest.mark.slow
@pytest.mark.parametrize(("units", "of_layer"), [(["Qwen2MLP"], {"mlp"}), (3_000, {"self_attn", "mlp"})])
def test_other_units_of_sharding_take_the_same_steps(make, units, of_layer):
    trainer = make(fsdp_units=units)
    layer = trainer._model.lm.model.layers[1]
    assert {name for name, child in layer.named_children() if isinstance(child, FSDPModule)} == of_layer
    assert not isinstance(layer, FSDPModule)
    check_close(two_steps(make, fsdp_units=units, gradient_checkpointing=True), two_steps(make))


def test_units_are_classes_or_sizes_within_decoder_layers():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen2", vocab_size=64, num_key_value_heads=2, **sizes)
    lm: Any = AutoModelForCausalLM.from_config(config)
    layers = list(lm.model.layers)
    parts = [part for layer in layers for part in (layer.self_attn, layer.mlp)]
    assert sharding_units(lm, None) == sharding_units(lm, ["Qwen2DecoderLayer"]) == sharding_units(lm, 9_000) == layers
    assert sharding_units(lm, ["Qwen2Attention", "Qwen2MLP"]) == sharding_units(lm, 3_000) == parts
    # The matrices of the MLP have so many weights, those of the attention only together.
    small = [[a.self_attn, a.mlp.gate_proj, a.mlp.up_proj, a.mlp.down_proj] for a in layers]
    assert sharding_units(lm, 2_048) == [*small[0], *small[1]]
    for wrong in (["Qwen2MLP", "LlamaMLP"], ["Embedding"], 1_000_000):
        with pytest.raises(Refused, match=r"^train.fsdp_units: got .*Qwen2MLP \(6144\).*; change it, or leave it out"):
            sharding_units(lm, wrong)


class Moments(Offload):
    """Says what was asked of it: a CPU has one memory."""

    asked: ClassVar[list[str]] = []

    def come_back(self) -> None:
        self.asked.append("back")

    def leave(self, *, for_others: bool = True) -> int:
        assert not for_others
        self.asked.append("away")
        return 0


def test_moments_are_there_for_a_step_alone():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    optimizer.register_step_pre_hook(lambda *_: Moments.asked.append("step"))
    moments = Moments([], [optimizer], torch.device("cpu"))
    stepper = Stepper(optimizer, OptimizerConfig(), total_steps=9, moments=moments)
    for gradient in (1.0, float("nan")):  # the second step is skipped, and needs none
        weight.grad = torch.full((3,), gradient)
        stepper.step(0)
    assert Moments.asked == ["back", "step", "away"]


@pytest.mark.slow
def test_the_peak_of_memory_is_reported(make):
    trainer = make()
    trainer.forward_backward(batch_of(random_trajectories(1, 8)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    held = torch.ones(int((before + 0.25) * 2**28))  # more than ever before
    reported = trainer.optim_step()["train/peak_memory_gib"]
    assert before + 0.2 < reported < before + held.nbytes / 2**30 + 0.5


@pytest.mark.slow
def test_a_rank_that_is_alone_is_sharded_only_where_that_does_something(make):
    def is_sharded(**changes):
        return any(isinstance(p, DTensor) for p in make(**changes)._model.parameters())

    assert not is_sharded()
    assert not is_sharded(dtype="bfloat16")
    assert is_sharded(cpu_offload=True)
    assert is_sharded(forward_prefetch=1)
    assert is_sharded(fsdp_units=["Qwen2MLP"])
    check_close(two_steps(make, forward_prefetch=1), two_steps(make))
