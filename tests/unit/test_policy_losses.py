"""Every policy loss against a second implementation from its paper's formula, in plain float64 Python.

Where a formula stops a gradient, the second implementation takes that part from `frozen`; its gradient is then the
central difference over everything else.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.algorithms.aggregation import AGGREGATIONS, aggregate
from leeway.algorithms.losses import LossInputs
from leeway.algorithms.presets import POLICY_LOSSES

from ..tiers import slow_but_for

f64 = torch.float64
LOW, HIGH = 0.2, 0.28
Lists = list[Any]


REC_CLIPS = ("none", "one_side", "two_side", "ring")


def loss_of(name: str, options: dict[str, Any] | None = None) -> Callable[..., torch.Tensor]:
    """A loss with our clip range, where it has one."""
    cls: Any = POLICY_LOSSES[name]
    clips = {"clip_low": LOW, "clip_high": HIGH} if "clip_low" in cls.model_fields else {}
    piece = cls(**clips | (options or {}))
    return lambda *tensors: piece(LossInputs(*tensors))


class Case:
    """Ragged sequences with masks, as lists. Ratios keep clear of the kinks, where no difference is a derivative."""

    def __init__(self, seed: int, *, lengths: list[int] | None = None, spread: float = 1.0) -> None:
        rng = random.Random(seed)
        lengths = lengths or [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        self.segments = [i for i, n in enumerate(lengths) for _ in range(n)]
        self.mask = [rng.random() < 0.75 for _ in self.segments]
        per_sequence = [rng.choice((0.0, 1.0, -1.0, rng.uniform(-2, 2))) for _ in lengths]
        self.advantages = [per_sequence[s] for s in self.segments]
        self.logprobs = [rng.uniform(-3, -0.1) for _ in self.segments]
        ratios = [rng.choice((0.3, 0.7, 0.9, 1.0, 1.1, 1.25, 1.5, 4.0)) for _ in self.segments]
        self.old = [x - spread * math.log(r) for x, r in zip(self.logprobs, ratios, strict=True)]

    def inside(self, segment: int) -> list[int]:
        return [i for i, s in enumerate(self.segments) if s == segment and self.mask[i]]

    def ours(self, name: str, logprobs: torch.Tensor, **options: Any) -> torch.Tensor:
        return loss_of(name, options)(
            logprobs,
            torch.tensor(self.old, dtype=f64),
            torch.tensor(self.advantages, dtype=f64),
            torch.tensor(self.mask),
            torch.tensor(self.segments),
        )


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(logp: float, old: float, a: float) -> float:
    r = math.exp(logp - old)
    return -min(r * a, clip(r, 1 - LOW, 1 + HIGH) * a)


def per_token(formula: Callable[[float, float, float, float], float]) -> Callable[[Case, Lists, Lists], Lists]:
    """From a formula of one token (logp, frozen logp, old logp, advantage)."""
    return lambda case, x, frozen: [formula(*t) for t in zip(x, frozen, case.old, case.advantages, strict=True)]


def gspo(case: Case, x: Lists, frozen: Lists) -> Lists:
    out = []
    for s, a in zip(case.segments, case.advantages, strict=True):
        inside = case.inside(s)
        mean = sum(x[i] - case.old[i] for i in inside) / len(inside) if inside else 0.0
        ratio = math.exp(mean)
        out.append(-min(ratio * a, clip(ratio, 1 - LOW, 1 + HIGH) * a))
    return out


def topr(case: Case, x: Lists, frozen: Lists) -> Lists:
    out = []
    for i, s in enumerate(case.segments):
        ratio = math.exp(sum(frozen[j] - case.old[j] for j in case.inside(s)))
        weight = 1.0 if case.advantages[i] > 0 else clip(ratio, 0.0, 1.0)
        out.append(-weight * case.advantages[i] * x[i])
    return out


def kimi(case: Case, x: Lists, frozen: Lists) -> Lists:
    out = []
    for i, s in enumerate(case.segments):
        inside = case.inside(s)
        log_ratio = sum(x[j] - case.old[j] for j in inside)
        out.append(-case.advantages[i] * x[i] + 0.1 / 2 * log_ratio**2 / max(len(inside), 1))
    return out


def sapo(logp: float, frozen: float, old: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(logp - old) - 1))) * a


def sppo(logp: float, frozen: float, old: float, a: float) -> float:
    return -a * (logp - old) if 1 / 1.3 <= math.exp(frozen - old) <= 1.3 else 0.0


def rec(how: str, importance: bool) -> Callable[[float, float, float, float], float]:
    def formula(logp: float, frozen: float, old: float, a: float) -> float:
        r = math.exp(frozen - old)
        within = 1 - LOW <= r <= 1 + HIGH
        keep = {
            "none": True,
            "one_side": r <= 1 + HIGH if a > 0 else r >= 1 - LOW,
            "two_side": within,
            "ring": within or (a > 0 and r <= 1 - 0.6) or (a < 0 and r >= 1 + 2.0),
        }[how]
        return -a * logp * (r if importance else 1.0) if keep or a == 0 else 0.0

    return formula


def cispo(logp: float, frozen: float, old: float, a: float) -> float:
    return -clip(math.exp(frozen - old), 1 - LOW, 1 + HIGH) * a * logp


FORMULAS: dict[str, tuple[str, dict[str, Any], Callable[[Case, Lists, Lists], Lists]]] = {
    "ppo_clip": ("ppo_clip", {}, per_token(lambda x, _, old, a: ppo(x, old, a))),
    "gspo": ("gspo", {}, gspo),
    "cispo": ("cispo", {}, per_token(cispo)),
    "sapo": ("sapo", {}, per_token(sapo)),
    "reinforce": ("reinforce", {}, per_token(lambda x, _, old, a: -a * x)),
    "topr": ("topr", {}, topr),
    "opmd": ("opmd", {"tau": 3.0}, per_token(lambda x, _, old, a: -a * x / 4)),
    "opmd_kimi": ("opmd_kimi", {}, kimi),
    "sppo": ("sppo", {}, per_token(sppo)),
} | {
    f"rec {how} {importance}": ("rec", {"clip": how, "importance_weight": importance}, per_token(rec(how, importance)))
    for how in REC_CLIPS
    for importance in (False, True)
}


def test_every_registered_loss_has_a_formula_here() -> None:
    assert {name for name, _, _ in FORMULAS.values()} == set(POLICY_LOSSES)


def differences(function: Callable[[Lists], float], x: Lists, step: float = 1e-6) -> Lists:
    out = []
    for i in range(len(x)):
        up, down = ([*x[:i], x[i] + sign * step, *x[i + 1 :]] for sign in (1, -1))
        out.append((function(up) - function(down)) / (2 * step))
    return out


def masked_sum(losses: Lists, mask: Lists) -> float:
    return sum(loss for loss, m in zip(losses, mask, strict=True) if m)


@pytest.mark.parametrize("which", FORMULAS)
def test_value_and_gradient_are_the_formulas(which: str) -> None:
    name, options, formula = FORMULAS[which]
    for seed in range(12):
        case = Case(seed)
        logprobs = torch.tensor(case.logprobs, dtype=f64, requires_grad=True)
        losses = case.ours(name, logprobs, **options)
        expected = formula(case, case.logprobs, case.logprobs)
        for i, counts in enumerate(case.mask):
            assert not counts or losses[i].item() == pytest.approx(expected[i], abs=1e-12), f"seed {seed}, token {i}"
        torch.where(torch.tensor(case.mask), losses, 0.0).sum().backward()
        assert logprobs.grad is not None
        numeric = differences(lambda x: masked_sum(formula(case, x, case.logprobs), case.mask), case.logprobs)  # noqa: B023
        assert logprobs.grad.tolist() == pytest.approx(numeric, abs=1e-6), f"seed {seed}"


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "sapo", "opmd_kimi", "reinforce", "opmd", "sppo"])
def test_losses_without_a_stopped_gradient_pass_gradcheck(name: str) -> None:
    case = Case(3, lengths=[1, 4, 2])
    mask = torch.tensor(case.mask)
    logprobs = torch.tensor(case.logprobs, dtype=f64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torch.where(mask, case.ours(name, x), 0.0).sum(), (logprobs,))


@pytest.mark.parametrize("which", FORMULAS)
def test_huge_log_ratios_stay_finite(which: str) -> None:
    name, options, _ = FORMULAS[which]
    for log_ratio, advantage in itertools.product([-500.0, -80.0, 80.0, 500.0], [1.0, 0.0, -1.0]):
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        losses = loss_of(name, options)(
            logprobs,
            logprobs.detach() - log_ratio,
            torch.full((2,), advantage),
            torch.tensor([True, True]),
            torch.tensor([0, 0]),
        )
        losses.sum().backward()
        assert torch.isfinite(losses).all(), (log_ratio, advantage)
        assert logprobs.grad is not None
        assert torch.isfinite(logprobs.grad).all(), (log_ratio, advantage)


@pytest.mark.parametrize("which", FORMULAS)
def test_nothing_to_train_on_and_one_token(which: str) -> None:
    name, options, formula = FORMULAS[which]
    case = Case(1, lengths=[2, 1])
    case.mask = [False] * 3
    logprobs = torch.tensor(case.logprobs, dtype=f64, requires_grad=True)
    torch.where(torch.tensor(case.mask), case.ours(name, logprobs, **options), 0.0).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0] * 3
    none = torch.zeros(0, dtype=f64, requires_grad=True)
    nothing = loss_of(name, options)(none, none.detach(), none.detach(), torch.zeros(0).bool(), torch.zeros(0).long())
    nothing.sum().backward()  # a rank that has run out of work takes part all the same
    one = Case(2, lengths=[1])
    one.mask = [True]
    got = one.ours(name, torch.tensor(one.logprobs, dtype=f64), **options)
    assert got.tolist() == pytest.approx(formula(one, one.logprobs, one.logprobs), abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.randoms(use_true_random=False))
@pytest.mark.parametrize("which", slow_but_for([*FORMULAS][:3], FORMULAS))
def test_the_order_of_sequences_and_what_stands_at_masked_tokens_change_nothing(which: str, seed: int, order) -> None:
    name, options, _ = FORMULAS[which]
    case = Case(seed, lengths=[2, 1, 4, 3])

    def gradient(of: Case) -> list[float]:
        logprobs = torch.tensor(of.logprobs, dtype=f64, requires_grad=True)
        torch.where(torch.tensor(of.mask), of.ours(name, logprobs, **options), 0.0).sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad.tolist()

    permutation = [0, 1, 2, 3]
    order.shuffle(permutation)
    places = [i for s in permutation for i, t in enumerate(case.segments) if t == s]
    other = Case(0, lengths=[1])
    other.segments = [permutation.index(case.segments[i]) for i in places]
    for field in ("mask", "advantages", "logprobs", "old"):
        setattr(other, field, [getattr(case, field)[i] for i in places])
    for i, counts in enumerate(other.mask):
        if not counts:
            other.logprobs[i], other.old[i] = -order.uniform(0, 9), 0.0
    before = gradient(case)
    assert gradient(other) == pytest.approx([before[i] for i in places], abs=1e-12)


# ------------------------------------------------------------------------------------- relations between objectives


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "sapo", "topr", "sppo", "rec"])
def test_on_policy_the_gradient_is_that_of_reinforce(name: str) -> None:
    case = Case(5, lengths=[3, 2, 4])
    case.old = list(case.logprobs)
    gradients = []
    for which in (name, "reinforce"):
        logprobs = torch.tensor(case.logprobs, dtype=f64, requires_grad=True)
        case.ours(which, logprobs).sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_gspo_on_policy_under_the_sequence_mean_is_reinforce_under_it() -> None:
    case = Case(6, lengths=[3, 1, 4])
    case.old = list(case.logprobs)
    gradients = []
    for name in ("gspo", "reinforce"):
        logprobs = torch.tensor(case.logprobs, dtype=f64, requires_grad=True)
        losses = case.ours(name, logprobs)
        mask, segments = torch.tensor(case.mask), torch.tensor(case.segments)
        aggregate(
            losses, mask, segments, how="seq_mean_token_mean", num_sequences=3, num_tokens=sum(case.mask)
        ).backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_rec_with_one_side_and_importance_weights_has_the_gradient_of_the_clip() -> None:
    case = Case(7, lengths=[6, 6])
    gradients = []
    for name, options in (("ppo_clip", {}), ("rec", {"clip": "one_side", "importance_weight": True})):
        logprobs = torch.tensor(case.logprobs, dtype=f64, requires_grad=True)
        case.ours(name, logprobs, **options).sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_clipped_tokens_keep_their_gradient_in_cispo_and_lose_it_in_the_clip() -> None:
    logprobs = torch.tensor([math.log(2.0)], dtype=f64, requires_grad=True)
    arguments = (torch.zeros(1, dtype=f64), torch.ones(1, dtype=f64))
    for name, expected in (("ppo_clip", 0.0), ("cispo", -(1 + HIGH))):
        logprobs.grad = None
        loss_of(name)(logprobs, *arguments, torch.ones(1).bool(), torch.zeros(1).long()).sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 10.0])
def test_sapos_gradient_weight_is_the_derivative_of_its_gate(ratio: float) -> None:
    """4 s (1 - s) r, not the gate itself: the mistake that trains quietly."""
    logprobs = torch.tensor([math.log(ratio)], dtype=f64, requires_grad=True)
    loss_of("sapo")(logprobs, torch.zeros(1, dtype=f64), torch.ones(1, dtype=f64), None, None).sum().backward()
    gate = 1 / (1 + math.exp(-(ratio - 1)))
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-4 * gate * (1 - gate) * ratio, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(10.0, -1.0, 3.0, 0.0), (2.0, -1.0, 2.0, 2.0), (10.0, 1.0, -1.28, 0.0), (0.5, -2.0, 1.6, 0.0)],
)
def test_dual_clip_limits_what_a_bad_token_can_cost(ratio, advantage, loss, gradient) -> None:
    logprobs = torch.tensor([math.log(ratio)], dtype=f64, requires_grad=True)
    got = loss_of("ppo_clip", {"dual_clip": 3.0})(
        logprobs, torch.zeros(1, dtype=f64), torch.tensor([advantage], dtype=f64), None, None
    )
    got.sum().backward()
    assert logprobs.grad is not None
    assert (got.item(), logprobs.grad.item()) == pytest.approx((loss, gradient), abs=1e-9)


# ---------------------------------------------------------------------------------------------------- aggregations


def test_each_aggregation_is_its_weights() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 10.0, 99.0], dtype=f64)
    mask, segments = torch.tensor([True, True, True, True, False]), torch.tensor([0, 0, 0, 1, 1])
    got = {
        how: aggregate(losses, mask, segments, how=how, num_sequences=2, num_tokens=4, length=8).item()
        for how in AGGREGATIONS
    }
    assert got == {
        "seq_mean_token_mean": 6.0,
        "token_mean": 4.0,
        "seq_mean_token_sum": 8.0,
        "fixed_length": 1.0,
        "turn_mean_token_mean": 6.0,  # of one turn each
    }


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_step_may_be_cut_between_sequences(how: str) -> None:
    case = Case(8, lengths=[3, 1, 5, 2])
    losses, mask = torch.tensor(case.logprobs, dtype=f64), torch.tensor(case.mask)
    segments = torch.tensor(case.segments)
    counts = {"how": how, "num_sequences": 4, "num_tokens": sum(case.mask), "length": 7}
    parts = [
        aggregate(losses[w], mask[w], segments[w] - low, **counts) for low, w in ((0, segments < 2), (2, segments >= 2))
    ]
    torch.testing.assert_close(sum(parts), aggregate(losses, mask, segments, **counts))
