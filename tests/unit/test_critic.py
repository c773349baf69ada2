"""GAE, whitening and the value loss against independent float64 implementations of the papers' formulas."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from leeway.algorithms.critic import (
    gae,
    outcome_rewards,
    value_loss,
    value_metrics,
    value_sums,
    whitened,
    whitening_sums,
)


def ragged(seed: int, num_sequences: int = 6, *, num_outside: float = 0.4) -> dict[str, torch.Tensor]:
    """Sequences of several turns: sampled tokens, the environment's in between; some have none that was sampled."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(num_sequences)]
    mask = [rng.random() > num_outside for n in lengths for _ in range(n)]
    if num_sequences > 2:
        mask[: lengths[0]] = [False] * lengths[0]
    segments = [i for i, n in enumerate(lengths) for _ in range(n)]
    outcomes = [rng.uniform(-2, 2) for _ in lengths]
    return {
        "values": torch.tensor([rng.gauss(0, 1) for _ in segments], dtype=torch.float64),
        "outcomes": torch.tensor([outcomes[i] for i in segments], dtype=torch.float64),
        "mask": torch.tensor(mask),
        "segments": torch.tensor(segments),
    }


def of_the_paper(data: dict[str, torch.Tensor], rewards: list[float], gamma: float, lam: float) -> list[float]:
    """`A_t = sum_l (gamma lam)^l delta_{t+l}` over each sequence's sampled tokens, written out."""
    values, mask, segments = (data[name].tolist() for name in ("values", "mask", "segments"))
    out = [0.0] * len(values)
    for sequence in set(segments):
        steps = [i for i, s in enumerate(segments) if s == sequence and mask[i]]
        for t, place in enumerate(steps):
            for extra in range(len(steps) - t):
                here = steps[t + extra]
                following = values[steps[t + extra + 1]] if t + extra + 1 < len(steps) else 0.0
                delta = rewards[here] + gamma * following - values[here]
                out[place] += (gamma * lam) ** extra * delta
    return out


def advantages_of(data: dict[str, torch.Tensor], gamma: float, lam: float) -> torch.Tensor:
    where = {"mask": data["mask"], "segments": data["segments"]}
    rewards = outcome_rewards(data["outcomes"], **where)
    return gae(data["values"], rewards, **where, gamma=gamma, lam=lam)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.99, 0.0), (1.0, 0.95)])
