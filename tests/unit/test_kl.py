"""KL estimators as values and as gradients, the penalty in loss and reward, and the coefficient that adapts."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.kl import JSD, K1, KL_ESTIMATORS, KLPenalty, adapted_coefficient, penalties_to_go
from leeway.algorithms.losses import Reinforce
from leeway.algorithms.objective import PolicyObjective

f64 = torch.float64
COUNTS: dict[str, Any] = {"policy_version": 0, "num_sequences": 2, "num_tokens": 4}


def formula(how: str, logp: float, reference: float, behavior: float) -> float:
    d = logp - reference
    k3 = math.exp(-d) - 1 + d
    jsd = -0.5 * math.log((math.exp(-d) + 1) / 2)
    corrected = math.exp(logp - behavior) * k3
    return {"k1": d, "k2": d * d / 2, "k3": k3, "abs": abs(d), "corrected_k3": corrected, "jsd": jsd}[how]


@pytest.mark.parametrize("how", KL_ESTIMATORS)
def test_estimates_are_the_formula_and_their_gradient_too(how: str) -> None:
    rng = random.Random(0)
    logp, reference, behavior = ([rng.uniform(-4, 0) for _ in range(20)] for _ in range(3))
    x = torch.tensor(logp, dtype=f64, requires_grad=True)
    others = [torch.tensor(v, dtype=f64) for v in (reference, behavior)]
    got = KL_ESTIMATORS[how]()(x, *others)
    expected = [formula(how, *v) for v in zip(logp, reference, behavior, strict=True)]
    assert got.tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[how]()(x, *others), (x,))


@pytest.mark.parametrize("how", KL_ESTIMATORS)
@pytest.mark.parametrize("d", [-500.0, 500.0])
def test_policies_far_apart_stay_finite(how: str, d: float) -> None:
    x = torch.tensor([-1.0], requires_grad=True)
    got = KL_ESTIMATORS[how]()(x, torch.tensor([-1.0 - d]), torch.tensor([-1.0]))
    got.sum().backward()
    assert torch.isfinite(got).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


# Policies over a small vocabulary: sums over all of it, weighted by who sampled, are the estimators' means.
PI, REF, MU = (torch.tensor(p, dtype=f64) for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]))


def kl_and_gradient(loss_of_logprobs: Any) -> tuple[float, list[float]]:
    """Of a function of the policy's logprobs [V]: its value, and its gradient by the logits."""
    logits = PI.log().requires_grad_()
    value = loss_of_logprobs(torch.log_softmax(logits, -1))
    value.backward()
    assert logits.grad is not None
    return value.item(), logits.grad.tolist()


def sampled(how: str, by: torch.Tensor) -> tuple[float, list[float]]:
    return kl_and_gradient(lambda logp: (by * KL_ESTIMATORS[how]()(logp, REF.log(), by.log())).sum())


def test_the_means_and_mean_gradients_are_what_the_docs_say() -> None:
    reverse = kl_and_gradient(lambda logp: (logp.exp() * (logp - REF.log())).sum())
    forward = kl_and_gradient(lambda logp: (REF * (REF.log() - logp)).sum())
    for how in ("k1", "k3", "corrected_k3"):
        assert sampled(how, PI)[0] == pytest.approx(reverse[0])
    assert sampled("k1", PI)[1] == pytest.approx([0.0] * 3, abs=1e-12)
    assert sampled("k2", PI)[1] == pytest.approx(reverse[1])
    assert sampled("k3", PI)[1] == pytest.approx(forward[1])
    # Off policy only the corrected one still has both.
    assert sampled("corrected_k3", MU) == (pytest.approx(reverse[0]), pytest.approx(reverse[1]))
    assert sampled("k3", MU)[0] != pytest.approx(reverse[0], rel=1e-2)


