"""The panels of curves.png: each draws one question's metrics on one Axes, with units in its title."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .series import Series, bin_shares, smoothing_window

TRAIN, GENERATE, WAIT, WEIGHTS, OPTIM, LIMIT, OTHER = (
    "#2f6db5",
    "#2a9d6f",
    "#f0a03c",
    "#8e6bbf",
    "#8cbbe8",
    "#c8372d",
    "#d9d9d9",
)
MAX_BINS = 60

STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelcolor": "#444444",
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a panel may draw from: a stage's title, its series by metric name, the bound on the policy lag if known."""

    title: str
    metrics: Mapping[str, Series]
    max_policy_lag: int | None

    def evaluations(self, metric: str) -> dict[str, Series]:
        """taskset -> series of eval/<taskset>/<metric>."""
        names = [name for name in self.metrics if name.startswith("eval/") and name.endswith("/" + metric)]
        return {name[len("eval/") : -len(metric) - 1]: self.metrics[name] for name in sorted(names)}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One Axes, `width` wide, drawn when any metric of `needs` (a name, or the end of one from a "/" on) was logged."""

    needs: tuple[str, ...]
    width: float
    draw: Callable[[Axes, Stage], None]

    def has_data(self, metrics: Mapping[str, Series]) -> bool:
        return any(
            name == need or (need.startswith("/") and name.endswith(need)) for need in self.needs for name in metrics
        )


def draw_reward(ax: Axes, stage: Stage) -> None:
    reward = stage.metrics.get("train/reward/mean")
    exact = stage.metrics.get("train/accuracy/exact_match")
    if reward is not None and exact is not None and _same(reward, exact):
        exact = None  # the reward is the exact match: one line says it
    if reward is not None:
        _line(ax, reward, TRAIN, "training reward")
    if exact is not None:
        _line(ax, exact, WEIGHTS, "training exact match", raw=False, linestyle="--")
    in_unit = reward is None or (reward.values.min() >= 0 and reward.values.max() <= 1)
    metric = "exact_match" if in_unit and stage.evaluations("exact_match") else "reward"
    evaluations = stage.evaluations(metric)
    _evaluations(ax, evaluations, f"held-out {metric.replace('_', ' ')}")
    if in_unit:
        # Room above and below the data, never beyond what a share can be by more than the numbers need.
        low, high = ax.dataLim.y0, ax.dataLim.y1
        margin = max(0.04, 0.12 * (high - low))
        ax.set_ylim(max(-0.03, low - margin), min(1.1, high + 1.6 * margin))
    _finish(ax, "Reward and held-out evaluation" + (" (share, 0 to 1)" if in_unit else " (reward units)"), ncols=3)


def draw_policy_lag(ax: Axes, stage: Stage) -> None:
    mean, largest = stage.metrics.get("train/policy_lag/mean"), stage.metrics.get("train/policy_lag/max")
    top = 1.0
    if largest is not None:
        # The largest of neighbouring steps: single steps that go up and down again would fill the panel with stripes.
        shown = largest.binned(MAX_BINS, np.max)
        ax.step(shown.steps, shown.values, where="post", color=WAIT, lw=3, label="max", **_dots(largest))
        top = max(top, largest.values.max())
    if mean is not None:
        _line(ax, mean, TRAIN, "mean", raw=largest is None)
        top = max(top, mean.values.max())
    if stage.max_policy_lag is not None:
        ax.axhline(stage.max_policy_lag, color=LIMIT, lw=1.6, ls="--", label=f"bound ({stage.max_policy_lag})")
        top = max(top, stage.max_policy_lag)
    ax.set_ylim(-0.05 * top, top * 1.15)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    _finish(ax, "Policy lag of trained tokens (steps)", ncols=3)


def draw_trainer_time(ax: Axes, stage: Stage) -> None:
    parts = {
        "forward + backward": ("step/forward_backward_s", TRAIN),
        "optimizer": ("step/optim_s", OPTIM),
        "publish": ("step/publish_s", WEIGHTS),
        "waits for a batch": ("step/wait_for_batch_s", WAIT),
    }
    _shares(ax, stage, parts, total=stage.metrics.get("step/total_s"), rest="other")
    _finish(ax, "Trainer (% of its time)", ncols=2)


def draw_collector_time(ax: Axes, stage: Stage) -> None:
    parts = {
        "generates": ("collector/generate_frac", GENERATE),
        "paused for weights": ("collector/pause_frac", WEIGHTS),
        "waits for a slot": ("collector/wait_for_slot_frac", WAIT),
    }
    asleep = stage.metrics.get("collector/asleep_frac")
    if asleep is not None and asleep.values.max() > 0:
        parts["sleeps"] = ("collector/asleep_frac", OPTIM)
    rest = "other" if "collector/generate_frac" in stage.metrics else "generates or other"
    _shares(ax, stage, parts, total=None, rest=rest)
    _finish(ax, "Collectors (% of their time)", ncols=2)


def draw_tokens_per_s(ax: Axes, stage: Stage) -> None:
    for name, color, label in (
        ("collector/tokens_per_s", GENERATE, "generated"),
        ("train/tokens_per_s", TRAIN, "trained"),
    ):
        if name in stage.metrics:
            _line(ax, stage.metrics[name], color, label)
    ax.set_ylim(0, 1.12 * max(ax.dataLim.y1, 1e-9))
    ax.yaxis.set_major_formatter(FuncFormatter(_thousands))
    _finish(ax, "Throughput (tokens per second)", ncols=2)


def draw_step_time(ax: Axes, stage: Stage) -> None:
    metrics = stage.metrics
    top = 1e-9
    if "step/total_s" in metrics:
        # Not the maximum: the first step compiles and loads, and would flatten all others.
        top = 1.35 * float(np.percentile(metrics["step/total_s"].values, 98))
        _line(ax, metrics["step/total_s"], TRAIN, "measured", reduce=np.median)
    for name, label, style in (
        ("limit/serial_s", "longest rollout + training, over L + 1", ":"),
        ("limit/step_s", "limit (no schedule is faster)", "--"),
    ):
        if name in metrics:
            series = metrics[name]
            top = max(top, 1.1 * series.values.max())
            color = LIMIT if name == "limit/step_s" else "#777777"
            if len(series.values) == 1 or np.ptp(series.values) == 0:
                ax.axhline(series.values[-1], color=color, lw=1.6, ls=style, label=label)
            else:
                ax.plot(series.steps, series.values, color=color, lw=1.6, ls=style, label=label)
    ax.set_ylim(0, top)
    _finish(ax, "Time per step (s)", ncols=3)


def draw_efficiency(ax: Axes, stage: Stage) -> None:
    efficiency = stage.metrics["limit/efficiency"]
    percent = Series(steps=efficiency.steps, values=100 * efficiency.values)
    _line(ax, percent, TRAIN, f"reached (median {np.median(percent.values):.0f} %)", reduce=np.median)
    ax.axhline(100, color=LIMIT, lw=1.6, ls="--", label="limit")
    ax.set_ylim(0, max(115.0, min(1.1 * percent.values.max(), 200.0)))
    _finish(ax, "Efficiency (% of the limit's speed)", ncols=2)


def draw_sft_loss(ax: Axes, stage: Stage) -> None:
    loss = stage.metrics["train/loss/sft"]
    final = loss.smoothed(smoothing_window(len(loss.steps)))[-1]
    # In the legend: beside its point it would lie on the held-out loss's number, which is about as large.
    _line(ax, loss, TRAIN, f"training loss ({final:.3g} at the end)")
    _evaluations(ax, stage.evaluations("loss_sft"), "held-out loss")
    ax.set_ylim(min(0.0, ax.dataLim.y0), 1.08 * max(ax.dataLim.y1, 1e-9))
    _finish(ax, "Supervised loss (nats per token)", ncols=2)


def draw_dpo(ax: Axes, stage: Stage) -> None:
    _line(ax, stage.metrics["train/loss/dpo"], TRAIN, "loss")
    _line(ax, stage.metrics["train/preference/margin"], WEIGHTS, "margin")
    _evaluations(ax, stage.evaluations("preference_margin"), "held-out margin")
    _finish(ax, "Preference loss and margin (nats per pair)", ncols=2)


_REWARD = Panel(needs=("train/reward/mean", "/exact_match", "/reward"), width=2, draw=draw_reward)
_LAG = Panel(needs=("train/policy_lag/mean", "train/policy_lag/max"), width=1, draw=draw_policy_lag)
_TRAINER = Panel(needs=("step/wait_for_batch_s", "step/forward_backward_s"), width=1, draw=draw_trainer_time)
_COLLECTOR = Panel(needs=("collector/wait_for_slot_frac", "collector/pause_frac"), width=1, draw=draw_collector_time)
_TOKENS = Panel(needs=("collector/tokens_per_s", "train/tokens_per_s"), width=1, draw=draw_tokens_per_s)
_STEP = Panel(needs=("step/total_s", "limit/step_s"), width=2, draw=draw_step_time)
_EFFICIENCY = Panel(needs=("limit/efficiency",), width=1, draw=draw_efficiency)
_SFT_LOSS = Panel(needs=("train/loss/sft",), width=2, draw=draw_sft_loss)
_DPO = Panel(needs=("train/loss/dpo",), width=2, draw=draw_dpo)

RL_ROWS: tuple[tuple[Panel, ...], ...] = ((_REWARD, _LAG), (_TRAINER, _COLLECTOR, _TOKENS), (_STEP, _EFFICIENCY))
SFT_ROWS: tuple[tuple[Panel, ...], ...] = ((_SFT_LOSS, _TOKENS),)
DPO_ROWS: tuple[tuple[Panel, ...], ...] = ((_DPO, _TOKENS),)


def _line(
    ax: Axes,
    series: Series,
    color: str,
    label: str,
    *,
    raw: bool = True,
    linestyle: str = "-",
    reduce: Callable[[np.ndarray], Any] = np.mean,
) -> None:
    """Every step faint, their running mean (or median) strong; short series get dots so that a single step shows."""
    window = smoothing_window(len(series.steps))
    if window == 1:
        ax.plot(series.steps, series.values, color=color, lw=2, ls=linestyle, label=label, **_dots(series))
        return
    if raw:
        ax.plot(series.steps, series.values, color=color, lw=0.8, alpha=0.35)
    ax.plot(series.steps, series.smoothed(window, reduce), color=color, lw=2.2, ls=linestyle, label=label)
    ax.set_xlabel(f"optimizer step (strong: {reduce.__name__} of {window} steps)")


def _evaluations(ax: Axes, series_of: Mapping[str, Series], label: str) -> None:
    """One marked line for each taskset, with its first and last value as numbers."""
    for (taskset, series), marker in zip(series_of.items(), "oDs^v" * len(series_of), strict=False):
        ax.plot(
            series.steps,
            series.values,
            color=GENERATE,
            marker=marker,
            ms=8,
            mec="white",
            mew=1.2,
            ls=":",
            lw=1.3,
            label=label + (f", {taskset}" if len(series_of) > 1 else ""),
            zorder=5,
        )
        for index in sorted({0, len(series.steps) - 1}):
            _number(ax, series.steps[index], series.values[index], f"{series.values[index]:.3g}", GENERATE)


def _shares(ax: Axes, stage: Stage, parts: Mapping[str, tuple[str, str]], *, total: Series | None, rest: str) -> None:
    """Stacked bars in percent; colours by part, what no part explains in grey on top."""
    present = {label: (stage.metrics[name], color) for label, (name, color) in parts.items() if name in stage.metrics}
    series = {label: part for label, (part, _) in present.items()}
    if total is None and any(name.endswith("_s") for name, _ in parts.values()):
        total = _sum(list(series.values()))  # no step/total_s: shares of what was measured
    centres, width, shares = bin_shares(series, total, max_bins=MAX_BINS)
    bottom = np.zeros(len(centres))
    for label, share in shares.items():
        color = OTHER if label == "other" else present[label][1]
        if label == "other" and share.max() < 0.5:
            continue
        whole = f"{rest if label == 'other' else label} {np.mean(share):.0f} %"
        ax.bar(centres, share, width=width, bottom=bottom, color=color, label=whole, linewidth=0)
        bottom = bottom + share
    ax.set_ylim(0, 100)
    ax.set_xlim(centres[0] - width / 2, centres[-1] + width / 2)
    ax.grid(visible=False)


def _sum(parts: list[Series]) -> Series:
    steps = np.unique(np.concatenate([part.steps for part in parts]))
    values = np.zeros(len(steps))
    for part in parts:
        values[np.searchsorted(steps, part.steps)] += part.values
    return Series(steps=steps, values=values)


def _same(one: Series, other: Series) -> bool:
    return np.array_equal(one.steps, other.steps) and np.allclose(one.values, other.values)


def _dots(series: Series) -> dict[str, Any]:
    return {"marker": "o", "ms": 5} if len(series.steps) < 10 else {}


def _number(ax: Axes, step: float, value: float, text: str, color: str) -> None:
    """The value above its point, on a white ground so that lines behind it do not cross it."""
    ground = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8}
    ax.annotate(
        text,
        (step, value),
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
        color=color,
        fontweight="bold",
        bbox=ground,
        zorder=6,
    )


def _thousands(value: float, _: int) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _finish(ax: Axes, title: str, *, ncols: int) -> None:
    """Title, whole-numbered steps, and the legend below the axes, where it can cover nothing."""
    ax.set_title(title)
    if not ax.get_xlabel():
        ax.set_xlabel("optimizer step")
    low, high = ax.dataLim.x0, ax.dataLim.x1
    if high - low < 1:
        ax.set_xlim(low - 0.5, high + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=ncols, columnspacing=1.4, handlelength=1.6)
