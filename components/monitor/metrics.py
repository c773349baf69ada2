"""What each metric means: its unit, how to read it, and how the reports of several processes become one number.

The table is `metrics.yaml`, from which docs/metrics.md is made.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

Reduction = Literal["sum", "mean", "max"]
_REDUCE = {"sum": sum, "mean": statistics.fmean, "max": max}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """`reduce`: how the values of several processes are combined; None if a single process measures it.

    `look`: when to look closer, and what to do. `by`: who measures it, if its section does not say.
    """

    names: tuple[str, ...]
    unit: str
    meaning: str
    look: str = ""
    by: str = ""
    reduce: Reduction | None = None


@dataclass(frozen=True)
class Section:
    """`title` is empty for a further table of the section before."""

    title: str
    text: str
    metrics: tuple[Metric, ...]


@cache
def sections() -> tuple[Section, ...]:
    table = yaml.safe_load(files("leeway.monitor").joinpath("metrics.yaml").read_text(encoding="utf-8"))
    return tuple(
        Section(own.get("section", ""), own.get("text", ""), tuple(_metric(row) for row in own["metrics"]))
        for own in table
    )


def _metric(row: dict[str, Any]) -> Metric:
    own = {key: value for key, value in row.items() if key not in ("name", "is")}
    return Metric(names=tuple(row["name"].split(", ")), meaning=row["is"], **own)


@cache
def reductions() -> dict[str, Reduction]:
    return {
        name: metric.reduce
        for section in sections()
        for metric in section.metrics
        if metric.reduce is not None
        for name in metric.names
    }


def reduced(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One set of numbers for several processes. A metric counts where it was reported.

    Raises KeyError for a metric that metrics.yaml does not say how to combine.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.items():
            values[name].append(value)
    if unknown := sorted(values.keys() - reductions().keys()):
        raise KeyError(f"{', '.join(unknown)}: no `reduce` in components/monitor/metrics.yaml")
    return {name: float(_REDUCE[reductions()[name]](own)) for name, own in values.items()}
