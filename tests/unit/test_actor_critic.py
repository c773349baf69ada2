"""The real trainer with its critic on a tiny Qwen2: against plain transformers, cut in any way, saved, resumed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from leeway.algorithms.critic import gae, outcome_rewards, value_loss
from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.objective import PolicyObjective
from leeway.config.learning import CriticConfig, OptimizerConfig
from leeway.trainer.actor import TrainerActor
from leeway.trainer.actor_critic import ActorCriticTrainer, make_trainer, step_inputs
from leeway.trainer.checkpoint import CheckpointError
from leeway.trainer.settings import TrainerSettings
from leeway.trainer.trainer import StalenessError, Trainer
from leeway.transports.transport import TransportSettings
from leeway.types import TrainBatch

from ..trainers import (
    OPTIMIZER,
    all_rows,
    batch_of,
    end_group,
    free_address,
    in_pairs,
    random_trajectories,
    settings_of,
)

CRITIC = {
    "lr": 0.3,
    "gamma": 0.97,
    "gae_lambda": 0.9,
    "value_lambda": 1.0,
    "value_clip": None,
    "whiten": True,
    "warmup_steps": 0,
}
OBJECTIVE = PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.2, dual_clip=3.0), aggregation="token_mean")


def critic_settings_of(path: Path, *, critic: dict[str, Any] | None = None, **changes: Any) -> TrainerSettings:
    return settings_of(path, **{"objective": OBJECTIVE, "critic": CriticConfig(**CRITIC | (critic or {}))} | changes)


@pytest.fixture
def make(model_path: Path, group_of_one_rank: None) -> Iterator[Callable[..., ActorCriticTrainer]]:
    """make(critic={...}, **settings) -> a trainer whose critic's head is not zero."""
    threads = torch.get_num_threads()

    def build(path: Path = model_path, **changes: Any) -> ActorCriticTrainer:
        trainer = ActorCriticTrainer(critic_settings_of(path, **changes), rank=0, init_method=free_address())
        fill_head(trainer)
        return trainer

    yield build
    torch.set_num_threads(threads)


def fill_head(trainer: ActorCriticTrainer) -> None:
    """The same numbers on any number of ranks."""
    head = trainer._critic.model.head
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in (head.weight, head.bias):
            numbers = torch.randn(parameter.shape, generator=generator) * 0.2
            if isinstance(parameter, DTensor):
                first = sum(_local_rows(parameter, rank) for rank in range(trainer._rank))
                local = parameter.to_local()
                local.copy_(numbers[first : first + len(local)])
            else:
                parameter.copy_(numbers)


def _local_rows(parameter: DTensor, rank: int) -> int:
    ranks = parameter.device_mesh.size()
    size = -(-parameter.shape[0] // ranks)
    return max(0, min(size, parameter.shape[0] - rank * size))


def full(parameter: torch.Tensor) -> torch.Tensor:
    return all_rows(parameter).detach().clone()


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in module.named_parameters()}


def critic_gradient(trainer: ActorCriticTrainer) -> torch.Tensor:
    return torch.cat([full(p.grad).flatten() for p in trainer._critic.model.parameters() if p.grad is not None])


