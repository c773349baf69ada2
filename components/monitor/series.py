"""The rows of a metrics.jsonl as series over steps, and the two ways the picture thins them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_NOT_METRICS = frozenset({"step", "time", "role", "nonfinite"})


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric: `steps` [n], ascending and unique, and its `values` [n], all finite."""

    steps: np.ndarray
    values: np.ndarray

    def smoothed(self, window: int, reduce: Callable[[np.ndarray], Any] = np.mean) -> np.ndarray:
        """`reduce` over `window` neighbouring points centred on each one, [n]; fewer at the ends."""
        half = window // 2
        return np.array([reduce(self.values[max(0, i - half) : i + half + 1]) for i in range(len(self.values))])

    def binned(self, max_bins: int, reduce: Callable[[np.ndarray], Any]) -> Series:
        """At most `max_bins` points and the end: each `reduce` over a range of steps, placed at its first step."""
        width = math.ceil((self.steps[-1] - self.steps[0] + 1) / max_bins)
        bins = (self.steps - self.steps[0]) // width
        numbers = np.unique(bins)
        steps, values = self.steps[0] + numbers * width, [reduce(self.values[bins == n]) for n in numbers]
        if steps[-1] < self.steps[-1]:
            steps, values = np.append(steps, self.steps[-1]), [*values, values[-1]]
        return Series(steps=steps, values=np.array(values))


def read_series(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Every metric of `rows`. Nulls are left out; values that several parts reported for the same step are averaged."""
    values: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key in _NOT_METRICS or not isinstance(value, int | float) or not math.isfinite(value):
                continue
            values.setdefault(key, {}).setdefault(int(row["step"]), []).append(float(value))
    return {
        key: Series(
            steps=np.array(sorted(by_step), dtype=float),
            values=np.array([np.mean(by_step[step]) for step in sorted(by_step)]),
        )
        for key, by_step in values.items()
    }


def smoothing_window(num_steps: int) -> int:
    """Odd, about a fifteenth of the run and at most 51 steps; 1 (no smoothing) below 10 steps."""
    return 1 if num_steps < 10 else min(51, max(3, num_steps // 15 | 1))


def bin_shares(
    parts: Mapping[str, Series], total: Series | None, *, max_bins: int
) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Stack-ready shares of a whole, averaged over equal ranges of steps.

    Returns the bins' centres [n], their width in steps, and per part its share in percent [n], plus "other": what no
    part explains. `total` is the whole in the parts' unit; None means that the parts are fractions of 1. Shares are
    sums over sums, so long steps weigh as long as they lasted. Where the parts overlap and exceed the whole, they are
    scaled to it.
    """
    steps = total.steps if total is not None else np.unique(np.concatenate([part.steps for part in parts.values()]))
    whole = total.values if total is not None else np.ones(len(steps))
    first, span = steps[0], steps[-1] - steps[0] + 1
    width = max(1.0, math.ceil(span / max_bins))
    bins = ((steps - first) // width).astype(int)
    num_bins = int(bins[-1]) + 1
    whole_binned = np.bincount(bins, weights=whole, minlength=num_bins)
    shares: dict[str, np.ndarray] = {}
    for name, part in parts.items():
        at_steps = np.zeros(len(steps))
        _, here, there = np.intersect1d(steps, part.steps, return_indices=True)
        at_steps[here] = part.values[there]
        binned = np.bincount(bins, weights=at_steps, minlength=num_bins)
        shares[name] = 100 * np.divide(binned, whole_binned, out=np.zeros(num_bins), where=whole_binned > 0)
    explained = np.sum(list(shares.values()), axis=0)
    shares = {name: share * 100 / np.maximum(explained, 100) for name, share in shares.items()}
    shares["other"] = np.where(whole_binned > 0, np.maximum(0.0, 100 - explained), 0.0)
    return first + (np.arange(num_bins) + 0.5) * width - 0.5, width, shares
