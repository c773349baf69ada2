"""Results of a frontier study: means with 95 % intervals over seeds, and which bounds are not inferior to lockstep."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..monitor.jsonl import write_text_atomically

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; the normal's beyond.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FrontierRun:
    """One finished run. `curve`: (policy version, seconds of training until then, held-out accuracy), in order.

    `measure`: "accuracy", or "reward" if it is not known which answers are right.
    """

    max_policy_lag: int
    lockstep: bool
    correction: str
    seed: int
    lag_mean: float
    lag_max: int
    dropped_stale: int
    curve: list[tuple[int, float, float]]
    measure: str = "accuracy"

    @property
    def accuracy(self) -> float:
        """After all samples: every run of a study trains on the same number."""
        return self.curve[-1][2]

    @property
    def train_s(self) -> float:
        return self.curve[-1][1]

    def accuracy_at(self, seconds: float) -> float:
        """After this many seconds of training, linear between evaluations; beyond the last one, its value."""
        for (_, t0, a0), (_, t1, a1) in zip(self.curve, self.curve[1:], strict=False):
            if seconds <= t1:
                return a0 + (a1 - a0) * (seconds - t0) / (t1 - t0)
        return self.accuracy


@dataclass(frozen=True)
class Interval:
    """Mean and 95 % interval (Student's t) over seeds; with one seed the interval is unknown."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        n = len(values)
        mean = sum(values) / n
        if n < 2:
            return cls(mean, math.nan, math.nan)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
        half = (_T95[n - 2] if n - 2 < len(_T95) else 1.960) * deviation / math.sqrt(n)
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """One (bound, correction) over its seeds.

    `difference`: accuracy minus lockstep's, paired by seed, at equal samples. The reference is lockstep without a
    correction, or with this one where the study has no uncorrected lockstep.
    """

    max_policy_lag: int
    lockstep: bool
    correction: str
    num_seeds: int
    lag_mean: float
    lag_max: int
    train_s: Interval
    accuracy: Interval
    accuracy_at_equal_time: Interval
    difference: Interval | None
    verdict: str


def summarise(runs: Sequence[FrontierRun], *, margin: float) -> list[CellSummary]:
    """One entry per (bound, correction), smallest bound first. Equal time: the time that the fastest of them needed."""
    cells: dict[tuple[int, str], list[FrontierRun]] = {}
    for run in runs:
        cells.setdefault((run.max_policy_lag, run.correction), []).append(run)
    fastest_s = min(Interval.of([r.train_s for r in of_cell]).mean for of_cell in cells.values())
    return [
        _summary(of_cell, _reference(runs, correction), fastest_s=fastest_s, margin=margin)
        for (_, correction), of_cell in sorted(cells.items())
    ]


def conclusions(summaries: Sequence[CellSummary], *, margin: float) -> list[str]:
    """One line per correction: the largest bound that is not inferior to lockstep, or why there is no such verdict."""
    lines = []
    for correction in dict.fromkeys(s.correction for s in summaries):
        cells = [s for s in summaries if s.correction == correction and not s.lockstep]
        good = [s for s in cells if s.verdict == "not inferior"]
        open_ones = [s for s in cells if s.verdict.startswith("too few seeds")]
        if good:
            best = max(good, key=lambda s: s.max_policy_lag)
            assert best.difference is not None
            line = (
                f"correction {correction}: largest bound not inferior to lockstep: {best.max_policy_lag} "
                f"(difference {best.difference.mean:+.3f}, 95 % interval {best.difference.low:+.3f} to "
                f"{best.difference.high:+.3f}, margin {margin:g})"
            )
        elif cells and all(s.difference is None for s in cells):
            line = f"correction {correction}: not compared, because lockstep was not run"
        else:
            line = f"correction {correction}: no bound was shown to be not inferior to lockstep"
        if open_ones:
            line += "; " + "; ".join(f"lag {s.max_policy_lag}: {s.verdict}" for s in open_ones)
        lines.append(line)
    return lines


def write_csv(runs: Sequence[FrontierRun], path: Path) -> None:
    """One line per run and evaluation; rewritten after each run, so that an interrupted study leaves one."""
    rows: list[list[object]] = [
        ["max_policy_lag", "lockstep", "correction", "seed", "lag_mean", "lag_max", "policy_version", "train_s",
         runs[0].measure]
    ]  # fmt: skip
    for r in runs:
        rows += [
            [r.max_policy_lag, int(r.lockstep), r.correction, r.seed, f"{r.lag_mean:.3f}", r.lag_max, version,
             f"{seconds:.2f}", f"{accuracy:.4f}"]
            for version, seconds, accuracy in r.curve
        ]  # fmt: skip
    lines: list[str] = []
    csv.writer(_Appender(lines), lineterminator="\n").writerows(rows)
    write_text_atomically(path, "".join(lines))


class _Appender:
    """The file that csv writes to: a list of lines."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, line: str) -> None:
        self._lines.append(line)


def _reference(runs: Sequence[FrontierRun], correction: str) -> dict[int, float]:
    """Accuracy of lockstep by seed."""
    lockstep = [r for r in runs if r.lockstep]
    chosen = [r for r in lockstep if r.correction == "none"] or [r for r in lockstep if r.correction == correction]
    return {r.seed: r.accuracy for r in chosen}


def _summary(
    of_cell: list[FrontierRun], reference: dict[int, float], *, fastest_s: float, margin: float
) -> CellSummary:
    first = of_cell[0]
    pairs = [r.accuracy - reference[r.seed] for r in of_cell if r.seed in reference]
    difference = Interval.of(pairs) if pairs else None
    return CellSummary(
        max_policy_lag=first.max_policy_lag,
        lockstep=first.lockstep,
        correction=first.correction,
        num_seeds=len(of_cell),
        lag_mean=sum(r.lag_mean for r in of_cell) / len(of_cell),
        lag_max=max(r.lag_max for r in of_cell),
        train_s=Interval.of([r.train_s for r in of_cell]),
        accuracy=Interval.of([r.accuracy for r in of_cell]),
        accuracy_at_equal_time=Interval.of([r.accuracy_at(fastest_s) for r in of_cell]),
        difference=difference,
        verdict="reference" if first.lockstep else _verdict(difference, len(pairs), margin),
    )


def _verdict(difference: Interval | None, num_pairs: int, margin: float) -> str:
    if difference is None:
        return "no lockstep run to compare with"
    if num_pairs < 2:
        return "too few seeds to say (1; at least 2 are needed for an interval)"
    if difference.low > -margin:
        return "not inferior"
    if difference.high < -margin:
        return "inferior"
    return f"too few seeds to say ({num_pairs}; {_seeds_needed(difference, num_pairs, margin)} would do)"


def _seeds_needed(difference: Interval, num_pairs: int, margin: float) -> str:
    """How many seeds would make the interval's half width smaller than the distance from the mean to the margin."""
    distance = abs(difference.mean + margin)
    t = _T95[num_pairs - 2] if num_pairs - 2 < len(_T95) else 1.960
    deviation = (difference.high - difference.mean) / t * math.sqrt(num_pairs)
    for n in range(num_pairs + 1, 1001):
        if (_T95[n - 2] if n - 2 < len(_T95) else 1.960) * deviation / math.sqrt(n) < distance:
            return f"about {n}"
    return "more than 1000"
