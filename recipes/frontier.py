"""How much lag can this config bear? async_rl over lag bounds x corrections x seeds, from the same weights each time.

    for each (seed, bound, correction):  parts are reset -> version 0 through the parameter server -> train, evaluate

Engines and trainer ranks stay up between runs: each run hands out the initial weights again as its version 0, and no
engine serves before it has proven them. Real lag is forced to the bound (see `config.study`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from leeway import driver
from leeway.config import Cell, Config, Recipe, frontier_cells
from leeway.config.rules import STUDY_RULES
from leeway.monitor import read_metrics
from leeway.recipes.async_rl import RECIPE as ASYNC_RL
from leeway.recipes.async_rl import train


async def run(context: driver.StageContext) -> driver.StageResult:
    """Writes frontier.csv after each run and frontier.png at the end, and says which bounds are as good as lockstep.

    What is compared: `frontier.*`. How long a run is: `train.*`. With `train.updates_per_batch=1` the proximal policy
    is the current one and the decoupled clip never acts: compare corrections with at least 2.
    """
    assert context.config.model.path is not None
    cells = frontier_cells(context.config)
    started = time.monotonic()
    runs: list[driver.FrontierRun] = []

    def finished(cell: Cell, result: driver.StageResult, evals: Sequence[driver.EvalPoint], folder: Path) -> None:
        rows = [r for r in read_metrics(folder / "metrics.jsonl") if "train/policy_lag/mean" in r]
        runs.append(
            driver.FrontierRun(
                max_policy_lag=cell.max_policy_lag,
                lockstep=cell.lockstep,
                correction=cell.correction,
                seed=cell.seed,
                lag_mean=sum(r["train/policy_lag/mean"] for r in rows) / len(rows),
                lag_max=result.summary["max_policy_lag_observed"],
                dropped_stale=result.summary["dropped_stale"],
                curve=[(p.policy_version, p.train_s, p.accuracy) for p in evals],
                measure=evals[-1].measure,
            )
        )
        driver.write_csv(runs, context.dir / "frontier.csv")
        own, seconds = runs[-1], time.monotonic() - started
        driver.say(
            f"{len(runs)}/{len(cells)} {cell.name}: {own.measure} {own.accuracy:.3f}, lag {own.lag_mean:.2f} "
            f"(max {own.lag_max}), {own.train_s:.0f} s, {seconds:.0f} s in all"
        )

    # The first cell has the smallest bound: an engine that can be seeded for lockstep serves the others as well.
    processes = await run_cells(context, cells, finished)
    margin = context.config.frontier.margin
    summaries = driver.summarise(runs, margin=margin)
    driver.draw_frontier(runs, summaries, context.dir / "frontier.png", margin=margin)
    lines = driver.conclusions(summaries, margin=margin)
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


RECIPE = Recipe(run=run, generates=True, trains_on="rollouts", rules=STUDY_RULES, study_of=ASYNC_RL)


class NamedRun(Protocol):
    """One run of a study. All of them need the same parts."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Config: ...


Run = TypeVar("Run", bound=NamedRun)


async def run_cells(
    context: driver.StageContext,
    cells: Sequence[Run],
    finished: Callable[[Run, driver.StageResult, Sequence[driver.EvalPoint], Path], None],
) -> dict[str, Any]:
    """Run all `cells`, each in its own folder under `runs/`; call `finished` after each. Returns the parts' processes.

    Engines and trainer ranks stay up between them. The engine is started with the first cell's settings; speeds are
    measured once.
    """
    launcher = driver.Launcher(
        cells[0].config, context.recipe, run_dir=context.dir, supervisor=driver.Supervisor(context.watch)
    )
    speeds: driver.Speeds | None = None
    try:
        for cell in cells:
            folder = context.dir / "runs" / cell.name
            folder.mkdir(parents=True, exist_ok=True)
            stage = driver.RLStage(
                replace(context, name=cell.name, config=cell.config, dir=folder), launcher, speeds=speeds
            )
            result = await stage.run(train)
            speeds = stage.speeds
            finished(cell, result, stage.eval_points, folder)
    finally:
        await launcher.parts.stop()
    return launcher.parts.processes
