"""Curves of several runs for a paper: a line for each setting, a band over its seeds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from ..config import ConfigError
from ..monitor.jsonl import read_metrics
from ..monitor.panels import STYLE
from ..monitor.series import Series, read_series, smoothing_window
from .opened import EVALUATIONS, OpenedRun

AXES = {"steps": "optimizer steps", "samples": "answers trained on", "seconds": "time of training"}
LOSSES = ("train/loss/sft", "train/loss/dpo")
BANDS = ("sd", "ci", "range")
NOT_A_SETTING = ("seed", "name", "project", "output_dir", "monitor", "log", "cluster", "checkpoint", "resume")
"""Runs that differ in nothing else are seeds of one setting."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c6d31")
"""Okabe and Ito's, which people tell apart who see colours differently; with the dashes, a copier does too."""
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
LONGEST_LABEL = 40
FEW_POINTS = 12
"""So many are shown as dots on the line."""
PANEL_IN, HEIGHT_IN, GRID = 3.3, 2.5, 200
PAPER: dict[str, Any] = {
    **STYLE,
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlepad": 5,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class _Curves:
    """One run: its series over steps, and where each step lies on the figure's x axis. `settings`: by dotted key."""

    path: Path
    settings: Mapping[str, Any]
    series: Mapping[str, Series]
    x_of: Callable[[np.ndarray], np.ndarray]


def plot_runs(
    runs: Sequence[OpenedRun],
    *,
    metrics: Sequence[str] = (),
    x: str = "steps",
    band: str = "sd",
    smooth: int | None = None,
    stage: str | None = None,
) -> Figure:
    """A panel for each of `metrics`, a line for each setting of `runs`; default: reward and held-out tasks.

    `x`: steps, samples or seconds. Runs that differ in their seeds alone are one line, their mean, with a `band`: one
    standard deviation (sd), the 95 % interval of the mean (ci, Student's t) or from the least to the largest (range).
    `smooth`: a running mean over so many steps (None: a fifteenth of the run, 1: none); evaluations are never smoothed.
    Raises ConfigError in one line for what no run has.
    """
    if x not in AXES:
        raise ConfigError("x", got=x, expected=f"one of {', '.join(AXES)}", fix="steps is the default")
    if band not in BANDS:
        raise ConfigError("band", got=band, expected=f"one of {', '.join(BANDS)}", fix="sd is the default")
    curves = [_curves_of(run, x, stage) for run in runs]
    names = list(metrics) or _usual(curves)
    known = {name for run in curves for name in run.series}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.3)
            fix = f"did you mean {near[0]}?" if near else "see the names in metrics.jsonl"
            raise ConfigError("metric", got=name, expected="one that a run has logged", fix=fix)
    groups = _grouped(curves)
    with matplotlib.rc_context(PAPER):  # type: ignore[arg-type]
        needs_legend = len(groups) > 1 or any(len(own) > 1 for own in groups.values())
        width = PANEL_IN * len(names)
        num_columns = min(len(groups), max(1, int(width / (0.8 + 0.05 * max(len(label) + 10 for label in groups)))))
        rows = math.ceil(len(groups) / num_columns) if needs_legend else 0
        figure = Figure(figsize=(width, HEIGHT_IN + 0.17 * rows), layout="constrained")
        panels = figure.subplots(1, len(names), squeeze=False)[0]
        for ax, name in zip(panels, names, strict=True):
            _draw(ax, name, groups, x=x, band=band, smooth=smooth)
        if needs_legend:
            shown = {
                label: line for ax in panels[::-1] for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
            }
            place = {"loc": "outside lower center", "ncols": num_columns}
            figure.legend([*shown.values()], [*shown], handlelength=2.6, **place)
        figure.draw_without_rendering()  # lays out while the style is in force
    return figure


