"""Advantages and reward shaping against their formulas, in plain float64 Python."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.algorithms.presets import ADVANTAGES
from leeway.algorithms.shaping import overlong_penalty, rank_penalty

from ..tiers import sample

f64 = torch.float64
EPS = 1e-3
Groups = list[list[float]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def grouped(formula: Callable[[list[float]], list[float]]) -> Callable[[Groups], list[float]]:
    return lambda groups: [a for g in groups for a in formula(g)]


def whiten(values: list[float]) -> list[float]:
    return [(x - mean(values)) / (statistics.stdev(values) + EPS) for x in values]


def balanced(rewards: list[float]) -> list[float]:
    out, left = [], sum(r > mean(rewards) for r in rewards)
    for r in rewards:
        negative = r < mean(rewards)
        out.append(0.0 if negative and left == 0 else r - mean(rewards))
        left -= negative and left > 0
    return out


def batch_std(groups: Groups) -> list[float]:
    every = [r for g in groups for r in g]
    return [(r - mean(g)) / (statistics.stdev(every) + EPS) for g in groups for r in g]


FORMULAS: dict[str, Callable[[Groups], list[float]]] = {
    "grpo": grouped(whiten),
    "mean": grouped(lambda g: [r - mean(g) for r in g]),
    "batch_std": batch_std,
    "rloo": grouped(lambda g: [r - (sum(g) - r) / (len(g) - 1) for r in g]),
    "whitened": lambda groups: whiten([r for g in groups for r in g]),
    "whitened_group": lambda groups: whiten([r - mean(g) for g in groups for r in g]),
    "asymre": grouped(lambda g: [r - (mean(g) - 0.1) for r in g]),
    "log_mean_exp": grouped(lambda g: [r - math.log(mean([math.exp(x) for x in g])) for r in g]),
    "balanced": grouped(balanced),
    "best": grouped(lambda g: [float(i == g.index(max(g)) and r > 0.0) for i, r in enumerate(g)]),
    "reward": grouped(list),
    "zero": grouped(lambda g: [0.0 for _ in g]),
}


def ours(name: str, groups: Groups, **options: float) -> torch.Tensor:
    rewards = torch.tensor([r for g in groups for r in g], dtype=f64)
    indices = torch.tensor([i for i, g in enumerate(groups) for _ in g])
    cls: Any = ADVANTAGES[name]
    advantage = cls(**options | ({"eps": EPS} if "eps" in cls.model_fields else {}))
    return advantage(rewards, indices)


def random_groups(rng: random.Random) -> Groups:
    """Ragged, of unequal rewards."""
    return [
        [0.0, *(rng.choice((0.0, 1.0, rng.uniform(-3, 3))) for _ in range(rng.randint(0, 6))), 1.0]
        for _ in range(rng.randint(1, 5))
    ]


def test_every_registered_advantage_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(ADVANTAGES) - {"gae", "gigpo"}  # test_critic.py, test_turns.py


@pytest.mark.parametrize("name", FORMULAS)
def test_advantages_are_the_formula(name: str) -> None:
    rng = random.Random(0)
    for _ in range(20):
        groups = random_groups(rng)
        assert ours(name, groups).tolist() == pytest.approx(FORMULAS[name](groups), abs=1e-12)


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"reward", "asymre", "best"}))
def test_equal_rewards_everywhere_are_exact_zeros(name: str) -> None:
    advantage = ADVANTAGES[name]()
    for reward, size in itertools.product([0.0, 0.1, 1 / 3, -7.3, 1e6], [1, 3, 7]):
        rewards = torch.full((2 * size,), reward)  # float32, where a mean of equal numbers need not equal them
        groups = torch.arange(2).repeat_interleave(size)
        assert advantage(rewards, groups).tolist() == [0.0] * (2 * size), (reward, size)


@settings(max_examples=sample(8, 30), deadline=None)
@given(seed=st.integers(0, 10_000))
@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"balanced", "best"}))
def test_the_order_of_samples_and_of_groups_changes_nothing(name: str, seed: int) -> None:
    rng = random.Random(seed)
    groups = random_groups(rng)
    before = dict(zip([(i, j) for i, g in enumerate(groups) for j in range(len(g))], ours(name, groups).tolist()))  # noqa: B905
    keys = [[(i, j) for j in range(len(g))] for i, g in enumerate(groups)]
    rng.shuffle(keys)
    for key in keys:
        rng.shuffle(key)
    after = ours(name, [[groups[i][j] for i, j in key] for key in keys]).tolist()
    assert after == pytest.approx([before[k] for key in keys for k in key], abs=1e-12)


def test_best_picks_one_answer_and_none_where_none_is_good() -> None:
    assert ours("best", [[0.0, 2.0, 2.0], [0.0, 0.0]]).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert ours("best", [[0.3, 0.4]], least=0.5).tolist() == [0.0, 0.0]


def test_balanced_keeps_as_many_negatives_as_positives() -> None:
    assert ours("balanced", [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]]).tolist() == [
        0.75, -0.25, 0.0, 0.0, -0.75, 0.25, 0.25, 0.25,
    ]  # fmt: skip


def test_asymre_leans_towards_good_answers_and_teaches_groups_of_equal_rewards() -> None:
    assert ours("asymre", [[1.0, 1.0], [0.0, 1.0]], delta=-0.25).tolist() == [0.25, 0.25, -0.25, 0.75]


def test_the_soft_baseline_lies_between_mean_and_maximum() -> None:
    groups = [[0.0, 0.0, 1.0, 2.0]]
    assert ours("log_mean_exp", groups, tau=1e6).tolist() == pytest.approx(ours("mean", groups).tolist(), abs=1e-5)
    assert ours("log_mean_exp", groups, tau=1e-3).tolist() == pytest.approx([-2.0, -2.0, -1.0, 0.0], abs=1e-2)
    assert torch.isfinite(ours("log_mean_exp", [[1e4, -1e4]], tau=0.01)).all()


def test_the_overlong_penalty_is_dapos() -> None:
    lengths = torch.tensor([0.0, 12.0, 14.0, 16.0, 20.0], dtype=f64)
    got = overlong_penalty(lengths, max_tokens=16, buffer_tokens=4)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_the_rank_penalty_takes_most_from_the_likeliest() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 2.0], dtype=f64)
    logprobs = torch.tensor([-5.0, -1.0, -2.0, -9.0])  # ranks 2, 0, 1, 3
    got = rank_penalty(rewards, logprobs, strength=0.25)
    assert got.tolist() == pytest.approx([1 - 0.25 * 2 / 4, 1 - 0.25, 0.0, 2 * (1 - 0.25 / 4)])


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0]), st.floats(-50, -0.1)), min_size=1, max_size=8
    ),
    st.floats(0.05, 1.0),
)
def test_a_likelier_answer_of_the_same_reward_is_never_preferred(
    answers: list[tuple[float, float]], strength: float
) -> None:
    rewards, logprobs = (torch.tensor(column, dtype=f64) for column in zip(*answers, strict=True))
    shaped = rank_penalty(rewards, logprobs, strength=strength).tolist()
    for (reward, logprob), got in zip(answers, shaped, strict=True):
        assert got <= reward
        assert got >= min(reward, 0.0), "a right answer never falls below a wrong one"
        for (other, other_logprob), other_got in zip(answers, shaped, strict=True):
            if reward == other and logprob > other_logprob:
                assert got <= other_got
