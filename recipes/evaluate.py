"""Evaluate a model, or every checkpoint of a run: engines only, serving the saved weights.

tasksets (held out, eval.tasksets) -> Collector[N] -> summary.json, rollouts/
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leeway import driver
from leeway.config import Recipe
from leeway.config.rules import EVALUATION_RULES
from leeway.monitor import build_monitor
from leeway.types import Trajectory


async def run(context: driver.StageContext) -> driver.StageResult:
    """The model at `model.path`, with `eval.checkpoints` the weights of each checkpoint below that folder, or with
    `eval.address` the model that answers there.
    """
    config = context.config
    evalsets = driver.build_evalsets(config)
    folder = config.eval.checkpoints
    saved = [] if folder is None else driver.saved_models("eval.checkpoints", folder)
    monitor = build_monitor(context.dir, config.monitor, config.written(), 1, f"{config.name} / {context.name}")
    status = "failed"
    started = time.monotonic()
    measured: dict[int, dict[str, Any]] = {}
    processes: dict[str, Any] = {}
    try:
        for e in evalsets:
            driver.say(f"{context.name}: {len(e.tasks)} tasks of {e.name}, temperature {e.sampling.temperature:g}")
        for weights in saved or [None]:
            version = await driver.version_at(config.eval) if weights is None else weights.version
            with _model(context, weights) as model:
                if weights is not None:
                    await asyncio.to_thread(driver.check_weights, "eval.checkpoints", str(model))
                    driver.say(f"{context.name}: weights of step {version}, {weights.step}")
                launcher = driver.Launcher(
                    config.with_model_path(model),
                    context.recipe,
                    run_dir=context.dir,
                    supervisor=driver.Supervisor(context.watch),
                )
                metrics, trajectories, processes = await _measure(context, launcher, evalsets, version)
            monitor.log(version, metrics, role="evaluation")
            monitor.rollouts(version, [asdict(t) for t in trajectories])
            measured[version] = {e.name: driver.of_set(metrics, e.name) for e in evalsets}
        status = "done"
    finally:
        monitor.close(status)
    last = measured[max(measured)]
    summary: dict[str, Any] = {
        "eval": last,
        "wall_s": round(time.monotonic() - started, 1),
        "processes": processes,
    }
    lines = [f"eval/{name}/{k} = {v:.4g}" for name, own in last.items() for k, v in own.items()]
    if saved:
        lines = [line for e in evalsets for line in driver.table_of_versions(e.name, measured)]
        summary["checkpoints"] = {str(version): sets for version, sets in measured.items()}
    return driver.StageResult(summary=summary, model_path=None, goodbye=lines)


RECIPE = Recipe(run=run, generates=True, reads="heldout", rules=EVALUATION_RULES)


@contextmanager
def _model(context: driver.StageContext, weights: driver.SavedWeights | None) -> Iterator[Path]:
    """A Hugging Face folder; one that is written for this is removed afterwards."""
    if weights is None:
        assert context.config.model.path is not None
        yield Path(context.config.model.path)
        return
    scratch = Path(tempfile.mkdtemp(prefix="weights-", dir=context.dir))
    try:
        yield weights.as_model(scratch)
    finally:
        shutil.rmtree(scratch)


async def _measure(
    context: driver.StageContext, launcher: driver.Launcher, evalsets: list[driver.EvalSet], version: int
) -> tuple[dict[str, float], list[Trajectory], dict[str, Any]]:
    parts, config = launcher.parts, context.config
    try:
        starting = launcher.generators(initial_version=version)
        await driver.timed(context.name, "generators ready", starting, see=f"{context.dir / 'logs'}/")
        return *await driver.evaluate(config, parts, evalsets, policy_version=version), parts.processes
    finally:
        await parts.stop()