def save(figure: Figure, path: Path) -> None:
    """As the file's ending says: svg, pdf or png. The same figure gives the same bytes."""
    with matplotlib.rc_context({**PAPER, "svg.hashsalt": "leeway"}):  # type: ignore[arg-type]
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
        figure.savefig(path, dpi=200, metadata=metadata)


def _curves_of(run: OpenedRun, x: str, stage: str | None) -> _Curves:
    name = stage or run.stages[-1]
    rows = read_metrics(run.path_of(name) / "metrics.jsonl")
    series = read_series(rows)
    return _Curves(run.path, dict(run.settings(name)), series, _axis(run, series, x))


def _axis(run: OpenedRun, series: Mapping[str, Series], x: str) -> Callable[[np.ndarray], np.ndarray]:
    """From steps to the x axis. What a resumed run did is counted once, however long it stood still."""
    if x == "steps":
        return lambda steps: steps
    metric = {"samples": "train/sequences", "seconds": "step/total_s"}[x]
    if metric not in series:
        raise ConfigError("x", got=x, expected=f"runs that logged {metric}", fix=f"{run.path} did not: use steps")
    own = series[metric]
    at, total = np.append(own.steps[0] - 1, own.steps), np.append(0.0, np.cumsum(own.values))
    return lambda steps: np.interp(steps, at, total)


def _usual(curves: Sequence[_Curves]) -> list[str]:
    """The reward, and the held-out tasks by what tells right answers, if that is known."""
    known = [*dict.fromkeys(name for run in curves for name in run.series)]
    held_out = [name for end in EVALUATIONS for name in known if name.startswith("eval/") and name.endswith(f"/{end}")]
    usual = [name for name in ("train/reward/mean", *LOSSES) if name in known] + held_out[:1]
    if not usual:
        raise ConfigError("metric", got="none", expected="runs with a reward or a loss", fix="name a metric")
    return usual


def _grouped(curves: Sequence[_Curves]) -> dict[str, list[_Curves]]:
    """Runs by setting, each named by what sets it apart; by the run's name where that is nothing."""

    def telling(run: _Curves) -> dict[str, str]:
        return {k: str(v) for k, v in run.settings.items() if k.split(".")[0] not in NOT_A_SETTING}

    every = [telling(run) for run in curves]
    keys = sorted({key for own in every for key in own})
    differ = [key for key in keys if len({own.get(key) for own in every}) > 1]
    groups: dict[tuple[str, ...], list[_Curves]] = {}
    for run, own in zip(curves, every, strict=True):
        groups.setdefault(tuple(own.get(key, "default") for key in differ), []).append(run)
    if not differ:
        return {curves[0].path.name: list(curves)}
    labels = [", ".join(f"{_short(k, differ)} {v}" for k, v in zip(differ, g, strict=True)) for g in groups]
    if max(len(label) for label in labels) > LONGEST_LABEL:  # their folders' names say it in fewer words
        labels = _apart([own[0].path for own in groups.values()])
    return dict(zip(labels, groups.values(), strict=True))


def _apart(paths: Sequence[Path]) -> list[str]:
    """The parts of each path in which it is not like the others."""
    parts = [path.absolute().parts for path in paths]
    depth = min(map(len, parts))
    first = next((i for i in range(depth) if len({own[i] for own in parts}) > 1), depth - 1)
    last = next((i for i in range(1, depth) if len({own[-i] for own in parts}) > 1), 1)
    return ["/".join(own[first : len(own) - last + 1]) or own[-1] for own in parts]


def _short(key: str, among: Sequence[str]) -> str:
    last = key.split(".")[-1]
    return key if sum(other.split(".")[-1] == last for other in among) > 1 else last.replace("_", " ")