def test_penalties_to_go_sum_over_the_rest_of_their_own_sequence() -> None:
    rng = random.Random(1)
    for _ in range(30):
        segments = [i for i in range(rng.randint(1, 5)) for _ in range(rng.randint(1, 5))]
        mask = [rng.random() < 0.7 for _ in segments]
        penalties = [rng.uniform(-1, 1) for _ in segments]
        expected = [
            sum(penalties[j] for j in range(i, len(segments)) if segments[j] == s and mask[j])
            for i, s in enumerate(segments)
        ]
        got = penalties_to_go(torch.tensor(penalties, dtype=f64), torch.tensor(mask), torch.tensor(segments))
        assert got.tolist() == pytest.approx(expected, abs=1e-12)
    assert penalties_to_go(torch.zeros(0), torch.zeros(0).bool(), torch.zeros(0).long()).tolist() == []


def test_the_coefficient_moves_towards_the_target_by_at_most_two_percent() -> None:
    assert adapted_coefficient(0.1, 0.2, target=0.2) == 0.1
    assert adapted_coefficient(0.1, 9.0, target=0.2) == pytest.approx(0.102)
    assert adapted_coefficient(0.1, 0.0, target=0.2) == pytest.approx(0.098)
    assert adapted_coefficient(0.1, 0.22, target=0.2) == pytest.approx(0.101)


# ------------------------------------------------------------------------------------------------ in the objective


def tokens() -> Any:
    return SimpleNamespace(
        segments=torch.tensor([0, 0, 0, 1, 1]),
        mask=torch.tensor([True, True, False, True, True]),
        behavior_logprobs=torch.tensor([-1.0, -2.0, 0.0, -0.5, -3.0], dtype=f64),
        reference_logprobs=torch.tensor([-1.5, -1.0, -7.0, -0.5, -2.0], dtype=f64),
        policy_versions=torch.zeros(5, dtype=torch.int64),
        advantages=torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0], dtype=f64),
    )


LOGPROBS = [-1.1, -1.7, -0.3, -0.6, -2.5]


def objective_of(**changes: Any) -> PolicyObjective:
    return PolicyObjective(**{"policy_loss": PPOClip(), "aggregation": "token_mean"} | changes)


def minimise(objective: PolicyObjective, entropy: torch.Tensor | None = None) -> tuple[float, list[float], Any]:
    logprobs = torch.tensor(LOGPROBS, dtype=f64, requires_grad=True)
    entropy = torch.ones(5, dtype=f64) if entropy is None else entropy
    loss = objective.loss(logprobs, entropy, tokens(), **COUNTS)
    loss.total.backward()
    assert logprobs.grad is not None
    return loss.total.item(), logprobs.grad.tolist(), objective.metrics(loss.sums, loss.maxima)


@pytest.mark.parametrize("how", KL_ESTIMATORS)
def test_a_penalty_in_the_loss_is_added_and_differentiated(how: str) -> None:
    plain, with_kl = (
        objective_of(),
        objective_of(kl=KLPenalty.model_construct(coef=0.3, estimator=KL_ESTIMATORS[how]())),
    )
    assert not plain.needs_reference
    assert with_kl.needs_reference
    t = tokens()
    real = [i for i in range(5) if t.mask[i]]

    def penalty(x: list[float]) -> float:
        terms = zip(x, t.reference_logprobs.tolist(), t.behavior_logprobs.tolist(), strict=True)
        values = [formula(how, *v) for v in terms]
        return sum(values[i] for i in real) / 4

    value, gradient, metrics = minimise(with_kl)
    before, gradient_before, metrics_before = minimise(plain)
    assert value - before == pytest.approx(0.3 * penalty(LOGPROBS), abs=1e-12)
    for i in range(5):
        up, down = ([x + s * 1e-6 if j == i else x for j, x in enumerate(LOGPROBS)] for s in (1, -1))
        slope = (penalty(up) - penalty(down)) / 2e-6
        assert gradient[i] - gradient_before[i] == pytest.approx(0.3 * slope, abs=1e-7)
    assert metrics["train/loss/policy"] == metrics_before["train/loss/policy"]
    assert metrics["train/reference_kl/mean"] == pytest.approx(penalty(LOGPROBS))
    assert metrics["train/reference_kl/coefficient"] == 0.3
    assert not [name for name in metrics_before if "reference" in name]


