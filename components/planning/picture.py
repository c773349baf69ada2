"""plan.png: step time over the lag bound, who is busy, and how old the trained tokens would be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..monitor.panels import GENERATE, LIMIT, STYLE, TRAIN
from .predict import Prediction

_MAX_BARS = 16
_MAX_LINES = 6


def draw_plan(
    predictions: Sequence[Prediction],
    out_png: Path,
    *,
    title: str,
    best: Prediction,
    measured: tuple[int, float] | None = None,
) -> None:
    """Plot `predictions` into `out_png`; `measured` is (lag bound, seconds per step) of the run itself."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(15, 4.6), layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold")
        left, middle, right = figure.subplots(1, 3, width_ratios=[1.1, 1.0, 1.0])
        _step_time(left, predictions, best, measured)
        _busy(middle, predictions, best)
        _lags(right, predictions, best)
        out_png.parent.mkdir(parents=True, exist_ok=True)
        temporary = out_png.with_name(f".{out_png.name}.tmp")
        figure.savefig(temporary, dpi=110, format="png")
        temporary.replace(out_png)


def _step_time(
    axes: Axes, predictions: Sequence[Prediction], best: Prediction, measured: tuple[int, float] | None
) -> None:
    lines: dict[tuple[int, int, int], list[Prediction]] = {}
    for p in predictions:
        s = p.settings
        lines.setdefault((s.generators, s.trainers, s.reorder_window), []).append(p)
    best_key = (best.settings.generators, best.settings.trainers, best.settings.reorder_window)
    shown = sorted(lines, key=lambda key: (key != best_key, min(p.step_s for p in lines[key])))[:_MAX_LINES]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.85, len(shown)))
    for key, colour in zip(shown, colours, strict=True):
        line = sorted(lines[key], key=lambda p: p.settings.max_policy_lag)
        lags = [p.settings.max_policy_lag for p in line]
        axes.plot(lags, [p.step_s for p in line], "o-", color=colour, label=f"{key[0]} + {key[1]}, W={key[2]}")
    limits: dict[int, float] = {}
    for p in lines[best_key]:
        limits[p.settings.max_policy_lag] = p.limit_s
    lags = sorted(limits)
    axes.plot(lags, [limits[lag] for lag in lags], "--", color=LIMIT, label="limit of the best line")
    axes.plot(best.settings.max_policy_lag, best.step_s, "*", color=LIMIT, markersize=15, zorder=5, label="recommended")
    if measured is not None:
        axes.plot(*measured, "x", color="black", markersize=9, markeredgewidth=2, zorder=5, label="measured")
    axes.set_title("Seconds per step (generators + trainers, W)")
    axes.set_xlabel("staleness.max_policy_lag")
    axes.set_xticks(sorted({p.settings.max_policy_lag for p in predictions}))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8.5)


def _busy(axes: Axes, predictions: Sequence[Prediction], best: Prediction) -> None:
    shown = sorted(predictions, key=lambda p: p.step_s)[:_MAX_BARS]
    places = np.arange(len(shown))
    axes.barh(places - 0.2, [100 * p.generator_busy for p in shown], 0.38, color=GENERATE, label="generators")
    axes.barh(places + 0.2, [100 * p.trainer_busy for p in shown], 0.38, color=TRAIN, label="trainers")
    axes.set_yticks(places, [_label(p) + ("  *" if p is best else "") for p in shown], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_title("Busy, % of the time (fastest first)")
    axes.legend(loc="lower right", fontsize=8.5, frameon=True)


def _lags(axes: Axes, predictions: Sequence[Prediction], best: Prediction) -> None:
    s = best.settings
    split = (s.generators, s.trainers, s.reorder_window)
    shown = [p for p in predictions if (p.settings.generators, p.settings.trainers, p.settings.reorder_window) == split]
    shown = sorted(shown, key=lambda p: p.settings.max_policy_lag)
    colours = matplotlib.colormaps["plasma"](np.linspace(0.1, 0.85, len(shown)))
    width = 0.8 / len(shown)
    for index, (p, colour) in enumerate(zip(shown, colours, strict=True)):
        places = [lag - 0.4 + (index + 0.5) * width for lag in p.lag_share]
        label = f"L={p.settings.max_policy_lag}, mean {p.lag_mean:.2f}"
        axes.bar(places, [100 * share for share in p.lag_share.values()], width, color=colour, label=label)
    axes.set_title(f"Lag of tokens, % ({split[0]} + {split[1]}, W={split[2]})")
    axes.set_xlabel("policy lag, optimizer steps")
    axes.set_xticks(range(max((p.lag_max for p in shown), default=0) + 1))
    axes.legend(fontsize=8.5)


def _label(p: Prediction) -> str:
    s = p.settings
    return f"L={s.max_policy_lag} W={s.reorder_window} {s.generators}+{s.trainers}"
