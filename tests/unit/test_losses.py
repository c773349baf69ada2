"""The objective against a second implementation, written from the formulas in plain float64 Python."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.algorithms.aggregation import aggregate
from leeway.algorithms.diagnostics import MAXIMA, SUMS, step_metrics, token_sums
from leeway.algorithms.grpo import GRPO, PPOClip
from leeway.algorithms.losses import LossInputs
from leeway.algorithms.objective import PolicyObjective, SupervisedObjective

LOW, HIGH = 0.2, 0.28
CLIPS = {"clip_low": LOW, "clip_high": HIGH}
f64 = torch.float64


def grpo_advantage(rewards: torch.Tensor, *, eps: float) -> torch.Tensor:
    return GRPO.model_construct(eps=eps).of_group(rewards)


def clipped_ratio_loss(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    everywhere = torch.ones(len(logprobs), dtype=torch.bool), torch.zeros(len(logprobs), dtype=torch.int64)
    return PPOClip(clip_low=LOW, clip_high=HIGH)(LossInputs(logprobs, old, advantages, *everywhere))


def loss_formula(logp: float, old: float, advantage: float) -> float:
    """PPO eq. 7 with DAPO's two-sided range, negated."""
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -min(ratio * advantage, clipped * advantage)


def aggregate_formula(losses, mask, segments, *, how: str, num_sequences: int, num_tokens: int) -> float:
    total = 0.0
    for sequence in set(segments):
        inside = [x for x, m, s in zip(losses, mask, segments, strict=True) if s == sequence and m]
        if not inside:
            continue
        total += sum(inside) / num_tokens if how == "token_mean" else sum(inside) / len(inside) / num_sequences
    return total


def advantage_formula(rewards: list[float], eps: float) -> list[float]:
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + eps) for r in rewards]


# ---------------------------------------------------------------------------------------------------- advantages


def test_advantage_is_the_formula():
    rng = random.Random(0)
    for _ in range(100):
        rewards = [rng.choice((0.0, 1.0, rng.uniform(-3, 3))) for _ in range(rng.randint(2, 9))]
        if len(set(rewards)) == 1:
            continue
        got = grpo_advantage(torch.tensor(rewards, dtype=f64), eps=1e-3)
        assert got.tolist() == pytest.approx(advantage_formula(rewards, 1e-3), abs=1e-12)


def test_one_right_of_four_in_closed_form():
    # mean 1/4, sample deviation sqrt((9 + 3) / 16 / 3) = 1/2
    assert grpo_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=f64), eps=0.0).tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5]
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_rewards_give_exact_zeros(reward, size):
    # 0.1 summed and divided again is not 0.1 in float32: the difference over eps must not pass for a signal.
    assert grpo_advantage(torch.full((size,), reward), eps=1e-8).tolist() == [0.0] * size


def test_shifting_and_scaling_rewards_moves_no_advantage():
    rewards = torch.tensor([0.0, 1.0, 1.0, 5.0], dtype=f64)
    expected = grpo_advantage(rewards, eps=0.0)
    torch.testing.assert_close(grpo_advantage(rewards * 13 - 4, eps=0.0), expected)
    assert expected.sum().item() == pytest.approx(0.0, abs=1e-12)


# --------------------------------------------------------------------------------------------------- policy loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.0, 0.0, 0.0, 0.0),
        (1.5, 2.0, -2.56, 0.0),  # above the range, A > 0: clipped, nothing more to gain
        (1.5, -2.0, 3.0, 3.0),  # above the range, A < 0: must come down, never clipped
        (0.5, 2.0, -1.0, -1.0),  # below the range, A > 0: must come up, never clipped
        (0.5, -2.0, 1.6, 0.0),  # below the range, A < 0: clipped
        (1.27, 1.0, -1.27, -1.27),  # just inside on both sides
        (0.81, -1.0, 0.81, 0.81),
    ],
)
def test_each_side_of_the_clip(ratio, advantage, loss, gradient):
    logp = torch.tensor([math.log(ratio) - 1.0], dtype=f64, requires_grad=True)
    got = clipped_ratio_loss(logp, torch.tensor([-1.0], dtype=f64), torch.tensor([advantage], dtype=f64))
    got.sum().backward()
    assert logp.grad is not None
    assert (got.item(), logp.grad.item()) == pytest.approx((loss, gradient), abs=1e-9)


@pytest.mark.parametrize("edge", [1 - LOW, 1 + HIGH])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_at_the_edge_of_the_clip_the_loss_is_continuous(edge, advantage):
    old = torch.zeros(3, dtype=f64)
    logp = torch.tensor([edge - 1e-9, edge, edge + 1e-9], dtype=f64).log()
    losses = clipped_ratio_loss(logp, old, torch.full((3,), advantage, dtype=f64))
    torch.testing.assert_close(losses, torch.full((3,), -edge * advantage, dtype=f64), rtol=0, atol=1e-8)