def plain_values(trainer: ActorCriticTrainer, path: Path, trajectories: Sequence[Any]) -> tuple[Any, torch.Tensor]:
    """(body of plain transformers, values [S] of each sequence alone and unpadded, with a gradient)."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    head = weights(trainer._critic.model.head)
    values = []
    for t in trajectories:
        hidden = model.base_model(torch.tensor([[*t.prompt_tokens, *t.response_tokens]])).last_hidden_state[0]
        before = hidden[len(t.prompt_tokens) - 1 : -1]
        values.append((before @ head["weight"].T + head["bias"])[:, 0])
    return model.base_model, torch.cat(values)


def with_versions(trajectories: Sequence[Any], version: int) -> list[Any]:
    return [dataclasses.replace(t, policy_versions=[version if m else -1 for m in t.loss_mask]) for t in trajectories]


def step(trainer: Trainer, seed: int) -> dict[str, float]:
    batch = batch_of(in_pairs(random_trajectories(seed, 8)))
    metrics = trainer.forward_backward(batch) | trainer.optim_step()
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "_gib"))}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
@pytest.mark.parametrize("max_tokens", [10_000, 30])
def test_values_are_those_of_the_state_before_each_token(make, model_path, packing, max_tokens):
    trajectories = in_pairs(random_trajectories(4, 8))
    trainer = make(packing=packing, max_tokens_per_microbatch=max_tokens)
    _, expected = plain_values(trainer, model_path, trajectories)
    (estimates,) = trainer.estimate([batch_of(trajectories)])
    torch.testing.assert_close(estimates.values, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_critics_gradient_is_that_of_the_formula_and_does_not_depend_on_microbatches(make, model_path):
    trajectories = in_pairs(random_trajectories(5, 10))
    batch = batch_of(trajectories)
    where = {
        "mask": batch.loss_mask,
        "segments": torch.repeat_interleave(torch.arange(10), batch.response_lengths),
    }
    gradients, said = [], []
    for max_tokens, at_least in ((10_000, 1), (25, 5)):
        trainer = make(max_tokens_per_microbatch=max_tokens)
        assert len(list(trainer._passes(batch))) >= at_least
        said.append(trainer.forward_backward(batch))
        gradients.append(critic_gradient(trainer))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5 * gradients[0].norm().item())
    body, values = plain_values(trainer, model_path, trajectories)
    old = values.detach()
    rewards = outcome_rewards(batch.advantages, **where)
    returns = old + gae(old, rewards, **where, gamma=0.97, lam=1.0)
    loss = value_loss(values, old, returns, clip=None)[batch.loss_mask].mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in body.parameters() if p.grad is not None])
    got = gradients[0][: len(expected)]  # the head comes last
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.norm().item())
    assert said[0]["train/loss/value"] == pytest.approx(loss.item(), rel=1e-4)
    for name in ("train/loss/value", "train/value/explained_variance", "train/value/mean", "train/loss/policy"):
        assert said[1][name] == pytest.approx(said[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_the_policy_learns_from_whitened_estimates(make, model_path):
    batch = batch_of(in_pairs(random_trajectories(6, 8)))
    trainer = make()
    rates = [o.param_groups[0]["lr"] for o in (trainer._optimizer, trainer._critic.optimizer)]
    assert rates == [OPTIMIZER.lr, CRITIC["lr"]]
    (estimates,) = trainer.estimate([batch])
    sampled = estimates.advantages[batch.loss_mask]
    assert sampled.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert sampled.std().item() == pytest.approx(1.0, abs=1e-4)
    rewards_before = batch.advantages.clone()
    trainer.forward_backward(batch)
    assert torch.equal(batch.advantages, rewards_before), "a batch is read, not changed"
    got = {name: full(p.grad) for name, p in trainer._model.named_parameters()}
    plain = Trainer(settings_of(model_path, objective=OBJECTIVE), rank=0, init_method=free_address())
    batch.advantages = estimates.advantages
    plain.forward_backward(batch)
    for name, parameter in plain._model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(got[name], full(parameter.grad), msg=name)


def test_the_head_begins_at_zero_and_advantages_at_the_rewards(model_path, group_of_one_rank):
    settings = critic_settings_of(model_path, critic={"whiten": False, "gamma": 1.0, "gae_lambda": 1.0})
    trainer = ActorCriticTrainer(settings, rank=0, init_method=free_address())
    batch = batch_of(random_trajectories(1, 4))
    (estimates,) = trainer.estimate([batch])
    assert (estimates.values == 0).all()
    torch.testing.assert_close(estimates.advantages, torch.where(batch.loss_mask, batch.advantages, 0.0))


@pytest.mark.slow
def test_a_critic_learns_what_answers_are_worth(make):
    trajectories = random_trajectories(9, 6)
    trainer = make(critic={"lr": 3e-3, "warmup_steps": 60}, eps=1e-8)
    said = []
    for version in range(60):
        said.append(trainer.forward_backward(batch_of(with_versions(trajectories, version))) | trainer.optim_step())
    assert said[-1]["train/loss/value"] < 0.1 * said[0]["train/loss/value"]
    assert said[-1]["train/value/explained_variance"] > 0.9 > 0.5 > said[0]["train/value/explained_variance"]


@pytest.mark.slow
def test_in_its_warm_up_only_the_critic_learns(make):
    trainer = make(critic={"warmup_steps": 2})
    start, value_start = weights(trainer._model), weights(trainer._critic.model)
    for _ in range(2):
        metrics = step(trainer, 1)
        assert metrics["train/lr"] == 0.0
        assert all(torch.equal(start[name], now) for name, now in weights(trainer._model).items())
    assert trainer.policy_version == 2
    assert not any(torch.equal(value_start[n], now) for n, now in weights(trainer._critic.model).items())
    with pytest.raises(StalenessError):  # the bound holds in every step
        make(critic={"warmup_steps": 2}).forward_backward(batch_of(with_versions(random_trajectories(1, 4), 1)))
    trainer = make(critic={"warmup_steps": 1})
    step(trainer, 1)
    step(trainer, 1)
    assert not any(torch.equal(start[name], now) for name, now in weights(trainer._model).items())


@pytest.mark.slow
def test_a_batch_of_two_steps_is_estimated_and_whitened_once_under_the_weights_that_took_it(make):
    batches = [batch_of(in_pairs(random_trajectories(seed, 6)), seed=seed) for seed in (1, 2)]
    trainer = make(critic={"value_clip": 0.01})
    inputs = step_inputs(trainer, batches, needs_proximal=True)
    assert all({"proximal_logprobs", "estimates"} == set(step) for step in inputs)
    every = torch.cat([t["estimates"].advantages[b.loss_mask] for t, b in zip(inputs, batches, strict=True)])
    assert (every.mean().item(), every.std().item()) == pytest.approx((0.0, 1.0), abs=1e-4)
    alone = trainer.estimate(batches[:1])[0].advantages[batches[0].loss_mask]
    assert not torch.allclose(alone, inputs[0]["estimates"].advantages[batches[0].loss_mask], atol=1e-3)
    first = trainer.forward_backward(batches[0], **inputs[0]) | trainer.optim_step()
    second = trainer.forward_backward(batches[1], **inputs[1])
    assert first["train/value/clipped_frac"] == 0.0, "the values are those of the batch"
    assert second["train/value/clipped_frac"] > 0.0, "and stay them after a step"
    assert step_inputs(trainer, batches, needs_proximal=False)[0].keys() == {"estimates"}


@pytest.mark.slow
def test_the_actor_gives_each_step_the_inputs_that_were_computed_when_its_batch_began(make, model_path):
    """Without Ray: the class behind the actor, through two batches' calls and a run of another kind."""
    batches = [batch_of(in_pairs(random_trajectories(seed, 6)), seed=seed) for seed in (1, 2)]
    alone = make(critic={"value_clip": 0.01})
    inputs = step_inputs(alone, batches, needs_proximal=False)
    expected = [
        alone.forward_backward(batch, **known) | alone.optim_step()
        for batch, known in zip(batches, inputs, strict=True)
    ]
    end_group()

    async def through_the_actor(tmp: Path) -> tuple[list[dict[str, float]], dict[str, float]]:
        actor = TrainerActor(role="trainer-0", log_file=tmp, log_level="INFO", cores=[])
        transport = TransportSettings(name="files", folder=tmp.parent)
        settings = critic_settings_of(model_path, critic={"value_clip": 0.01})
        await actor.start(settings, 0, free_address(), transport)
        assert isinstance(actor._trainer, ActorCriticTrainer)
        fill_head(actor._trainer)
        await actor.score_batch(*batches)
        got = [(await actor.train_step(batch, False)).metrics for batch in batches]
        await actor.reset(settings_of(model_path, objective=OBJECTIVE), transport)
        return got, (await actor.train_step(batches[0], True)).metrics

    got, plain = asyncio.run(through_the_actor(model_path.parent / "trainer.log"))
    assert expected[1]["train/value/clipped_frac"] > 0
    for one, two in zip(got, expected, strict=True):
        assert {n: v for n, v in one.items() if not n.endswith(("_s", "_gib"))} == {
            n: v for n, v in two.items() if not n.endswith(("_s", "_gib"))
        }
    assert "train/loss/value" not in plain


