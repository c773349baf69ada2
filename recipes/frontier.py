"""How much lag can this config bear? async_rl over lag bounds x corrections x seeds, from the same weights each time.

    for each (seed, bound, correction):  parts are reset -> version 0 through the parameter server -> train, evaluate

Engines and trainer ranks stay up between runs: each run hands out the initial weights again as its version 0, and no
engine serves before it has proven them. Real lag is forced to the bound (see `studies.lag_trials`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from leeway import driver, studies
from leeway.config import Recipe
from leeway.monitor import read_metrics
from leeway.recipes.async_rl import RECIPE as ASYNC_RL
from leeway.recipes.async_rl import train


async def run(context: driver.StageContext) -> driver.StageResult:
    """Writes frontier.csv after each run and frontier.png at the end, and says which bounds are as good as lockstep.

    What is compared: `frontier.*`. How long a run is: `train.*`. With `train.updates_per_batch=1` the proximal policy
    is the current one and the decoupled clip never acts: compare corrections with at least 2.
    """
    assert context.config.model.path is not None
    trials = studies.lag_trials(context.config)
    started = time.monotonic()
    runs: list[studies.FrontierRun] = []

    def finished(
        trial: studies.Trial, result: driver.StageResult, evals: Sequence[driver.EvalPoint], folder: Path
    ) -> None:
        rows = [r for r in read_metrics(folder / "metrics.jsonl") if "train/policy_lag/mean" in r]
        runs.append(
            studies.FrontierRun(
                max_policy_lag=trial.max_policy_lag,
                lockstep=trial.lockstep,
                correction=trial.correction,
                seed=trial.seed,
                lag_mean=sum(r["train/policy_lag/mean"] for r in rows) / len(rows),
                lag_max=result.summary["max_policy_lag_observed"],
                dropped_stale=result.summary["dropped_stale"],
                curve=[(p.policy_version, p.train_s, p.accuracy) for p in evals],
                measure=evals[-1].measure,
            )
        )
        studies.write_csv(runs, context.dir / "frontier.csv")
        own, seconds = runs[-1], time.monotonic() - started
        driver.say(
            f"{len(runs)}/{len(trials)} {trial.name}: {own.measure} {own.accuracy:.3f}, lag {own.lag_mean:.2f} "
            f"(max {own.lag_max}), {own.train_s:.0f} s, {seconds:.0f} s in all"
        )

    # The first trial has the smallest bound: an engine that can be seeded for lockstep serves the others as well.
    processes = await studies.run_trials(context, trials, train, finished)
    margin = context.config.frontier.margin
    summaries = studies.summarise(runs, margin=margin)
    studies.draw_frontier(runs, summaries, context.dir / "frontier.png", margin=margin)
    lines = studies.conclusions(summaries, margin=margin)
    (context.dir / "frontier.txt").write_text("\n".join(lines) + "\n")
    return driver.StageResult(
        summary={
            "runs": len(runs),
            "wall_s": round(time.monotonic() - started, 1),
            "cells": [asdict(s) for s in summaries],
            "conclusions": lines,
            "dropped_stale": sum(r.dropped_stale for r in runs),
            "processes": processes,
        },
        model_path=None,
        goodbye=[*lines, f"{context.dir}/frontier.csv, frontier.png"],
    )


RECIPE = Recipe(run=run, generates=True, trains_on="rollouts", rules=studies.LAG_STUDY_RULES, study_of=ASYNC_RL)
