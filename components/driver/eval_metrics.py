"""Evaluation metrics from several samples per task: mean@k, pass@k and best@k, with bootstrap intervals over tasks.

Notation: n samples of a task, c of them right. The interval of a mean over tasks covers the choice of tasks: if other
tasks of the same kind were drawn, 95 % of the means would be inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples is right, without bias: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1. Raises ValueError for k above n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k: got k={k} of {num_samples} samples; expected 1 to {num_samples}")
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Mean of the largest reward over all choices of k of the n samples; with rewards 0 and 1 it is pass@k.

    The i-th smallest (from 0) is the largest in C(i, k - 1) of the C(n, k) choices.
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"best@k: got k={k} of {n} samples; expected 1 to {n}")
    return sum(reward * comb(i, k - 1) for i, reward in enumerate(sorted(rewards))) / comb(n, k)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The percentile bootstrap interval (95 %) of the mean over tasks; the same values give the same interval."""
    numbers = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(0).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    low, high = np.quantile(numbers[picks].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def at_k(rewards: Sequence[Sequence[float]], right: Sequence[Sequence[bool]], ks: Sequence[int]) -> dict[str, float]:
    """Metrics of several samples per task: `rewards` and `right` hold one list of n per task.

    mean_at_<n> is the share of samples that are right; pass_at_<k> and best_at_<k> for every k, each with `_low` and
    `_high`.
    """
    n = len(rewards[0])
    by_name = {f"mean_at_{n}": [sum(task) / n for task in right]}
    for k in ks:
        by_name[f"pass_at_{k}"] = [pass_at_k(n, sum(task), k) for task in right]
        by_name[f"best_at_{k}"] = [best_at_k(task, k) for task in rewards]
    metrics: dict[str, float] = {}
    for name, values in by_name.items():
        low, high = interval(values)
        metrics |= {name: sum(values) / len(values), f"{name}_low": low, f"{name}_high": high}
    return metrics
