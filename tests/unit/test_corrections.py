"""Off-policy corrections: weights against the formulas, and the objective with its proximal policy, end to end."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.algorithms.corrections import (
    M2PO,
    CorrectionInputs,
    Decoupled,
    NoCorrection,
    interpolated_proximal,
    sequence_mask,
)
from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.kl import K1, KLPenalty
from leeway.algorithms.objective import PolicyObjective
from leeway.algorithms.presets import CORRECTIONS

from ..tiers import sample
from ..trainers import all_rows, batch_of, random_trajectories

f64 = torch.float64
KINDS = ("none", "decoupled", "tis", "icepop", "mis")


def weight_formula(kind: str, ratio: float, *, cap: float, low: float, high: float) -> float:
    inside = low <= ratio <= high
    return {
        "none": 1.0,
        "decoupled": ratio,
        "tis": min(ratio, cap),
        "icepop": ratio if inside else 0.0,
        "mis": 1.0 if inside else 0.0,
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@settings(max_examples=sample(10, 30), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
    low=st.floats(0.1, 1.0),
    high=st.floats(1.0, 5.0),
    cap=st.floats(0.5, 5.0),
)
def test_weights_are_the_formula(
    kind: str, level: str, lengths: list[int], seed: int, low: float, high: float, cap: float
) -> None:
    rng = random.Random(seed)
    segments = [i for i, length in enumerate(lengths) for _ in range(length)]
    proximal = [rng.uniform(-3, 0) for _ in segments]
    behavior = [rng.uniform(-3, 0) for _ in segments]
    mask = [rng.random() < 0.7 for _ in segments]
    cls, options = CORRECTIONS[kind], {"cap": cap, "low": low, "high": high, "level": level}
    got = cls(**{name: value for name, value in options.items() if name in cls.model_fields}).weights(
        CorrectionInputs(
            torch.tensor(proximal, dtype=f64),
            torch.tensor(behavior, dtype=f64),
            torch.zeros(len(segments)),
            torch.tensor(mask),
            torch.tensor(segments),
        )
    )
    for s, weight in enumerate(got.tolist()):
        others = [t for t in range(len(segments)) if segments[t] == segments[s] and mask[t]]
        terms = others if level == "sequence" else [s]
        ratio = math.exp(sum(proximal[t] - behavior[t] for t in terms))
        assert weight == pytest.approx(weight_formula(kind, ratio, cap=cap, low=low, high=high), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_huge_ratio_stays_finite(kind: str) -> None:
    ends = torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])
    weights = CORRECTIONS[kind]().weights(
        CorrectionInputs(*ends, torch.ones(2), torch.tensor([True, True]), torch.tensor([0, 1]))
    )
    assert torch.isfinite(weights).all()


def tokens_of(*, behavior: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor) -> Any:
    count = len(behavior)
    return SimpleNamespace(
        segments=torch.arange(count) // 2,
        mask=torch.ones(count, dtype=torch.bool),
        behavior_logprobs=behavior,
        proximal_logprobs=proximal,
        policy_versions=torch.zeros(count, dtype=torch.int64),
        advantages=advantages,
    )


def objective_of(kind: str, **limits: Any) -> PolicyObjective:
    return PolicyObjective(
        policy_loss=PPOClip(clip_low=0.2, clip_high=0.28),
        aggregation="token_mean",
        correction=CORRECTIONS[kind](**limits),
    )


def test_the_decoupled_loss_clips_against_the_proximal_policy_and_weighs_by_the_behaviour_policy() -> None:
    torch.manual_seed(0)
    behavior, proximal, advantages = (torch.rand(40, dtype=f64) - 1.5, torch.rand(40, dtype=f64) - 1.5, torch.randn(40))
    logp = (proximal + 0.6 * (torch.rand(40, dtype=f64) - 0.5)).requires_grad_()
    tokens = tokens_of(behavior=behavior, proximal=proximal, advantages=advantages.to(f64))
    loss = objective_of("decoupled").loss(
        logp, -logp.detach(), tokens, policy_version=3, num_sequences=20, num_tokens=40
    )
    loss.total.backward()
    total, gradient = 0.0, []
    for x, p, m, a in zip(logp.tolist(), proximal.tolist(), behavior.tolist(), tokens.advantages.tolist(), strict=True):
        ratio, weight = math.exp(x - p), math.exp(p - m)
        clipped = min(max(ratio, 0.8), 1.28)
        total -= weight * min(ratio * a, clipped * a) / 40
        acts = (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
        gradient.append(0.0 if acts else -weight * ratio * a / 40)
    assert loss.total.item() == pytest.approx(total, abs=1e-12)
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    metrics = objective_of("decoupled").metrics(loss.sums, loss.maxima)
    assert metrics["train/correction_weight/max"] == pytest.approx((proximal - behavior).exp().max().item())
    assert metrics["train/ratio/max"] == pytest.approx((logp - proximal).exp().max().item())
    assert 0 < metrics["train/ess_frac"] < 1


@pytest.mark.parametrize("kind", KINDS[1:])
def test_at_lag_0_every_correction_is_plain_ppo(kind: str) -> None:
    torch.manual_seed(1)
    behavior, advantages = torch.rand(30, dtype=f64) - 1.5, torch.randn(30, dtype=f64)
    tokens = tokens_of(behavior=behavior, proximal=behavior.clone(), advantages=advantages)
    gradients = []
    for name in ("none", kind):
        logp = behavior + 0.4 * (torch.rand(30, dtype=f64, generator=torch.Generator().manual_seed(2)) - 0.5)
        logp.requires_grad_()
        counts: Any = {"policy_version": 0, "num_sequences": 15, "num_tokens": 30}
        objective_of(name).loss(logp, -logp.detach(), tokens, **counts).total.backward()
        gradients.append(logp.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_masked_tokens_get_no_gradient_and_are_counted() -> None:
    behavior = torch.tensor([-1.0, -1.0], dtype=f64)
    proximal = torch.tensor([-1.0, 0.0], dtype=f64)  # ratios 1 and e
    logp = proximal.clone().requires_grad_()
    tokens = tokens_of(behavior=behavior, proximal=proximal, advantages=torch.ones(2, dtype=f64))
    loss = objective_of("mis", high=2.0).loss(
        logp, -logp.detach(), tokens, policy_version=0, num_sequences=1, num_tokens=2
    )
    loss.total.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [-0.5, 0.0]
    assert objective_of("mis").metrics(loss.sums, loss.maxima)["train/correction_weight/masked_frac"] == 0.5


def test_none_needs_no_proximal_policy() -> None:
    assert not NoCorrection().needs_proximal
    assert all(CORRECTIONS[kind]().needs_proximal for kind in KINDS[1:])


# -------------------------------------------------------------------------------------- m2po, interpolation, masking


def second_moment_formula(squares: list[float], bound: float) -> list[bool]:
    """Drop the largest one by one until the mean of the rest is small enough: which are kept."""
    kept = [True] * len(squares)
    while any(kept) and sum(s for s, k in zip(squares, kept, strict=True) if k) / sum(kept) > bound:
        kept[max((i for i, k in enumerate(kept) if k), key=lambda i: squares[i])] = False
    return kept


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(squares=st.lists(st.floats(0, 1), max_size=12, unique=True), bound=st.floats(0.001, 0.5))
def test_m2pos_cut_leaves_the_second_moment_below_its_bound(squares: list[float], bound: float) -> None:
    limit = M2PO(second_moment=bound).limit_of_step(torch.tensor(squares, dtype=f64))
    assert [s < limit for s in squares] == second_moment_formula(squares, bound)


def test_m2po_drops_only_what_is_pushed_further() -> None:
    log_ratios, advantages = [0.1, 1.0, 1.0, -1.0, -1.0, 0.0], [1.0, 1.0, -1.0, -1.0, 1.0, 1.0]
    behavior = torch.full((6,), -2.0, dtype=f64)
    proximal, adv = behavior + torch.tensor(log_ratios, dtype=f64), torch.tensor(advantages, dtype=f64)
    mask = torch.tensor([True] * 6)
    correction = M2PO(second_moment=0.04)
    x = CorrectionInputs(proximal, behavior, adv, mask, torch.arange(6))
    squares = correction.step_values(x)
    assert squares.tolist() == pytest.approx([0.01, 1.0, 1.0])
    got = correction.weights(x._replace(limit=correction.limit_of_step(squares)))
    kept = [True, False, True, False, True, True]
    assert got.tolist() == pytest.approx([math.exp(x) * k for x, k in zip(log_ratios, kept, strict=True)])


def test_what_a_penalty_pushes_further_counts_for_m2po() -> None:
    batch = batch_of(random_trajectories(6, 8))
    batch.advantages.zero_()  # a distillation has no other
    objective = PolicyObjective(
        aggregation="token_mean",
        correction=M2PO(second_moment=0.04),
        kl=KLPenalty(coef=1.0, where="token", estimator=K1()),
    )
    behavior = batch.behavior_logprobs
    values = objective.step_values(batch, behavior + 1.0, behavior + 2.0)
    assert len(values) == int((batch.loss_mask & (batch.policy_versions >= 0)).sum())
    assert len(objective.step_values(batch, behavior + 1.0, behavior - 2.0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("correction", [M2PO(second_moment=2.0), CORRECTIONS["tis"](), CORRECTIONS["decoupled"]()])
def test_what_is_held_out_is_measured_as_it_would_be_trained_on(make, correction: Any) -> None:
    batch = batch_of(random_trajectories(6, 8))
    trainer = make(objective=PolicyObjective(aggregation="token_mean", correction=correction))
    held_out, trained = trainer.evaluate(batch), trainer.forward_backward(batch)
    for name in ("train/loss/policy", "train/correction_weight/mean", "train/correction_weight/masked_frac"):
        assert held_out[name] == pytest.approx(trained[name], rel=1e-6), name
    assert trained["train/correction_weight/mean"] != 1.0


@pytest.mark.slow
def test_m2po_cuts_over_the_whole_step_however_it_was_cut_into_microbatches(make) -> None:
    objective = PolicyObjective(
        policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="token_mean", correction=M2PO(second_moment=2.0)
    )
    batch = batch_of(random_trajectories(6, 8))
    found = []
    for limit in (10_000, 20):
        trainer = make(objective=objective, max_tokens_per_microbatch=limit)
        metrics = trainer.forward_backward(batch)
        found.append((gradients(trainer), metrics["train/correction_weight/masked_frac"]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    assert 0 < found[0][1] == found[1][1] < 1


def test_the_interpolated_policy_lies_between_mu_and_pi_by_lag() -> None:
    logp, behavior = torch.tensor([-1.0] * 4, dtype=f64), torch.tensor([-2.0] * 4, dtype=f64)
    got = interpolated_proximal(logp.requires_grad_(), behavior, torch.tensor([0, 1, 2, 4]))
    assert got.tolist() == [-2.0, -2.0, -1.5, -1.25]
    assert not got.requires_grad


def test_interpolated_decoupled_is_plain_ppo_up_to_lag_1_and_needs_no_scoring() -> None:
    correction = Decoupled(proximal="interpolate")
    assert not correction.needs_proximal
    behavior, advantages = torch.rand(20, dtype=f64) - 1.5, torch.randn(20, dtype=f64)
    tokens = tokens_of(behavior=behavior, proximal=behavior + 99.0, advantages=advantages)  # never read
    results = []
    for c, version in ((NoCorrection(), 1), (correction, 1), (correction, 3)):
        objective = PolicyObjective(
            policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="token_mean", correction=c
        )
        logp = (behavior + 0.5).requires_grad_()
        objective.loss(
            logp, -logp.detach(), tokens, policy_version=version, num_sequences=10, num_tokens=20
        ).total.backward()
        results.append(logp.grad)
    assert torch.equal(results[0], results[1])
    # At lag 3 two thirds of the way are done: pi / prox is e^(1/6), inside the range, and prox / mu e^(1/3).
    torch.testing.assert_close(results[2], -advantages * math.exp(0.5) / 20)


def test_sequences_that_the_policy_has_left_behind_are_masked() -> None:
    behavior = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, 0.0], dtype=f64)
    logp = torch.tensor([-2.0, -1.5, -2.0, -1.5, -1.2, -9.0], dtype=f64)
    arguments = {
        "mask": torch.tensor([True, True, True, True, True, False]),
        "segments": torch.tensor([0, 0, 1, 1, 2, 2]),
        "bound": 0.5,
    }
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=f64)
    # Means of log(mu / pi): 0.75, 0.75 but a good answer, and 0.2 over the one token that counts.
    assert sequence_mask(logp, behavior, advantages, **arguments).tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    objective = PolicyObjective(
        policy_loss=PPOClip(clip_low=0.2, clip_high=0.28),
        aggregation="token_mean",
        correction=NoCorrection(mask_divergence=0.5),
    )
    assert not objective.needs_proximal
    x = logp.clone().requires_grad_()
    tokens = tokens_of(behavior=behavior, proximal=behavior, advantages=advantages)
    tokens.mask = arguments["mask"]
    objective.loss(x, -x.detach(), tokens, policy_version=0, num_sequences=3, num_tokens=5).total.backward()
    assert x.grad is not None
    assert [bool(g) for g in x.grad.tolist()] == [False, False, True, True, True, False]


# ------------------------------------------------------------------------------------------------------ the trainer


def gradients(trainer) -> torch.Tensor:
    return torch.cat([all_rows(p.grad).flatten() for p in trainer._model.parameters() if p.grad is not None])


@pytest.mark.slow
def test_scored_logprobs_come_back_in_the_batchs_order_however_it_was_cut(make, model_path: Path) -> None:
    batch = batch_of(random_trajectories(3, 9))
    whole = make().token_logprobs(batch)
    assert len(whole) == len(batch.response_tokens)
    assert (whole < 0).all()
    torch.testing.assert_close(make(max_tokens_per_microbatch=20).token_logprobs(batch), whole, rtol=0, atol=1e-5)
    warmer = make().token_logprobs(batch_of(random_trajectories(3, 9), temperature=2.0))
    assert not torch.allclose(warmer, whole)


@pytest.mark.slow
def test_the_first_step_of_a_batch_needs_no_scoring_and_later_ones_keep_the_batchs_policy(make) -> None:
    """Scored now or not: the same gradient. One step later, only the kept scores give the batch's ratio."""
    objective = PolicyObjective(
        policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="token_mean", correction=Decoupled()
    )
    trainer = make(objective=objective)
    first, second = batch_of(random_trajectories(4, 6)), batch_of(random_trajectories(5, 6))
    kept = [trainer.token_logprobs(first), trainer.token_logprobs(second)]
    trainer.forward_backward(first)
    unscored = gradients(trainer)
    trainer._optimizer.zero_grad()
    metrics = trainer.forward_backward(first, proximal_logprobs=kept[0])
    torch.testing.assert_close(gradients(trainer), unscored, rtol=1e-4, atol=1e-6)
    assert metrics["train/ratio/max"] == pytest.approx(1.0, abs=1e-5)
    trainer.optim_step()
    metrics = trainer.forward_backward(second, proximal_logprobs=kept[1])
    assert metrics["train/ratio/max"] > 1.001  # the weights moved since the batch
    weights = (kept[1] - second.behavior_logprobs)[second.loss_mask].exp()
    assert metrics["train/correction_weight/max"] == pytest.approx(weights.max().item(), rel=1e-5)