def test_no_gradient_reaches_the_behaviour_logprobs_by_mistake():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = clipped_ratio_loss(logp, logp.detach(), torch.tensor([1.0, -0.5]))
    loss.sum().backward()
    # On policy the ratio is 1 and the gradient is that of -A logp.
    assert logp.grad is not None
    assert logp.grad.tolist() == [-1.0, 0.5]


# ----------------------------------------------------------------------------------------------------- aggregate


def random_tokens(rng: random.Random, num_sequences: int):
    lengths = [rng.randint(1, 12) for _ in range(num_sequences)]
    segments = [i for i, n in enumerate(lengths) for _ in range(n)]
    losses = [rng.uniform(-2, 2) for _ in segments]
    mask = [rng.random() < 0.7 for _ in segments]
    return losses, mask, segments


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean"])
def test_aggregate_is_the_formula(how):
    rng = random.Random(2)
    for _ in range(100):
        losses, mask, segments = random_tokens(rng, rng.randint(1, 8))
        counts = {"num_sequences": rng.randint(8, 20), "num_tokens": rng.randint(100, 200)}
        got = aggregate(torch.tensor(losses, dtype=f64), torch.tensor(mask), torch.tensor(segments), how=how, **counts)
        assert got.item() == pytest.approx(aggregate_formula(losses, mask, segments, how=how, **counts), abs=1e-12)


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean"])
def test_a_step_may_be_cut_anywhere_between_sequences(how):
    rng = random.Random(3)
    for _ in range(50):
        losses, mask, segments = random_tokens(rng, 9)
        counts = {"how": how, "num_sequences": 9, "num_tokens": max(1, sum(mask))}
        whole = aggregate(torch.tensor(losses, dtype=f64), torch.tensor(mask), torch.tensor(segments), **counts)
        order = list(range(9))
        rng.shuffle(order)
        parts = [order[i::3] for i in range(3)]
        total = 0.0
        for part in parts:
            where = [i for sequence in part for i, s in enumerate(segments) if s == sequence]
            total += aggregate(
                torch.tensor([losses[i] for i in where], dtype=f64),
                torch.tensor([mask[i] for i in where]),
                torch.tensor([part.index(segments[i]) for i in where]),
                **counts,
            ).item()
        assert total == pytest.approx(whole.item(), abs=1e-12)


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean"])
def test_masked_tokens_move_nothing(how):
    losses = torch.tensor([1.0, -3.0, 5.0], requires_grad=True)
    segments = torch.tensor([0, 0, 1])
    total = aggregate(losses, torch.zeros(3).bool(), segments, how=how, num_sequences=2, num_tokens=3)
    total.backward()
    assert total.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean"])
def test_one_token_and_no_token(how):
    one = aggregate(
        torch.tensor([3.0]), torch.tensor([True]), torch.tensor([0]), how=how, num_sequences=2, num_tokens=2
    )
    assert one.item() == 1.5
    # A rank that has run out of work takes part with nothing, and must still be able to call backward.
    none = torch.zeros(0, requires_grad=True)
    total = aggregate(none, torch.zeros(0).bool(), torch.zeros(0).long(), how=how, num_sequences=2, num_tokens=2)
    total.backward()
    assert total.item() == 0.0


def test_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match=r"'mean'.*seq_mean_token_mean, token_mean"):
        aggregate(torch.ones(1), torch.ones(1).bool(), torch.zeros(1).long(), how="mean", num_sequences=1, num_tokens=1)


# --------------------------------------------------------------------------------------------------- diagnostics


def sums_of(logp, old, *, adv=None, mask=None, lags=None, entropy=None):
    n = len(logp)
    return token_sums(
        logprobs=torch.tensor(logp),
        clipped_ratio=(torch.tensor(logp) - torch.tensor(old)).exp(),
        clips="gradient",
        behavior_logprobs=torch.tensor(old),
        weights=torch.ones(n),
        entropy=torch.tensor([0.5] * n if entropy is None else entropy),
        lags=torch.tensor([1] * n if lags is None else lags, dtype=torch.int64),
        has_lag=torch.ones(n, dtype=torch.bool),
        advantages=torch.tensor([1.0] * n if adv is None else adv),
        mask=torch.tensor([True] * n if mask is None else mask, dtype=torch.bool),
        clip_range=(LOW, HIGH),
    )


def test_on_policy_everything_is_at_rest():
    metrics = step_metrics(*sums_of([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], lags=[0, 0, 0]))
    assert metrics["train/ratio/mean"] == metrics["train/ratio/max"] == metrics["train/ess_frac"] == 1.0
    for name in ("train/kl/mean", "train/ratio/clipped_frac", "train/policy_lag/max", "train/logprob_gap/max"):
        assert metrics[name] == 0.0