def test_a_penalty_in_the_reward_is_taken_off_what_each_token_still_earns() -> None:
    objective = objective_of(policy_loss=Reinforce(), kl=KLPenalty(coef=0.5, estimator=K1(), where="reward"))
    value, gradient, metrics = minimise(objective)
    # k1 of the sampling policy: 0.5, -1 in the first sequence, 0, -1 in the second; what is masked has none.
    advantages = [1 - 0.5 * (0.5 - 1.0), 1 - 0.5 * -1.0, 0.0, -2 - 0.5 * -1.0, -2 - 0.5 * -1.0]
    assert gradient == pytest.approx([-a / 4 for a in advantages])
    assert value == pytest.approx(-sum(a * x for a, x in zip(advantages, LOGPROBS, strict=True)) / 4)
    assert metrics["train/reference_kl/mean"] == pytest.approx((0.5 - 1.0 + 0.0 - 1.0) / 4)


def test_on_policy_distillation_teaches_each_token_the_teachers_preference() -> None:
    objective = objective_of(policy_loss=Reinforce(), kl=KLPenalty(coef=1.0, estimator=K1(), where="token"))
    logprobs = torch.tensor(LOGPROBS, dtype=f64, requires_grad=True)
    t = tokens()
    t.advantages = torch.zeros(5, dtype=f64)
    objective.loss(logprobs, torch.ones(5), t, **COUNTS).total.backward()
    teacher_less_student = t.reference_logprobs - t.behavior_logprobs
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.where(t.mask, -teacher_less_student / 4, 0.0))


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_the_sampled_token_alone_teaches_the_whole_jensen_shannon_divergence(beta: float) -> None:
    """Over all of a small vocabulary, weighted by the policy: the gradient of the divergence summed over it."""

    def divergence(logp: torch.Tensor) -> torch.Tensor:
        p = logp.exp()
        middle = (beta * REF + (1 - beta) * p).log()
        return beta * (REF * (REF.log() - middle)).sum() + (1 - beta) * (p * (logp - middle)).sum()

    def student_half(logp: torch.Tensor) -> float:
        p = logp.exp()
        return ((1 - beta) * (p * (logp - (beta * REF + (1 - beta) * p).log())).sum()).item()

    penalty = JSD(beta=beta)(PI.log(), REF.log(), PI.log())
    advantages = -penalty
    _, gradient = kl_and_gradient(lambda logp: -(PI * advantages * logp).sum())
    assert gradient == pytest.approx(kl_and_gradient(divergence)[1], abs=1e-12)
    assert (PI * penalty).sum().item() == pytest.approx(student_half(PI.log()), abs=1e-12)


def test_jsd_in_the_objective_is_the_tokens_advantage_with_its_own_beta() -> None:
    kl = KLPenalty(coef=2.0, estimator=JSD(beta=0.2), where="token")
    objective = objective_of(policy_loss=Reinforce(), kl=kl)
    t = tokens()
    ratios = (t.reference_logprobs - t.behavior_logprobs).exp()
    advantages = t.advantages + 2.0 * 0.8 * (0.2 * ratios + 0.8).log()
    _, gradient, _ = minimise(objective)
    assert gradient == pytest.approx(torch.where(t.mask, -advantages / 4, 0.0).tolist())


def test_the_next_steps_objective_has_the_adapted_coefficient() -> None:
    fixed = objective_of(kl=KLPenalty(coef=0.3))
    assert fixed.after_step({"train/reference_kl/mean": 9.0}) is fixed
    moving = objective_of(kl=KLPenalty(coef=0.3, target=0.01))
    assert moving.after_step({"train/reference_kl/mean": 9.0}).kl.coef == pytest.approx(0.306)
    assert moving.after_step({}) is moving  # a step in which nothing was trained says nothing


def test_the_entropy_bonus_is_subtracted_with_its_gradient() -> None:
    entropy = torch.tensor([1.0, 2.0, 50.0, 3.0, 4.0], dtype=f64, requires_grad=True)
    with_bonus = objective_of(entropy_coef=0.1)
    assert with_bonus.needs_entropy_gradient
    assert not objective_of().needs_entropy_gradient
    value, _, metrics = minimise(with_bonus, entropy)
    assert minimise(objective_of())[0] - value == pytest.approx(0.1 * 10.0 / 4)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.025, 0.0, -0.025, -0.025])
    assert metrics["train/entropy/mean"] == 2.5
