"""Evaluate the model at `model.path` on the held-out tasks: engines only, serving the model's own weights.

taskset (eval split) -> Collector[N] -> summary.json, rollouts/
"""

from __future__ import annotations

import time
from dataclasses import asdict

from leeway.monitor import build_monitor
from leeway.recipes.context import StageContext, StageResult, say
from leeway.recipes.evaluation import evaluate
from leeway.runtime.launch import Launcher
from leeway.runtime.supervisor import Supervisor
from leeway.tasks.taskset import build_taskset


async def run(context: StageContext) -> StageResult:
    config = context.config
    taskset = build_taskset(config.task, seed=config.seed, split="eval", eval_config=config.eval)
    launcher = Launcher(config, "evaluate", run_dir=context.dir, supervisor=Supervisor())
    parts = launcher.parts
    monitor = build_monitor(
        context.dir, config.monitor, config.model_dump(mode="json"), 1, f"{config.name} / {context.name}"
    )
    status = "failed"
    started = time.monotonic()
    try:
        say(f"{context.name}: {len(taskset)} held-out tasks, temperature {config.eval.temperature:g}")
        await launcher.collectors(load_weights=True)
        context.processes.extend(parts.local_processes())
        metrics, trajectories = await evaluate(config, parts, taskset.tasks, name=taskset.name, policy_version=0)
        monitor.log(0, metrics, role="evaluation")
        monitor.rollouts(0, [asdict(t) for t in trajectories])
        status = "done"
    finally:
        monitor.close(status)
        await parts.stop()
    summary = {
        "eval": {taskset.name: {k.removeprefix(f"eval/{taskset.name}/"): v for k, v in metrics.items()}},
        "wall_s": round(time.monotonic() - started, 1),
        "processes": parts.processes,
    }
    lines = [f"{k} = {v:.4g}" for k, v in metrics.items()]
    return StageResult(summary=summary, model_path=None, goodbye=lines)