def _draw(ax: Axes, name: str, groups: Mapping[str, list[_Curves]], *, x: str, band: str, smooth: int | None) -> None:
    is_evaluation, smoothed = name.startswith("eval/"), False
    for number, (label, runs) in enumerate(groups.items()):
        color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
        own = [run for run in runs if name in run.series]
        if not own:
            continue
        lines = [_line(run, name, 1 if is_evaluation else smooth) for run in own]
        many = len(lines) > 1
        at, values = _aligned(lines, by_step=is_evaluation)
        mean = values.mean(axis=0)
        marker = {"marker": "o", "markersize": 2.5} if len(at) <= FEW_POINTS else {}
        shown = f"{label} ({len(lines)} seeds)" if many else label
        raw = own[0].series[name]
        smoothed |= not np.array_equal(raw.values, lines[0][1])
        if not many:
            ax.plot(own[0].x_of(raw.steps), raw.values, color=color, lw=0.6, alpha=0.3)
        ax.plot(at, mean, color=color, ls=dash, label=shown, **marker)
        if many:
            low, high = _band(values, band)
            ax.fill_between(at, low, high, color=color, alpha=0.18, lw=0)
    ax.set_title(_words(name) + (" (running mean)" if smoothed else ""))
    ax.margins(x=0.02)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=x == "steps", min_n_ticks=1))
    ax.set_xlabel(AXES[x])
    if x == "samples":
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _thousands(value)))
    if x == "seconds":
        _in_time(ax)


def _line(run: _Curves, name: str, smooth: int | None) -> tuple[np.ndarray, np.ndarray]:
    series = run.series[name]
    window = smoothing_window(len(series.steps)) if smooth is None else smooth
    return run.x_of(series.steps), series.smoothed(window) if window > 1 else series.values


def _aligned(lines: Sequence[tuple[np.ndarray, np.ndarray]], *, by_step: bool) -> tuple[np.ndarray, np.ndarray]:
    """(x [n], values [runs, n]) where all runs have got to: at their own points if they share them.

    `by_step`: at the mean x of each point, if all have as many.
    """
    first, same_number = lines[0][0], len({len(at) for at, _ in lines}) == 1
    if same_number and (by_step or all(np.array_equal(at, first) for at, _ in lines)):
        return np.mean([at for at, _ in lines], axis=0), np.array([values for _, values in lines])
    low, high = max(at[0] for at, _ in lines), min(at[-1] for at, _ in lines)
    grid = np.linspace(low, max(low, high), GRID if high > low else 1)
    return grid, np.array([np.interp(grid, at, values) for at, values in lines])


def _band(values: np.ndarray, band: str) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of `values` [runs, n]."""
    if band == "range":
        return values.min(axis=0), values.max(axis=0)
    mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
    if band == "ci":
        spread = spread * _t95(len(values) - 1) / math.sqrt(len(values))
    return mean - spread, mean + spread


def _t95(degrees: int) -> float:
    """Student's t, two-sided 95 %."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[degrees - 1] if degrees <= len(table) else 1.96 + 2.4 / degrees


def _words(name: str) -> str:
    """eval/held_out/exact_match -> held out: exact match."""
    if name.startswith("eval/"):
        _, taskset, metric = name.split("/", 2)
        return f"{taskset.replace('_', ' ')}: {metric.replace('_', ' ')}"
    known = {"train/reward/mean": "training reward", **dict.fromkeys(LOSSES, "training loss")}
    return known.get(name, name)


def _in_time(ax: Axes) -> None:
    """Ticks at round numbers of the unit that suits the axis."""
    longest = ax.dataLim.x1
    unit, seconds = ("h", 3600.0) if longest > 2 * 3600 else ("min", 60.0) if longest > 180 else ("s", 1.0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / seconds:g}"))
    each = longest / seconds / 6
    power = 10.0 ** math.floor(math.log10(each)) if each > 0 else 1.0
    ax.xaxis.set_major_locator(MultipleLocator(seconds * next(power * m for m in (1, 2, 5, 10) if power * m >= each)))
    ax.set_xlabel(f"{AXES['seconds']} ({unit})")


def _thousands(value: float) -> str:
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"