@pytest.mark.slow
def test_many_runs_on_the_same_ranks_leave_no_threads_behind(model_path: Path) -> None:
    """A study is a hundred runs; each has process groups of its own."""

    async def through_the_actor() -> list[int]:
        actor = TrainerActor(role="trainer-0", log_file=model_path.parent / "many.log", log_level="INFO", cores=[])
        transport = TransportSettings(name="files", folder=model_path.parent)
        settings = settings_of(model_path, objective=OBJECTIVE)
        with patch("leeway.trainer.memory.keep_freed_memory") as keep:
            await actor.start(settings, 0, free_address(), transport)
        keep.assert_called_once()
        threads = []
        for _ in range(4):
            await actor.reset(settings, transport)
            threads.append(len(os.listdir("/proc/self/task")))
        return threads

    threads = asyncio.run(through_the_actor())
    assert threads[-1] <= threads[0] + 1


@pytest.mark.slow
def test_another_run_on_the_same_ranks_may_have_a_critic_or_none(make, model_path):
    first = make()
    expected = step(first, 1)
    place = {"rank": 0, "init_method": "unused"}
    plain = make_trainer(settings_of(model_path, objective=OBJECTIVE), **place)
    assert type(plain) is Trainer
    assert "train/loss/value" not in step(plain, 1)
    again = make_trainer(critic_settings_of(model_path), **place)
    assert isinstance(again, ActorCriticTrainer)
    fill_head(again)
    assert step(again, 1) == expected
    same = make_trainer(critic_settings_of(model_path), **place)
    assert isinstance(same, ActorCriticTrainer)
    fill_head(same)
    assert step(same, 1) == expected


