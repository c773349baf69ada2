"""Response lengths: as observed in a run, or as a distribution given by its name and parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """Positive numbers (tokens or seconds) by their quantiles: `quantiles` are equally likely values, ascending.

    `alike` in [0, 1]: how similar the members of one group are (0: independent; 1: identical).
    """

    quantiles: tuple[float, ...]
    alike: float = 0.0

    @property
    def mean(self) -> float:
        return math.fsum(self.quantiles) / len(self.quantiles)

    @property
    def largest(self) -> float:
        return self.quantiles[-1]

    def draw_groups(self, rng: np.random.Generator, num_groups: int, group_size: int) -> np.ndarray:
        """[num_groups, group_size]; members are correlated by a Gaussian copula, so each keeps this distribution."""
        if len(self.quantiles) == 1:
            return np.full((num_groups, group_size), self.quantiles[0])
        normal = rng.standard_normal((num_groups, group_size))
        if self.alike:
            shared = rng.standard_normal((num_groups, 1))
            normal = math.sqrt(self.alike) * shared + math.sqrt(1 - self.alike) * normal
        return self._of_normal(normal)

    def _of_normal(self, normal: np.ndarray) -> np.ndarray:
        table = np.asarray(self.quantiles)
        index = (_normal_cdf(normal) * len(table)).astype(int)
        return table[np.clip(index, 0, len(table) - 1)]

    def longest_of(self, count: int) -> float:
        """Expected largest of `count` independent draws."""
        n = len(self.quantiles)
        edges = (np.arange(n + 1) / n) ** max(1, count)
        return float(np.dot(np.diff(edges), np.asarray(self.quantiles)))

    def longest_in_group(self, group_size: int) -> float:
        """Expected largest member of a group."""
        if not self.alike:
            return self.longest_of(group_size)
        return float(self.draw_groups(np.random.default_rng(0), 4000, group_size).max(axis=1).mean())


def from_samples(samples: Sequence[float], *, alike: float = 0.0, num_quantiles: int = 4000) -> Distribution:
    """Thinned to `num_quantiles` where there are more; the largest sample is always kept."""
    ordered = sorted(float(s) for s in samples)
    if not ordered or ordered[0] < 0:
        raise ValueError("a distribution needs at least one sample, and none below 0")
    if len(ordered) > num_quantiles:
        ordered = [ordered[round(i * (len(ordered) - 1) / (num_quantiles - 1))] for i in range(num_quantiles)]
    return Distribution(tuple(ordered), alike)


def lognormal(mean: float, sigma: float, largest: float = math.inf, *, least: float = 0.0) -> Distribution:
    """Mean before cutting at `largest`; `sigma` is the standard deviation of the logarithm (1 is a long tail)."""
    if not (mean > 0 and sigma >= 0 and largest > 0):
        raise ValueError(f"lognormal: got mean {mean}, sigma {sigma}, largest {largest}; expected positive numbers")
    if sigma == 0:
        return Distribution((min(max(mean, least), largest),))
    levels = (np.arange(4000) + 0.5) / 4000
    values = np.exp(math.log(mean) - sigma**2 / 2 + sigma * _normal_quantile(levels))
    return Distribution(tuple(float(v) for v in np.clip(values, least, largest)))


def parse(text: str, *, least: float = 0.0) -> Distribution:
    """`NUMBER`, `uniform:LOW,HIGH` or `lognormal:MEAN,SIGMA[,MAX]`. Raises a one-line ValueError."""
    kind, _, arguments = text.partition(":") if ":" in text else ("fixed", "", text)
    forms = "a number, uniform:LOW,HIGH or lognormal:MEAN,SIGMA[,MAX]"
    try:
        numbers = [float(part) for part in arguments.split(",")]
    except ValueError:
        raise ValueError(f"got {text!r}, expected {forms}; e.g. lognormal:1200,1,8192") from None
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"got {text!r}, expected finite numbers; e.g. lognormal:1200,1,8192")
    if kind == "fixed" and len(numbers) == 1 and numbers[0] >= least:
        return Distribution((numbers[0],))
    if kind == "uniform" and len(numbers) == 2 and least <= numbers[0] <= numbers[1]:
        low, high = numbers
        return Distribution(tuple(low + (high - low) * (i + 0.5) / 1000 for i in range(1000)))
    if kind == "lognormal" and len(numbers) in (2, 3) and numbers[0] > 0 and all(n >= 0 for n in numbers):
        largest = numbers[2] if len(numbers) == 3 else math.inf
        if largest >= numbers[0]:
            return lognormal(numbers[0], numbers[1], largest, least=least)
    raise ValueError(f"got {text!r}, expected {forms}, with numbers of at least {least:g} and MAX above MEAN")


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17; error below 1e-7."""
    t = 1 / (1 + 0.2316419 * np.abs(x))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * poly
    return np.where(x >= 0, 1 - upper, upper)


def _normal_quantile(p: np.ndarray) -> np.ndarray:
    """The inverse of `_normal_cdf`, from a table of it."""
    grid = np.linspace(-8, 8, 160_001)
    return np.interp(p, _normal_cdf(grid), grid)