def test_a_logprob_that_is_no_number_is_left_to_the_step_that_is_skipped_for_it():
    sums, _ = sums_of([-1.0, math.nan, math.inf, -2.0], [-1.0] * 4)
    assert dict(zip(SUMS, sums.tolist(), strict=True))["tokens"] == 4
    assert math.isnan(step_metrics(*sums_of([-1.0, math.nan], [-1.0] * 2))["train/kl/mean"])


def test_diagnostics_in_closed_form():
    ratios, adv = [2.0, 0.5, 2.0, 0.5], [1.0, 1.0, -1.0, -1.0]
    logp = [math.log(r) - 1.0 for r in ratios]
    metrics = step_metrics(*sums_of(logp, [-1.0] * 4, adv=adv, lags=[0, 1, 2, 5], entropy=[0.0, 1.0, 2.0, 3.0]))
    ln2 = math.log(2)
    expected = {
        "train/ratio/mean": 1.25,
        "train/ratio/max": 2.0,
        "train/ess_frac": 5.0**2 / (4 * 8.5),
        # Only clips that act: ratio 2 with A > 0, ratio 1/2 with A < 0.
        "train/ratio/clipped_high_frac": 0.25,
        "train/ratio/clipped_low_frac": 0.25,
        "train/ratio/clipped_frac": 0.5,
        # k3: r - 1 - ln r, twice for each ratio
        "train/kl/mean": ((1 - ln2) + (-0.5 + ln2)) / 2,
        "train/entropy/mean": 1.5,
        "train/correction_weight/mean": 1.0,
        "train/correction_weight/max": 1.0,
        "train/correction_weight/masked_frac": 0.0,
        "train/policy_lag/mean": 2.0,
        "train/policy_lag/max": 5.0,
        "train/policy_lag/min": 0.0,
        "train/off_policy_ratio/lag_0": 2.0,
        "train/off_policy_ratio/lag_1": 0.5,
        "train/off_policy_ratio/lag_2_to_3": 2.0,
        "train/off_policy_ratio/lag_4_to_7": 0.5,
        "train/logprob_gap/mean": ln2,
        "train/logprob_gap/max": ln2,
    }
    quantiles = [metrics.pop(f"train/off_policy_ratio/p_{q}") for q in ("01", "50", "99")]
    assert quantiles == pytest.approx([0.5, 0.5, 2.0], rel=0.05)
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_quantiles_are_those_of_the_tokens_however_they_were_cut():
    rng = random.Random(6)
    shifts = sorted(rng.gauss(0, 0.5) for _ in range(2000))
    rng.shuffle(shifts)
    parts = [sums_of([x - 1.0 for x in part], [-1.0] * len(part)) for part in (shifts[:700], shifts[700:])]
    sums, maxima = parts[0][0] + parts[1][0], torch.maximum(parts[0][1], parts[1][1])
    metrics = step_metrics(sums, maxima)
    for name, q in (("01", 0.01), ("50", 0.5), ("99", 0.99)):
        exact = sorted(shifts)[int(q * 2000) - 1]
        # A bin is a tenth of the log ratio wide, and 0.001 around ratio 1.
        assert math.log(metrics[f"train/off_policy_ratio/p_{name}"]) == pytest.approx(exact, rel=0.06, abs=2e-3)
    on_policy = step_metrics(*sums_of([-1.0] * 5, [-1.0] * 5))
    assert [on_policy[f"train/off_policy_ratio/p_{q}"] for q in ("01", "50", "99")] == [1.0, 1.0, 1.0]


def test_kl_is_the_one_from_the_behaviour_policy_to_the_current_one():
    # k3 of KL(behaviour || now) under the behaviour's samples: r - 1 - ln r, which for one token tells r from 1 / r.
    for ratio in (2.0, 0.5, 3.0):
        metrics = step_metrics(*sums_of([math.log(ratio) - 1.0], [-1.0]))
        assert metrics["train/kl/mean"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)
    # Over all of a small vocabulary, weighted by the behaviour policy, it is the KL itself.
    behaviour, now = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    k3 = [
        step_metrics(*sums_of([math.log(q)], [math.log(p)]))["train/kl/mean"]
        for p, q in zip(behaviour, now, strict=True)
    ]
    exact = sum(p * math.log(p / q) for p, q in zip(behaviour, now, strict=True))
    assert sum(p * k for p, k in zip(behaviour, k3, strict=True)) == pytest.approx(exact, abs=1e-6)