@pytest.mark.slow
def test_measuring_leaves_no_trace_and_measures_both(make):
    batch = batch_of(random_trajectories(2, 4))
    measured = make(critic={"warmup_steps": 1})
    times = measured.measure(batch)
    assert times["forward_backward_s"] > 0
    assert all(p.grad is None for m in (measured._model, measured._critic.model) for p in m.parameters())
    got = [step(measured, seed) for seed in (1, 2)]
    fresh = make(critic={"warmup_steps": 1})
    assert [step(fresh, seed) for seed in (1, 2)] == got
    assert got[0]["train/lr"] == 0.0


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_same_critic(make, tmp_path):
    through = make(max_policy_lag=9)
    for seed in range(4):
        step(through, seed)
    first = make(max_policy_lag=9)
    for seed in range(2):
        step(first, seed)
    first.save_state(str(tmp_path / "state"))
    second = make(max_policy_lag=9)
    assert second.load_state(str(tmp_path / "state")) == 2
    for seed in range(2, 4):
        step(second, seed)
    for part in ("_model", "_critic"):
        expected, got = (weights(getattr(t, part) if part == "_model" else t._critic.model) for t in (through, second))
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.slow
def test_a_checkpoint_with_a_critic_is_not_one_without(make, model_path, tmp_path):
    trainer = make()
    trainer.save_state(str(tmp_path / "state"))
    plain = Trainer(settings_of(model_path, objective=OBJECTIVE), rank=0, init_method=free_address())
    with pytest.raises(CheckpointError, match=r"another model: .*critic\."):
        plain.load_state(str(tmp_path / "state"))


@pytest.mark.slow
def test_a_critic_of_another_vocabulary_is_refused(model_path, group_of_one_rank, tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path)
    config.vocab_size = 32
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = critic_settings_of(model_path, critic={"path": str(tmp_path)})
    with pytest.raises(ValueError, match=r"critic\.path: .* knows 32 tokens, expected the policy's 64"):
        ActorCriticTrainer(settings, rank=0, init_method=free_address())


def poison(trainer: ActorCriticTrainer) -> None:
    for parameter in trainer._critic.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(float("nan"))


@pytest.mark.slow
def test_a_critics_gradient_that_is_not_finite_is_skipped_like_the_policys(make):
    trainer = make(max_skipped_steps=1)
    critic, policy = weights(trainer._critic.model), weights(trainer._model)
    batch = batch_of(in_pairs(random_trajectories(0, 8)))
    trainer.forward_backward(batch)
    poison(trainer)
    metrics = trainer.optim_step()
    assert (metrics["train/value/skipped_steps"], metrics["train/skipped_steps"]) == (1, 0)
    assert all(torch.equal(tensor, critic[name]) for name, tensor in weights(trainer._critic.model).items())
    assert not torch.equal(weights(trainer._model)["lm.model.norm.weight"], policy["lm.model.norm.weight"])
    trainer.forward_backward(batch)
    poison(trainer)
    with pytest.raises(
        FloatingPointError, match=r"the critic's gradient norm is nan .* 1, 2 in a row.*lower critic\.lr"
    ):
        trainer.optim_step()


