"""Off-policy corrections: weights against the formulas, and the objective with its proximal policy, end to end."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.algorithms.corrections import NO_CORRECTION, Correction
from leeway.algorithms.objective import PolicyObjective

from .test_trainer import batch_of, make, model_path, random_trajectories  # noqa: F401  (fixtures)

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
@settings(max_examples=30, deadline=None)
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
    got = Correction(kind=kind, cap=cap, low=low, high=high, level=level).weights(
        torch.tensor(proximal, dtype=f64),
        torch.tensor(behavior, dtype=f64),
        mask=torch.tensor(mask),
        segments=torch.tensor(segments),
        advantages=torch.zeros(len(segments)),
    )
    for s, weight in enumerate(got.tolist()):
        others = [t for t in range(len(segments)) if segments[t] == segments[s] and mask[t]]
        terms = others if level == "sequence" else [s]
        ratio = math.exp(sum(proximal[t] - behavior[t] for t in terms))
        assert weight == pytest.approx(weight_formula(kind, ratio, cap=cap, low=low, high=high), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_huge_ratio_stays_finite(kind: str) -> None:
    weights = Correction(kind=kind).weights(
        torch.tensor([0.0, -500.0]),
        torch.tensor([-500.0, 0.0]),
        mask=torch.tensor([True, True]),
        segments=torch.tensor([0, 1]),
        advantages=torch.ones(2),
    )
    assert torch.isfinite(weights).all()


def tokens_of(*, behavior: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor) -> SimpleNamespace:
    count = len(behavior)
    return SimpleNamespace(
        segments=torch.arange(count) // 2,
        mask=torch.ones(count, dtype=torch.bool),
        behavior_logprobs=behavior,
        proximal_logprobs=proximal,
        policy_versions=torch.zeros(count, dtype=torch.int64),
        advantages=advantages,
    )


def objective_of(kind: str, **limits: float) -> PolicyObjective:
    return PolicyObjective(
        clip_low=0.2, clip_high=0.28, aggregation="token_mean", correction=Correction(kind=kind, **limits)
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
        counts = {"policy_version": 0, "num_sequences": 15, "num_tokens": 30}
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
    assert not NO_CORRECTION.needs_proximal
    assert all(Correction(kind=kind).needs_proximal for kind in KINDS[1:])


# ------------------------------------------------------------------------------------------------------ the trainer


def gradients(trainer) -> torch.Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in trainer._model.parameters() if p.grad is not None])


def test_scored_logprobs_come_back_in_the_batchs_order_however_it_was_cut(make, model_path: Path) -> None:  # noqa: F811
    batch = batch_of(random_trajectories(3, 9))
    whole = make().token_logprobs(batch)
    assert len(whole) == len(batch.response_tokens)
    assert (whole < 0).all()
    torch.testing.assert_close(make(max_tokens_per_microbatch=20).token_logprobs(batch), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(make(temperature=2.0).token_logprobs(batch) < 0, whole < 0)


def test_the_first_step_of_a_take_needs_no_scoring_and_later_ones_keep_the_takes_policy(make) -> None:  # noqa: F811
    """Scored now or not: the same gradient. One step later, only the kept scores give the take's ratio."""
    objective = PolicyObjective(
        clip_low=0.2, clip_high=0.28, aggregation="token_mean", correction=Correction(kind="decoupled")
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
    assert metrics["train/ratio/max"] > 1.001  # the weights moved since the take
    weights = (kept[1] - second.behavior_logprobs)[second.loss_mask].exp()
    assert metrics["train/correction_weight/max"] == pytest.approx(weights.max().item(), rel=1e-5)