def test_bounds_of_kl_and_effective_sample_size():
    rng = random.Random(4)
    for _ in range(50):
        n = rng.randint(1, 40)
        old = [rng.uniform(-5, 0) for _ in range(n)]
        metrics = step_metrics(*sums_of([x + rng.gauss(0, 1) for x in old], old))
        assert metrics["train/kl/mean"] >= 0
        assert 1 / n - 1e-9 <= metrics["train/ess_frac"] <= 1 + 1e-9


def test_one_huge_ratio_leaves_one_effective_token():
    metrics = step_metrics(*sums_of([9.0, -1.0, -1.0, -1.0], [-1.0] * 4))
    assert metrics["train/ess_frac"] == pytest.approx(1 / 4, rel=1e-3)


def test_masked_tokens_do_not_count():
    with_environment = sums_of([-1.0, -9.0], [-1.5, 0.0], mask=[True, False], lags=[2, 99], adv=[1.0, -1.0])
    assert step_metrics(*with_environment) == step_metrics(*sums_of([-1.0], [-1.5], lags=[2]))


def test_numbers_that_do_not_exist_are_left_out():
    assert not [name for name in step_metrics(*sums_of([-1.0], [-1.5], lags=[3])) if "gap" in name]
    nothing = sums_of([-1.0, -1.0], [-1.0, -1.0], mask=[False, False])
    assert step_metrics(*nothing) == {}


def test_sums_add_up_and_maxima_are_the_larger():
    rng = random.Random(5)
    old = [rng.uniform(-5, 0) for _ in range(30)]
    new = [x + rng.gauss(0, 0.3) for x in old]
    adv, lags = [rng.choice((-1.0, 1.0)) for _ in old], [rng.randint(0, 3) for _ in old]
    whole = step_metrics(*sums_of(new, old, adv=adv, lags=lags))
    sums, maxima = torch.zeros(len(SUMS), dtype=f64), torch.full((len(MAXIMA),), -math.inf, dtype=f64)
    for part in (slice(0, 7), slice(7, 7), slice(7, 30)):
        s, m = sums_of(new[part], old[part], adv=adv[part], lags=lags[part])
        sums, maxima = sums + s, torch.maximum(maxima, m)
    assert step_metrics(sums, maxima) == pytest.approx(whole)


# ---------------------------------------------------------------------------------------------------- objectives


def tokens_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    rng = random.Random(seed)
    losses, mask, segments = random_tokens(rng, 6)
    n = len(losses)
    tokens = SimpleNamespace(
        segments=torch.tensor(segments),
        mask=torch.tensor(mask),
        behavior_logprobs=torch.tensor([rng.uniform(-3, 0) for _ in range(n)], dtype=f64),
        policy_versions=torch.tensor([rng.randint(3, 5) for _ in range(n)]),
        advantages=torch.tensor([rng.uniform(-2, 2) for _ in range(n)], dtype=f64),
    )
    logp = torch.tensor([rng.uniform(-3, 0) for _ in range(n)], dtype=f64, requires_grad=True)
    return logp, torch.ones(n, dtype=f64), tokens


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean"])
def test_policy_objective_is_loss_and_aggregate_put_together(how):
    logp, entropy, tokens = tokens_of(0)
    counts: Any = {"num_sequences": 6, "num_tokens": int(tokens.mask.sum())}
    objective = PolicyObjective(policy_loss=PPOClip(clip_low=LOW, clip_high=HIGH), aggregation=how)
    loss = objective.loss(logp, entropy, tokens, policy_version=6, **counts)
    per_token = [
        loss_formula(*x)
        for x in zip(logp.tolist(), tokens.behavior_logprobs.tolist(), tokens.advantages.tolist(), strict=True)
    ]
    expected = aggregate_formula(per_token, tokens.mask.tolist(), tokens.segments.tolist(), how=how, **counts)
    assert loss.total.item() == pytest.approx(expected, abs=1e-12)
    assert len(loss.sums) == objective.num_sums
    assert len(loss.maxima) == objective.num_maxima
    assert not loss.sums.requires_grad
    metrics = objective.metrics(loss.sums, loss.maxima)
    assert metrics["train/loss/policy"] == pytest.approx(expected)
    assert metrics["train/policy_lag/max"] == max(6 - tokens.policy_versions[tokens.mask]).item()


def test_supervised_objective_is_the_token_mean_cross_entropy():
    logp, entropy, tokens = tokens_of(1)
    count = int(tokens.mask.sum())
    objective = SupervisedObjective()
    loss = objective.loss(logp, entropy, tokens, policy_version=0, num_sequences=6, num_tokens=count)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(-logp[tokens.mask].mean().item())
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -tokens.mask.double() / count)
    assert len(loss.sums) == objective.num_sums
    assert len(loss.maxima) == objective.num_maxima
    metrics = objective.metrics(loss.sums, loss.maxima)
    assert metrics == pytest.approx({"train/loss/sft": loss.total.item(), "train/entropy/mean": 1.0})
