"""Score how hard tasks are for a model: k answers to each, and a file of the same tasks with their pass rates.

    tasks (task.*) -> Collector[N] -> pass rates -> scored.jsonl -> task.path of a run, by order or by difficulty

The model is `model.path`; engines only. The file is read like any other: `task.order=easy_to_hard` with
`task.difficulty_key=difficulty` trains from what the model can do to what it cannot, and rows whose `pass_rate` is 0 or
1 can be left out.
"""

from __future__ import annotations

import asyncio
import time

from leeway import driver
from leeway.config import Recipe
from leeway.config.rules import SCORING_RULES
from leeway.monitor import build_monitor


async def run(context: driver.StageContext) -> driver.StageResult:
    """Every task that a run would train on, at most `task.limit`.

    - `eval.samples`: answers to each task; `eval.temperature`: how they are sampled
    - `eval.solved`: without an exact_match, the reward at which an answer counts as right
    """
    config = context.config
    tasks, rows = await asyncio.to_thread(driver.tasks_with_rows, config)
    scored = driver.EvalSet("scored", tuple(tasks), config.eval.sampling(None))
    launcher = driver.Launcher(config, context.recipe, run_dir=context.dir, supervisor=driver.Supervisor(context.watch))
    monitor = build_monitor(context.dir, config.monitor, config.written(), 1, f"{config.name} / {context.name}")
    status, started = "failed", time.monotonic()
    try:
        driver.say(f"{context.name}: {len(tasks)} tasks, {scored.sampling.samples} answers to each")
        starting = launcher.generators(initial_version=0)
        await driver.timed(context.name, "generators ready", starting, see=f"{context.dir / 'logs'}/")
        answers = await driver.answered(config, launcher.parts, scored, 0)
        scores = driver.scores_of(answers, solved=scored.sampling.solved)
        file = context.dir / "scored.jsonl"
        await asyncio.to_thread(driver.write_scored, file, config.task, rows, scores)
        status = "done"
    finally:
        monitor.close(status)
        await launcher.parts.stop()
    rates = [own.pass_rate for own in scores if own is not None]
    between = sum(0 < rate < 1 for rate in rates)
    summary = {
        "scored": str(file),
        "tasks": len(rates),
        "failed_tasks": len(scores) - len(rates),
        "pass_rate": sum(rates) / len(rates),
        "never_solved": sum(rate == 0 for rate in rates),
        "always_solved": sum(rate == 1 for rate in rates),
        "wall_s": round(time.monotonic() - started, 1),
        "processes": launcher.parts.processes,
    }
    line = (
        f"pass rate {summary['pass_rate']:.3f} over {len(rates)} tasks: never solved {summary['never_solved']}, "
        f"always {summary['always_solved']}, between {between}; {file}"
    )
    return driver.StageResult(summary=summary, model_path=None, goodbye=[line])


RECIPE = Recipe(run=run, generates=True, rules=SCORING_RULES)
