"""The picture of a frontier study: accuracy against the lag bound at equal samples and at equal time, and the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leeway.recipes.frontier_report import CellSummary, FrontierRun, Interval

COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d6a9f", "#e09f3e")
NAMES = {"none": "uncorrected", "decoupled": "decoupled", "tis": "truncated importance sampling"}


def draw_frontier(runs: Sequence[FrontierRun], summaries: Sequence[CellSummary], path: Path, *, margin: float) -> None:
    """Three panels side by side: final accuracy, accuracy after the fastest cell's time, seconds of training."""
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    panels = figure.subplots(1, 3)
    num_seeds = max(s.num_seeds for s in summaries)
    _panel(panels[0], summaries, lambda s: s.accuracy, title="Held-out accuracy at equal samples")
    _points(panels[0], runs, summaries)
    reference = next((s for s in summaries if s.lockstep), None)
    if reference is not None:
        panels[0].axhline(reference.accuracy.mean - margin, color="#999999", ls="--", lw=1)
        panels[0].annotate(
            f"lockstep - {margin:g}",
            (0.99, reference.accuracy.mean - margin),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=9,
            color="#666666",
        )
    _panel(panels[1], summaries, lambda s: s.accuracy_at_equal_time, title="Held-out accuracy at equal wall-clock")
    _panel(panels[2], summaries, lambda s: s.train_s, title="Seconds of training for these samples")
    panels[2].set_ylim(bottom=0)
    for ax in panels[:2]:
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, 0.0), min(high, 1.0))  # few seeds make intervals that no share can have
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=10, frameon=False)
    figure.suptitle(f"What lag costs and gains: mean and 95 % interval over {num_seeds} seeds", fontsize=13)
    figure.savefig(path, dpi=120)


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
    ax.set_xlabel("bound on the policy lag, optimizer steps (real lag forced to it)")
    ax.set_title(title, fontsize=11)
    ax.grid(axis="y", color="#e5e5e5")
    ax.spines[["top", "right"]].set_visible(False)


def _points(ax: Axes, runs: Sequence[FrontierRun], summaries: Sequence[CellSummary]) -> None:
    """Every run, small: an interval of five seeds hides how they lie."""
    lags = sorted({s.max_policy_lag for s in summaries})
    corrections = list(dict.fromkeys(s.correction for s in summaries))
    for i, correction in enumerate(corrections):
        chosen = [r for r in runs if r.correction == correction]
        xs = [lags.index(r.max_policy_lag) + _offset(i, len(corrections)) + 0.05 for r in chosen]
        ax.scatter(xs, [r.accuracy for r in chosen], s=9, color=COLORS[i % len(COLORS)], alpha=0.45, linewidths=0)


def _offset(index: int, count: int) -> float:
    return (index - (count - 1) / 2) * 0.18
