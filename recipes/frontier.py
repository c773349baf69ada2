"""How much lag can this config bear? async_rl over lag bounds x corrections x seeds, from the same weights each time.

    for each (seed, bound, correction):  parts begin again -> version 0 through the parameter server -> train, evaluate

Engines and trainer ranks stay up between runs: each run hands out the initial weights again as its version 0, and no
engine serves before it has proven them. Real lag is forced to the bound (see `config.study`).
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from leeway.config import frontier_cells
from leeway.monitor import read_metrics
from leeway.recipes.async_rl import AsyncRL
from leeway.recipes.context import StageContext, StageResult, say
from leeway.recipes.frontier_picture import draw_frontier
from leeway.recipes.frontier_report import FrontierRun, conclusions, summarise, write_csv
from leeway.runtime.launch import Launcher
from leeway.runtime.limit import Speeds
from leeway.runtime.supervisor import Supervisor


async def run(context: StageContext) -> StageResult:
    """Writes frontier.csv after each run and frontier.png at the end, and says which bounds are as good as lockstep.

    What is compared: `frontier.*`. How long a run is: `train.*`. With `train.updates_per_batch=1` the proximal policy
    is the current one and the decoupled clip never acts: compare corrections with at least 2.
    """
    assert context.config.model.path is not None
    cells = frontier_cells(context.config)
    started = time.monotonic()
    # The first cell has the smallest bound: an engine that can be seeded for lockstep serves the others as well.
    launcher = Launcher(cells[0].config, "async_rl", run_dir=context.dir, supervisor=Supervisor())
    speeds: Speeds | None = None
    runs: list[FrontierRun] = []
    try:
        for number, cell in enumerate(cells, start=1):
            folder = context.dir / "runs" / cell.name
            folder.mkdir(parents=True, exist_ok=True)
            of_cell = replace(context, name=cell.name, config=cell.config, dir=folder)
            job = AsyncRL(of_cell, launcher, speeds=speeds)
            result = await job.run()
            speeds = job.speeds
            rows = [r for r in read_metrics(folder / "metrics.jsonl") if "train/policy_lag/mean" in r]
            runs.append(
                FrontierRun(
                    max_policy_lag=cell.max_policy_lag,
                    lockstep=cell.lockstep,
                    correction=cell.correction,
                    seed=cell.seed,
                    lag_mean=sum(r["train/policy_lag/mean"] for r in rows) / len(rows),
                    lag_max=result.summary["max_policy_lag_observed"],
                    dropped_stale=result.summary["dropped_stale"],
                    curve=[(p.policy_version, p.train_s, p.accuracy) for p in job.eval_points],
                )
            )
            write_csv(runs, context.dir / "frontier.csv")
            say(
                f"{number}/{len(cells)} {cell.name}: accuracy {runs[-1].accuracy:.3f}, lag {runs[-1].lag_mean:.2f} "
                f"(max {runs[-1].lag_max}), {runs[-1].train_s:.0f} s, {time.monotonic() - started:.0f} s in all"
            )
    finally:
        await launcher.parts.stop()
    margin = context.config.frontier.margin
    summaries = summarise(runs, margin=margin)
    draw_frontier(runs, summaries, context.dir / "frontier.png", margin=margin)
    lines = conclusions(summaries, margin=margin)
    (context.dir / "frontier.txt").write_text("\n".join(lines) + "\n")
    return StageResult(
        summary={
            "runs": len(runs),
            "wall_s": round(time.monotonic() - started, 1),
            "cells": [asdict(s) for s in summaries],
            "conclusions": lines,
            "dropped_stale": sum(r.dropped_stale for r in runs),
            "processes": launcher.parts.processes,
        },
        model_path=None,
        goodbye=[*lines, f"{context.dir}/frontier.csv, frontier.png"],
    )
