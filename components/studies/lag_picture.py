"""The picture of a frontier study: accuracy against the lag bound at equal samples and at equal time, and the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .lag_report import CellSummary, FrontierRun, Interval

COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d6a9f", "#e09f3e", "#444444", "#3bb3b3", "#a0522d")
NAMES = {"none": "uncorrected", "decoupled": "decoupled", "tis": "truncated importance sampling"}


def draw_frontier(runs: Sequence[FrontierRun], summaries: Sequence[CellSummary], path: Path, *, margin: float) -> None:
    """Three panels side by side: final accuracy, accuracy after the fastest cell's time, seconds of training."""
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    panels = figure.subplots(1, 3)
    num_seeds, measure = max(s.num_seeds for s in summaries), runs[0].measure
    _panel(panels[0], summaries, lambda s: s.accuracy, title=f"Held-out {measure} at equal samples")
    _points(panels[0], runs, summaries)
    if (reference := _reference(summaries)) is not None:
        panels[0].axhline(
            reference.accuracy.mean - margin, color="#999999", ls="--", lw=1, label=f"lockstep - margin of {margin:g}"
        )
    _panel(panels[1], summaries, lambda s: s.accuracy_at_equal_time, title=f"Held-out {measure} at equal wall-clock")
    _panel(panels[2], summaries, lambda s: s.train_s, title="Seconds of training for these samples")
    panels[2].set_ylim(bottom=0)
    for ax in panels[:2] if measure == "accuracy" else ():
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, 0.0), min(high, 1.0))  # with few seeds an interval can extend outside [0, 1]
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=10, frameon=False)
    what = f"mean and 95 % interval over {num_seeds} seeds" if num_seeds > 1 else "one seed, so no intervals"
    figure.suptitle(f"What lag costs and gains: {what}", fontsize=13)
    figure.savefig(path, dpi=120)


def _reference(summaries: Sequence[CellSummary]) -> CellSummary | None:
    """What all verdicts compare with; None if each correction has its own lockstep run, or there is none."""
    lockstep = [s for s in summaries if s.lockstep]
    chosen = [s for s in lockstep if s.correction == "none"] or lockstep
    return chosen[0] if len(chosen) == 1 else None


def _panel(ax: Axes, summaries: Sequence[CellSummary], value: Callable[[CellSummary], Interval], *, title: str) -> None:
    lags = sorted({s.max_policy_lag for s in summaries})
    corrections = list(dict.fromkeys(s.correction for s in summaries))
    for i, correction in enumerate(corrections):
        cells = [s for s in summaries if s.correction == correction]
        intervals = [value(s) for s in cells]
        # Bounds are evenly spaced and corrections side by side, so that no interval hides another.
        xs = [lags.index(s.max_policy_lag) + _offset(i, len(corrections)) for s in cells]
        means = [x.mean for x in intervals]
        errors = [[x.mean - x.low for x in intervals], [x.high - x.mean for x in intervals]]
        ax.errorbar(
            xs, means, errors, color=COLORS[i % len(COLORS)], marker="o", ms=6, lw=1.4, capsize=4,
            label=NAMES.get(correction, correction),
        )  # fmt: skip
    lockstep = {s.max_policy_lag for s in summaries if s.lockstep}
    ax.set_xticks(range(len(lags)), [f"{lag}\n(lockstep)" if lag in lockstep else str(lag) for lag in lags])
    ax.set_xlim(-0.6, len(lags) - 0.4)
    ax.set_xlabel("bound on the policy lag, optimizer steps (real lag forced towards it)")
    ax.set_title(title, fontsize=11)
    ax.grid(axis="y", color="#e5e5e5")
    ax.spines[["top", "right"]].set_visible(False)


def _points(ax: Axes, runs: Sequence[FrontierRun], summaries: Sequence[CellSummary]) -> None:
    """Every run as a small point: an interval over five seeds hides how they are distributed."""
    lags = sorted({s.max_policy_lag for s in summaries})
    corrections = list(dict.fromkeys(s.correction for s in summaries))
    for i, correction in enumerate(corrections):
        chosen = [r for r in runs if r.correction == correction]
        xs = [lags.index(r.max_policy_lag) + _offset(i, len(corrections)) + 0.05 for r in chosen]
        ax.scatter(xs, [r.accuracy for r in chosen], s=9, color=COLORS[i % len(COLORS)], alpha=0.45, linewidths=0)


def _offset(index: int, count: int) -> float:
    return (index - (count - 1) / 2) * 0.18
