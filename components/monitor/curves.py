"""curves.png: one picture of a run, readable at a glance. Each row of it answers a question:

    did it learn, and how far off-policy?   reward and held-out evaluation | policy lag against its bound
    who waits for whom?                     trainer's time | collectors' time | tokens per second
    how fast could it be?                   seconds per step against the limit | efficiency

A supervised stage shows its loss and its speed. A panel whose metrics were never logged is left out and its
neighbours widen. Colours mean the same everywhere: blue trains, green generates, orange waits, purple moves weights,
red is a bound or a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure, SubFigure

from .jsonl import read_metrics
from .panels import DPO_ROWS, RL_ROWS, SFT_ROWS, STYLE, Panel, Stage
from .series import Series, read_series

_WIDTH_IN, _ROW_HEIGHT_IN, _HEADING_IN = 15.0, 3.6, 0.45


def draw_curves(
    metrics_files: Sequence[tuple[str, Path]], out_png: Path, *, title: str = "", max_policy_lag: int | None = None
) -> bool:
    """Draw the picture of `metrics_files` ((stage title, metrics.jsonl), in order) into `out_png`.

    `max_policy_lag` is the bound to draw next to the observed lag; metrics.jsonl does not hold it. Returns False, with
    nothing written, where no metric was logged that the picture shows.
    """
    data = [(stage_title, read_series(read_metrics(path))) for stage_title, path in metrics_files]
    if not any(_rows(metrics) for _, metrics in data):
        return False
    figure = build_figure(data, title=title, max_policy_lag=max_policy_lag)
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    temporary = out_png.with_name(f".{out_png.name}.tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(out_png)
    return True


def build_figure(
    stages: Sequence[tuple[str, Mapping[str, Series]]], *, title: str = "", max_policy_lag: int | None = None
) -> Figure:
    """The same picture as a matplotlib Figure; `stages` are (title, metric name -> series)."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        drawn = [
            (Stage(title=name, metrics=metrics, max_policy_lag=max_policy_lag), _rows(metrics))
            for name, metrics in stages
        ]
        drawn = [(stage, rows) for stage, rows in drawn if rows]
        if not drawn:
            figure = Figure(figsize=(8, 2))
            figure.text(0.5, 0.5, "no metrics to draw", ha="center", va="center", fontsize=13)
            return figure
        heights = [_HEADING_IN + _ROW_HEIGHT_IN * len(rows) for _, rows in drawn]
        figure = Figure(figsize=(_WIDTH_IN, sum(heights) + (_HEADING_IN if title else 0)), layout="constrained")
        if title:
            figure.suptitle(title, fontsize=16, fontweight="bold")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        parts = figure.subfigures(len(drawn), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (stage, rows) in zip(parts, drawn, strict=True):
            _draw_stage(part, stage, rows)
        figure.draw_without_rendering()  # lays out while the style is in force
        return figure


def _rows(metrics: Mapping[str, Series]) -> list[list[Panel]]:
    rows = SFT_ROWS if "train/loss/sft" in metrics else DPO_ROWS if "train/loss/dpo" in metrics else RL_ROWS
    present = [[panel for panel in row if panel.has_data(metrics)] for row in rows]
    return [row for row in present if row]


def _draw_stage(part: SubFigure, stage: Stage, rows: list[list[Panel]]) -> None:
    if stage.title:
        part.suptitle(stage.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    grid = part.add_gridspec(len(rows), 1)
    for index, row in enumerate(rows):
        cells = grid[index].subgridspec(1, len(row), width_ratios=[panel.width for panel in row])
        for column, panel in enumerate(row):
            panel.draw(part.add_subplot(cells[column]), stage)
