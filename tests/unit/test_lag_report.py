"""What a lag study concludes: intervals, verdicts against lockstep, the table and the picture."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.studies.lag_report import FrontierRun, Interval, conclusions, summarise, write_csv

MARGIN = 0.02


def run_of(
    accuracy: float, *, lag: int = 0, correction: str = "none", seed: int = 0, train_s: float = 100.0, lockstep: int = 0
) -> FrontierRun:
    """Starts at 0.25, and is half way at half of its time. `lockstep`: the bound that is lockstep."""
    curve = [(0, 0.0, 0.25), (30, train_s / 2, (0.25 + accuracy) / 2), (60, train_s, accuracy)]
    return FrontierRun(
        max_policy_lag=lag,
        lockstep=lag == lockstep,
        correction=correction,
        seed=seed,
        lag_mean=lag / 2,
        lag_max=lag,
        dropped_stale=0,
        curve=curve,
    )


# Intervals


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.706), (3, 4.303), (5, 2.776), (10, 2.262), (31, 2.042)])
def test_an_interval_is_students(n: int, quantile: float) -> None:
    values = [(i * 7 % n) / n for i in range(n)]
    half = quantile * statistics.stdev(values) / math.sqrt(n)
    got = Interval.of(values)
    assert got.mean == pytest.approx(statistics.mean(values))
    assert (got.low, got.high) == pytest.approx((got.mean - half, got.mean + half))


def test_known_intervals() -> None:
    # By hand: the mean of 1, 2, 3, 4, 5 is 3, the deviation sqrt(2.5), and 2.776 * sqrt(2.5 / 5) = 1.963.
    got = Interval.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (got.low, got.mean, got.high) == pytest.approx((3 - 1.963, 3.0, 3 + 1.963), abs=1e-3)
    assert Interval.of([0.5, 0.5]) == Interval(0.5, 0.5, 0.5)
    one = Interval.of([0.5])
    assert one.mean == 0.5
    assert math.isnan(one.low)
    assert math.isnan(one.high)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for n in (2, 4, 32):
        intervals = [Interval.of(rng.normal(size=n).tolist()) for _ in range(2000)]
        assert 0.935 < sum(i.low <= 0 <= i.high for i in intervals) / 2000 < 0.965


# Equal time


def test_accuracy_lies_on_the_line_between_two_evaluations() -> None:
    run = run_of(0.75, train_s=100.0)
    assert [run.accuracy_at(s) for s in (0, 25, 50, 80, 100, 1000)] == pytest.approx(
        [0.25, 0.375, 0.5, 0.65, 0.75, 0.75]
    )
    assert (run.accuracy, run.train_s) == (0.75, 100.0)
    at_one_time = FrontierRun(**{**vars(run), "curve": [(0, 0.0, 0.25), (4, 2.0, 0.5), (4, 2.0, 0.75)]})
    assert at_one_time.accuracy_at(1.0) == pytest.approx(0.375)
    assert at_one_time.accuracy_at(3.0) == 0.75
    alone = FrontierRun(**{**vars(run), "curve": [(0, 0.0, 0.25)]})
    assert alone.accuracy_at(5.0) == 0.25


def test_equal_time_is_what_the_fastest_cell_needed() -> None:
    runs = [run_of(0.75, lag=0, train_s=200.0), run_of(0.65, lag=4, train_s=100.0)]
    slow, fast = summarise(runs, margin=MARGIN)
    assert slow.accuracy_at_equal_time.mean == pytest.approx(0.5)  # half way of the slow one
    assert fast.accuracy_at_equal_time.mean == pytest.approx(0.65)
    assert (slow.train_s.mean, fast.train_s.mean) == (200.0, 100.0)


# Verdicts


def study(*losses: list[float], correction: str = "none") -> list[FrontierRun]:
    """Lockstep at 0.7, 0.71, ... by seed; then bounds 2, 4, ... whose accuracies differ from it by these, by seed."""
    seeds = range(max(map(len, losses)))
    runs = [run_of(0.7 + 0.01 * seed, seed=seed) for seed in seeds]
    for i, by_seed in enumerate(losses, start=1):
        runs += [
            run_of(0.7 + 0.01 * seed + loss, lag=2 * i, seed=seed, correction=correction)
            for seed, loss in enumerate(by_seed)
        ]
    return runs


def test_differences_are_paired_by_seed() -> None:
    lockstep, other = summarise(study([-0.01, -0.01, -0.01]), margin=MARGIN)
    assert lockstep.verdict == "reference"
    assert lockstep.difference is not None
    assert lockstep.difference.mean == 0.0
    assert other.difference is not None
    # Seeds differ from each other by more than this, but each loses exactly as much as the others.
    assert (other.difference.low, other.difference.high) == pytest.approx((-0.01, -0.01))
    assert other.verdict == "not inferior"
    assert (other.num_seeds, other.lag_mean, other.lag_max) == (3, 1.0, 2)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([-0.01, -0.011, -0.009], "not inferior"),
        ([0.05, 0.051, 0.049], "not inferior"),
        ([-0.05, -0.051, -0.049], "inferior"),
        ([-0.025, -0.026, -0.024], "inferior"),
        ([-0.01, 0.02, -0.04], "too few seeds to say"),
        ([-0.06, 0.0, -0.05], "too few seeds to say"),
        ([-0.01], "too few seeds to say (1; at least 2 are needed for an interval)"),
        ([-0.5], "too few seeds to say (1; at least 2 are needed for an interval)"),
    ],
)
def test_verdicts(losses: list[float], verdict: str) -> None:
    assert summarise(study(losses), margin=MARGIN)[1].verdict.startswith(verdict)


def test_no_number_of_seeds_tells_a_difference_from_the_very_same_margin() -> None:
    runs = [run_of(accuracy, lag=lag, seed=seed) for seed in (0, 1) for lag, accuracy in ((0, 0.75), (2, 0.25))]
    assert summarise(runs, margin=0.5)[1].verdict == "too few seeds to say (2; more than 1000 would do)"


@pytest.mark.parametrize("losses", [[-0.04, 0.02], [-0.015, -0.01, -0.005]])
def test_the_number_of_seeds_it_asks_for_is_the_smallest_that_would_do(losses: list[float]) -> None:
    verdict = summarise(study(losses), margin=MARGIN)[1].verdict
    asked = int(verdict.split("about ")[1].split()[0])
    # At the same mean and deviation.
    deviation = statistics.stdev(losses)

    def half_width(n: int) -> float:
        like = Interval.of([(-1) ** i * 1.0 for i in range(n)])
        return (like.high - like.mean) / statistics.stdev([(-1) ** i * 1.0 for i in range(n)]) * deviation

    assert half_width(asked) < statistics.mean(losses) + MARGIN <= half_width(asked - 1)


def test_without_lockstep_nothing_is_said_of_being_as_good() -> None:
    runs = [r for r in study([0.0, 0.0], [0.0, 0.0]) if not r.lockstep]
    summaries = summarise(runs, margin=MARGIN)
    assert [s.difference for s in summaries] == [None, None]
    assert {s.verdict for s in summaries} == {"no lockstep run to compare with"}
    assert conclusions(summaries, margin=MARGIN) == ["correction none: not compared, because lockstep was not run"]


def test_only_seeds_that_lockstep_has_are_compared() -> None:
    runs = study([-0.01, -0.01, -0.01])
    summaries = summarise([r for r in runs if not (r.lockstep and r.seed > 0)], margin=MARGIN)
    assert summaries[1].verdict == "too few seeds to say (1; at least 2 are needed for an interval)"
    assert summaries[1].num_seeds == 3


def test_the_reference_is_uncorrected_lockstep_or_else_that_of_the_same_correction() -> None:
    both = [
        run_of(accuracy, lag=lag, correction=correction, seed=seed)
        for seed in (0, 1)
        for lag, correction, accuracy in ((0, "none", 0.7), (0, "tis", 0.6), (2, "none", 0.7), (2, "tis", 0.65))
    ]

    def differences(runs: list[FrontierRun]) -> dict[tuple[int, str], float | None]:
        found = summarise(runs, margin=MARGIN)
        return {(s.max_policy_lag, s.correction): s.difference and round(s.difference.mean, 6) for s in found}

    assert differences(both) == {(0, "none"): 0.0, (0, "tis"): -0.1, (2, "none"): 0.0, (2, "tis"): -0.05}
    without = [r for r in both if (r.max_policy_lag, r.correction) != (0, "none")]
    assert differences(without) == {(0, "tis"): 0.0, (2, "none"): None, (2, "tis"): 0.05}


def test_the_conclusion_is_the_largest_bound_that_is_as_good_and_what_is_still_open() -> None:
    runs = study([0.0, 0.001], [-0.001, 0.0], [-0.2, -0.201], [-0.04, 0.02])
    (line,) = conclusions(summarise(runs, margin=MARGIN), margin=MARGIN)
    assert line.startswith(
        "correction none: largest bound not inferior to lockstep: 4 (difference -0.001, 95 % interval "
    )
    assert line.count("lag 8: too few seeds to say (2; about ") == 1
    assert "lag 6" not in line, "inferior, and not open"


def test_each_correction_has_its_own_conclusion() -> None:
    runs = study([-0.2, -0.201]) + [r for r in study([0.0, 0.0], correction="tis") if not r.lockstep]
    none, tis = conclusions(summarise(runs, margin=MARGIN), margin=MARGIN)
    assert none == "correction none: no bound was shown to be not inferior to lockstep"
    assert tis.startswith("correction tis: largest bound not inferior to lockstep: 2 (difference +0.000, ")
    assert tis.endswith("margin 0.02)")


# Table and picture


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    accuracies=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    correction=st.sampled_from(["none", "tis", 'a "b", c']),
    lag=st.integers(0, 99),
)
def test_the_table_reads_back(tmp_path_factory, accuracies: list[float], correction: str, lag: int) -> None:
    path: Path = tmp_path_factory.mktemp("study") / "frontier.csv"
    curve = [(10 * i, 1.25 * i, a) for i, a in enumerate(accuracies)]
    runs = [FrontierRun(**{**vars(run_of(0.5, lag=lag, correction=correction, seed=3)), "curve": curve}), run_of(0.5)]
    write_csv(runs[:1], path)
    write_csv(runs, path)  # anew, after each run
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(curve) + 3
    for row, (version, seconds, accuracy) in zip(rows, curve, strict=False):
        assert (row["max_policy_lag"], row["correction"], row["seed"]) == (str(lag), correction, "3")
        assert (row["lockstep"], row["lag_max"], row["policy_version"]) == (str(int(lag == 0)), str(lag), str(version))
        assert float(row["lag_mean"]) == pytest.approx(lag / 2)
        assert float(row["train_s"]) == pytest.approx(seconds, abs=0.005)
        assert float(row["accuracy"]) == pytest.approx(accuracy, abs=5e-5)


def runs_to_draw(num_seeds: int) -> list[FrontierRun]:
    return [
        run_of(
            0.70 + 0.02 * math.sin(7 * seed + lag) - (0.01 if correction == "none" else 0.003) * lag,
            lag=lag,
            lockstep=1,
            correction=correction,
            seed=seed,
            train_s=200 / (1 + 0.3 * lag) + 3 * seed,
        )
        for seed in range(num_seeds)
        for lag in (1, 2, 8)
        for correction in ("none", "tis")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_a_picture_is_drawn_also_of_one_seed(tmp_path: Path, num_seeds: int) -> None:
    from matplotlib.image import imread

    from leeway.studies.lag_picture import draw_frontier

    runs = runs_to_draw(num_seeds)
    draw_frontier(runs, summarise(runs, margin=MARGIN), tmp_path / "frontier.png", margin=MARGIN)
    pixels = imread(tmp_path / "frontier.png")
    height, width = pixels.shape[:2]
    assert 400 <= height <= 1200
    assert 1000 <= width <= 2400
    plots = pixels[height // 10 : height * 3 // 4, :, :3]  # without the legend, which has the colors too
    for panel in np.array_split(plots, 3, axis=1):
        colored = (panel.max(-1) - panel.min(-1) > 0.3).mean()
        assert colored > 5e-4, "each of the three panels shows both corrections' colors"


@pytest.mark.slow
def test_the_line_in_the_picture_is_what_the_verdicts_compare_with() -> None:
    from leeway.studies import lag_picture

    runs = [run_of(a, correction=c, seed=seed) for seed in (0, 1) for c, a in (("decoupled", 0.9), ("none", 0.7))]
    summaries = summarise([*runs, run_of(0.6, lag=4)], margin=MARGIN)
    reference = lag_picture._reference(summaries)
    assert reference is not None
    assert (reference.correction, reference.accuracy.mean) == ("none", 0.7)
    lockstep = [s for s in summaries if s.lockstep]
    assert lag_picture._reference(lockstep[:1]) is lockstep[0]
    tis = summarise([run_of(0.6, correction="tis")], margin=MARGIN)
    assert lag_picture._reference([lockstep[0], *tis]) is None
    assert lag_picture._reference([s for s in summaries if not s.lockstep]) is None