@pytest.mark.slow
def test_weight_decay_spares_the_critics_embeddings_and_head_where_it_is_of_hidden_matrices(make):
    trainer = make(decay="hidden_matrices", weight_decay=0.5)
    before = weights(trainer._critic.model)
    for parameter in trainer._critic.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer._critic.optim_step(0)
    kept = {name for name, tensor in weights(trainer._critic.model).items() if torch.equal(tensor, before[name])}
    assert {"lm.embed_tokens.weight", "head.weight", "head.bias", "lm.norm.weight"} <= kept
    assert "lm.layers.0.mlp.up_proj.weight" not in kept


@pytest.mark.slow
def test_the_critic_is_clipped_and_warms_up_by_itself(make):
    trainer = make(critic={"lr_warmup_steps": 10, "max_grad_norm": 1e-3}, warmup_steps=2, max_grad_norm=1e9)
    trainer.forward_backward(batch_of(in_pairs(random_trajectories(0, 8))))
    parameters = list(trainer._critic.model.parameters())
    clipped: list[float] = []
    trainer._critic.optimizer.register_step_pre_hook(
        lambda *_: clipped.append(sum(float(all_rows(p.grad).square().sum()) for p in parameters) ** 0.5)
    )
    said = trainer._critic._stepper.step(0)
    assert said["train/lr"] == pytest.approx(CRITIC["lr"] / 10)
    assert said["train/grad_norm"] > 1e-3
    assert clipped == [pytest.approx(1e-3, rel=1e-3)]
    of_policy, own = OptimizerConfig(max_grad_norm=1.0, warmup_frac=0.5), CriticConfig(max_grad_norm=0.25)
    assert (own.optimizer_of(of_policy).max_grad_norm, own.optimizer_of(of_policy).warmup_frac) == (0.25, 0.5)
    assert CriticConfig().optimizer_of(of_policy) == of_policy
    assert CriticConfig(lr_warmup_steps=0).optimizer_of(of_policy).warm_up(100) == 0


RANK_1 = """
from leeway.trainer.actor_critic import ActorCriticTrainer
from tests.unit.test_actor_critic import fill_head
settings, address, batches, folder = work
trainer = ActorCriticTrainer(settings, rank=1, init_method=address)
fill_head(trainer)
for steps in batches:
    for share, estimates in zip(steps, trainer.estimate(steps)):
        trainer.forward_backward(share, estimates=estimates)
        trainer.optim_step()
trainer.save_state(folder)
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_take_the_same_steps_as_one_and_one_goes_on_from_their_state(
    make,
    model_path,
    tmp_path,
    other_ranks,
):
    # Unequal shares: several passes against one, then a rank that has nothing at all.
    steps = [(in_pairs(random_trajectories(seed, 9)), split) for seed, split in ((0, 6), (1, 1), (2, 9), (3, 4))]

    def batches(share: Callable[[int], slice]) -> list[list[TrainBatch]]:
        shares = [batch_of(trajectories, share=share(split)) for trajectories, split in steps]
        return [shares[:2], shares[2:]]

    changes: dict[str, Any] = {"max_tokens_per_microbatch": 60, "max_policy_lag": 9, "critic": {"value_clip": 0.2}}
    settings, address = critic_settings_of(model_path, num_ranks=2, **changes), free_address()
    work = settings, address, batches(lambda split: slice(split, None)), str(tmp_path / "state")
    other_ranks.begin(RANK_1, {1: work})

    def run(trainer: ActorCriticTrainer, work: list[list[TrainBatch]]) -> list[dict[str, float]]:
        return [
            trainer.forward_backward(share, estimates=estimates) | trainer.optim_step()
            for shares in work
            for share, estimates in zip(shares, trainer.estimate(shares), strict=True)
        ]

    alone = make(**changes)
    expected = run(alone, batches(lambda _: slice(None)))
    both = weights(alone._model), weights(alone._critic.model)
    end_group()
    together = ActorCriticTrainer(settings, rank=0, init_method=address)
    fill_head(together)
    got = run(together, batches(lambda split: slice(0, split)))
    for one, two in zip(expected, got, strict=True):
        for name in one:
            if not name.endswith(("_s", "_gib", "tokens_in_pass")):
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    together.save_state(str(tmp_path / "state"))
    end_group()
    other_ranks.results()
    back = make(**changes)
    assert back.load_state(str(tmp_path / "state")) == 4
    for module, known in zip((back._model, back._critic.model), both, strict=True):
        for name, tensor in weights(module).items():
            torch.testing.assert_close(tensor, known[name], rtol=1e-5, atol=1e-5, msg=name)