@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_papers_over_sampled_tokens_only(seed: int, gamma: float, lam: float) -> None:
    data = ragged(seed)
    mask, segments = data["mask"].tolist(), data["segments"].tolist()
    last = {s: i for i, s in enumerate(segments) if mask[i]}
    rewards = [data["outcomes"][i].item() if last.get(s) == i else 0.0 for i, s in enumerate(segments)]
    got = advantages_of(data, gamma, lam)
    assert got.tolist() == pytest.approx(of_the_paper(data, rewards, gamma, lam), abs=1e-12)
    # A reward in every token, as a penalty would give, goes the same way.
    every = torch.randn(len(segments), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got = gae(data["values"], every, data["mask"], data["segments"], gamma=gamma, lam=lam)
    assert got.tolist() == pytest.approx(of_the_paper(data, every.tolist(), gamma, lam), abs=1e-12)


def test_gae_at_its_two_ends() -> None:
    data = ragged(3)
    mask, values = data["mask"], data["values"]
    whole = advantages_of(data, 1.0, 1.0)
    torch.testing.assert_close(whole[mask], (data["outcomes"] - values)[mask])  # lam 1: the outcome less the value
    assert (whole[~mask] == 0).all()
    one_step = advantages_of(data, 1.0, 0.0)
    sampled = [i for i in range(len(mask)) if mask[i]]
    for here, following in itertools.pairwise(sampled):
        if data["segments"][here] == data["segments"][following]:
            assert one_step[here].item() == pytest.approx((values[following] - values[here]).item())


def test_the_environments_tokens_are_no_time() -> None:
    """Two turns with a long observation in between have the advantages of one turn without it."""
    values = torch.tensor([0.3, -0.2, 9.0, 9.0, 9.0, 0.5, 0.1])
    mask = torch.tensor([True, True, False, False, False, True, True])
    one = {"segments": torch.zeros(7, dtype=torch.long), "mask": mask}
    two_turns = gae(values, outcome_rewards(torch.ones(7), **one), **one, gamma=0.8, lam=0.6)
    two = {"segments": torch.zeros(4, dtype=torch.long), "mask": torch.ones(4, dtype=torch.bool)}
    one_turn = gae(values[mask], outcome_rewards(torch.ones(4), **two), **two, gamma=0.8, lam=0.6)
    torch.testing.assert_close(two_turns[mask], one_turn)


@pytest.mark.parametrize("num_sequences", [0, 1])
def test_nothing_sampled_is_worth_nothing(num_sequences: int) -> None:
    segments = torch.zeros(3 * num_sequences, dtype=torch.long)
    mask, values = torch.zeros(len(segments), dtype=torch.bool), torch.ones(len(segments))
    rewards = outcome_rewards(values, mask, segments)
    advantages = gae(values, rewards, mask, segments, gamma=1.0, lam=1.0)
    assert advantages.tolist() == rewards.tolist() == [0.0] * len(segments)
    sums = whitening_sums(advantages, mask)
    assert whitened(advantages, mask, sums).tolist() == [0.0] * len(segments)
    assert value_metrics(value_sums(values, values, values, mask, clip=0.2)) == {}


def test_one_token_is_its_reward_less_its_value() -> None:
    one = {"mask": torch.tensor([True]), "segments": torch.tensor([0])}
    rewards = outcome_rewards(torch.tensor([1.5]), **one)
    assert gae(torch.tensor([0.25]), rewards, **one, gamma=0.5, lam=0.5).tolist() == [1.25]


def test_whitening_is_over_all_parts_together_and_over_sampled_tokens() -> None:
    parts = [(advantages_of(d, 1.0, 0.9).float(), d["mask"]) for d in map(ragged, range(3))]
    sums = torch.stack([whitening_sums(a, m) for a, m in parts]).sum(0)
    every = torch.cat([a[m] for a, m in parts]).double()
    for advantages, mask in parts:
        got = whitened(advantages, mask, sums)
        expected = (advantages.double() - every.mean()) / every.std()
        assert got[mask].tolist() == pytest.approx(expected[mask].tolist(), abs=1e-5)
        assert (got[~mask] == 0).all()


@pytest.mark.parametrize("values", [[0.7], [0.7, 0.7, 0.7], [1e6, 1e6]])
def test_equal_advantages_whiten_to_zeros(values: list[float]) -> None:
    advantages, mask = torch.tensor(values), torch.ones(len(values), dtype=torch.bool)
    assert whitened(advantages, mask, whitening_sums(advantages, mask)).tolist() == [0.0] * len(values)


def loss_of_the_paper(v: float, old: float, r: float, clip: float | None) -> float:
    if clip is None:
        return 0.5 * (v - r) ** 2
    held = min(max(v, old - clip), old + clip)
    return 0.5 * max((v - r) ** 2, (held - r) ** 2)


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
def test_the_value_loss_and_its_gradient(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 40, dtype=torch.float64, generator=generator)
    # And the corners: as the batch had it, exactly at the clip, exactly right.
    values = torch.cat([values, torch.tensor([0.5, 0.7, 0.3, 0.5], dtype=torch.float64)]).requires_grad_()
    old = torch.cat([old, torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64)])
    returns = torch.cat([returns, torch.tensor([1.0, 1.0, 1.0, 0.5], dtype=torch.float64)])
    got = value_loss(values, old, returns, clip=clip)
    expected = [
        loss_of_the_paper(*numbers, clip)
        for numbers in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)
    ]
    assert got.tolist() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(got.sum(), values)
    h = 1e-6
    for i in range(40):
        numbers = old[i].item(), returns[i].item(), clip
        up, down = (loss_of_the_paper(values[i].item() + step, *numbers) for step in (h, -h))
        assert gradient[i].item() == pytest.approx((up - down) / (2 * h), abs=1e-5)
    assert gradient[-1] == 0.0
    assert gradient[40].item() == pytest.approx(-0.5)  # inside the clip: the plain gradient


def test_a_value_beyond_the_clip_on_the_way_to_its_return_has_no_gradient() -> None:
    values = torch.tensor([0.9], requires_grad=True)
    value_loss(values, torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2).sum().backward()
    assert values.grad is not None
    assert values.grad.item() == 0.0


def test_value_metrics_are_those_of_the_sampled_tokens_however_they_are_cut() -> None:
    generator = torch.Generator().manual_seed(2)
    values, old, returns = torch.randn(3, 30, dtype=torch.float64, generator=generator)
    mask = torch.rand(30, generator=generator) > 0.3
    parts = [slice(0, 7), slice(7, 7), slice(7, 30)]
    sums = torch.stack([value_sums(values[p], old[p], returns[p], mask[p], clip=0.5) for p in parts]).sum(0)
    got = value_metrics(sums)
    r, o = returns[mask], old[mask]
    explained = 1 - ((r - o).var(correction=0) / r.var(correction=0)).item()
    assert got["train/value/explained_variance"] == pytest.approx(explained)
    assert got["train/value/mean"] == pytest.approx(o.mean().item())
    assert got["train/value/return"] == pytest.approx(r.mean().item())
    held = torch.minimum(torch.maximum(values, old - 0.5), old + 0.5)
    clipped = ((held - returns).square() > (values - returns).square())[mask]
    assert 0 < clipped.double().mean() < 1
    assert got["train/value/clipped_frac"] == pytest.approx(clipped.double().mean().item())


def test_equal_returns_have_no_explained_variance_and_perfect_values_have_all_of_it() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    same = torch.full((3,), 0.1)
    assert "train/value/explained_variance" not in value_metrics(value_sums(same, same, same, mask, clip=None))
    returns = torch.tensor([0.0, 1.0, 3.0])
    got = value_metrics(value_sums(returns, returns, returns, mask, clip=None))
    assert got["train/value/explained_variance"] == pytest.approx(1.0)
    assert math.isfinite(got["train/value/return"])
