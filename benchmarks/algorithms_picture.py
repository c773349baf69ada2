"""The curves of benchmarks/algorithms.py, one panel per preset.

    python benchmarks/algorithms_picture.py runs/algorithms/*/algorithms.csv docs/algorithms.png

Several files are one study; all must have the same evaluations.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure

COLUMNS = 6
REFERENCE = "grpo"

Curve = list[tuple[int, float]]


def read_curves(files: Sequence[Path]) -> dict[str, list[Curve]]:
    """By preset, one curve of (policy version, accuracy) per seed."""
    found: dict[str, dict[tuple[Path, str], Curve]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                point = (int(row["policy_version"]), float(row["accuracy"]))
                found[row["preset"]][file, row["seed"]].append(point)
    return {preset: list(curves.values()) for preset, curves in found.items()}


def mean_of(curves: Sequence[Curve]) -> Curve:
    return [(points[0][0], sum(y for _, y in points) / len(points)) for points in zip(*curves, strict=True)]


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    rows = -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(14, 0.7 + 2.1 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    reference = mean_of(curves[REFERENCE]) if REFERENCE in curves else []
    for ax, (preset, of_preset) in zip(panels, curves.items(), strict=False):
        if reference and preset != REFERENCE:
            ax.plot(*zip(*reference, strict=True), color="#999999", ls="--", lw=1.2)
        for curve in of_preset:
            ax.plot(*zip(*curve, strict=True), color="#1b6ca8", lw=0.8, alpha=0.5)
        mean = mean_of(of_preset)
        ax.plot(*zip(*mean, strict=True), color="#1b6ca8", lw=2.2, marker="o", ms=4)
        ax.set_title(f"{preset}: {mean[0][1]:.2f} to {mean[-1][1]:.2f}", fontsize=10)
        ax.grid(alpha=0.25)
    for ax in panels[len(curves) :]:
        ax.set_axis_off()
    seeds = max(map(len, curves.values()))
    figure.suptitle(f"By preset: {seeds} seeds (thin) and their mean; dashed: the mean of {REFERENCE}", fontsize=12)
    figure.supylabel("held-out greedy accuracy", fontsize=10)
    figure.supxlabel("optimizer steps", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    *csv_files, picture = map(Path, sys.argv[1:])
    draw(read_curves(csv_files), picture)
