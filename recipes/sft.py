"""Supervised finetuning on a taskset's reference answers: the warm-up before RL, or a separate job.

    taskset -> prompt + answer tokens -> [batches, one ahead] -> Trainer[N ranks] -> checkpoints/

The response ends with the end-of-turn token, which is also trained on. Held-out questions are excluded here too, and
the loss on their answers is measured before and after training, and every `eval.every` steps. With
`task.messages_key` an example is a whole conversation, and every assistant turn in it is trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from leeway import driver
from leeway.config import Config, Recipe
from leeway.config.rules import SUPERVISED_RULES
from leeway.monitor import build_monitor, read_metrics
from leeway.types import Trajectory


class MakeBatches(Protocol):
    """Endless batches; `start`: the state from which a run goes on."""

    def __call__(
        self,
        config: Config,
        taskset: driver.TaskSet | driver.MixedTaskSet,
        prompter: driver.Prompter,
        *,
        start: dict[str, Any] | None = None,
    ) -> driver.Batches[list[driver.TrainBatch]]: ...


HeldOut = Callable[[Config, "driver.Prompter"], "dict[str, list[driver.TrainBatch]]"]
"""What is evaluated, by taskset, as one share per rank; {}: nothing."""


async def run(context: driver.StageContext) -> driver.StageResult:
    """Train for `train.steps` (or `train.epochs`) on batches of `train.batch_size` sequences."""
    data = data_of_tasks(context, batches=_batches, held_out=held_out_examples)
    return await train_offline(context, data, loss_name="train/loss/sft")


RECIPE = Recipe(run=run, generates=False, trains_on="answers", rules=SUPERVISED_RULES)


def data_of_tasks(
    context: driver.StageContext, *, batches: MakeBatches, held_out: HeldOut
) -> driver.OfflineData[list[driver.TrainBatch]]:
    """The tasks' own answers, or pairs of answers; `held_out` gives what is evaluated and not trained on."""
    config, pairs = context.config, context.recipe.trains_on == "pairs"
    assert config.model.path is not None
    prompter = driver.Prompter.of(config.model)
    taskset = driver.build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
    assert not isinstance(taskset, driver.QueueTaskSet), "a rule on settings keeps queues to async_rl"
    driver.check_examples(taskset.tasks, prompter, rejected_key=config.task.rejected_key if pairs else None)
    return driver.OfflineData(
        taskset=taskset,
        total_steps=num_steps(config, len(taskset) * (2 if pairs else 1)),
        size=f"steps of {config.train.batch_size}, {len(taskset)} tasks",
        batches=lambda start: batches(config, taskset, prompter, start=start),
        split=driver.as_shares,
        held_out=lambda: held_out(config, prompter),
    )


async def train_offline(
    context: driver.StageContext, data: driver.OfflineData[Any], *, loss_name: str
) -> driver.StageResult:
    """Common to recipes that generate nothing: start the ranks, feed them, save. `loss_name`: the metric to report."""
    config, total_steps = context.config, data.total_steps
    resumed = driver.resume_point(context.dir / "checkpoints", config)
    launcher = driver.Launcher(config, context.recipe, run_dir=context.dir, supervisor=driver.Supervisor(context.watch))
    parts = launcher.parts
    first = driver.saved_version(resumed) if resumed is not None else 0
    monitor = build_monitor(
        context.dir,
        config.monitor,
        config.written(),
        total_steps,
        f"{config.name} / {context.name}",
        resumed_at=first if resumed is not None else None,
    )
    earlier = read_metrics(context.dir / "metrics.jsonl")
    trains_on = context.recipe.trains_on
    assert trains_on is not None
    record = driver.OfflineReport(
        config, monitor, name=context.name, loss_name=loss_name, trains_on=trains_on, earlier=earlier
    )
    status = "failed"
    started = time.monotonic()
    try:
        driver.say(f"{context.name}: {total_steps} {data.size}")
        starting = launcher.trainers(total_steps=total_steps, canary=driver.CanaryPrompts(scored=[], cached=[]))
        await driver.timed(
            context.name, "trainer ready", starting, see=f"{context.dir / 'logs'}/"
        )  # it publishes nothing
        start = driver.saved_position(resumed)["batches"] if resumed is not None else None
        if resumed is None:
            await data.prepare(launcher)
        feed = driver.Feed(data.batches(start), data.taskset, first_step=first, split=data.split)
        checkpoints = driver.Checkpoints(
            context.dir / "checkpoints",
            config=config,
            trainers=parts.trainers,
            supervisor=parts.supervisor,
            position=feed.position,
            resumed=resumed,
        )
        measure = driver.Measure(context, launcher, monitor, data.held_out(), measured=data.measured)
        try:
            if resumed is not None:
                await launcher.load_state(resumed / driver.STATE_DIR)
            evals = {"before": record.first_evaluation() or await measure(first)} if config.eval.at_start else {}
            last_step = await _train(
                config, launcher, record, checkpoints, feed, total_steps, first_step=first, measure=measure
            )
            if config.eval.at_end:
                evals["after"] = await measure(last_step)
            folder = await checkpoints.at_end()
        except asyncio.CancelledError:
            status = "interrupted"
            await asyncio.shield(checkpoints.at_end(interrupted=True))
            raise
        summary = {
            "steps": last_step,
            "wall_s": round(time.monotonic() - started, 1),
            "tokens": record.num_tokens,
            "loss_last": record.loss,
            "processes": parts.processes,
            **asdict(record.verdict()),
        }
        if any(evals.values()):
            summary["eval"] = evals
        monitor.summary(summary)
        status = "done"
    finally:
        monitor.close(status)
        await parts.stop()
    return driver.StageResult(
        summary=summary,
        model_path=str(folder) if folder else None,
        goodbye=[
            f"{context.name}: {last_step} steps, loss {record.loss:.3f}, weights in {folder}",
            *driver.changes(evals.get("before", {}), evals.get("after", {})),
        ],
    )


def held_out_examples(config: Config, prompter: driver.Prompter) -> dict[str, list[driver.TrainBatch]]:
    """The answers of the evaluation tasks: those held out, and those of `eval.tasksets`."""
    ranks = config.train.num_ranks
    return {
        e.name: _shares([driver.example_of(task, prompter) for task in e.tasks], ranks)
        for e in driver.build_evalsets(config)
    }


def num_steps(config: Config, num_sequences: int) -> int:
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    return max(1, round(config.train.epochs * num_sequences / config.train.batch_size))


async def _train(
    config: Config,
    launcher: driver.Launcher,
    record: driver.OfflineReport,
    checkpoints: driver.Checkpoints,
    feed: driver.Feed,
    total_steps: int,
    *,
    first_step: int = 0,
    measure: driver.Measure | None = None,
) -> int:
    """Consumes batches, waits for them and for the ranks; returns the last step. The next batch is made meanwhile."""
    parts, timeout_s = launcher.parts, config.cluster.step_timeout_s
    if first_step >= total_steps or (first_step and record.is_below(config.train.stop_below_loss)):
        return first_step
    step = first_step
    for step in range(first_step + 1, total_steps + 1):
        begun = time.monotonic()
        refs, num_tokens, about = await asyncio.to_thread(feed.next, step)
        calls = [t.train_step.remote(ref, False) for t, ref in zip(parts.trainers, refs, strict=True)]
        pending = driver.together(calls)
        metrics = (await parts.supervisor.wait(pending, what="trainer", timeout_s=timeout_s))[0].metrics
        metrics |= about | await checkpoints.after_step(step)
        record.step(step, metrics, num_tokens=num_tokens, step_s=time.monotonic() - begun)
        if measure is not None and config.eval.every and step % config.eval.every == 0 and step < total_steps:
            await measure(step)
        if record.is_below(config.train.stop_below_loss):
            break
    return step


def _batches(
    config: Config,
    taskset: driver.TaskSet | driver.MixedTaskSet,
    prompter: driver.Prompter,
    *,
    start: dict[str, Any] | None = None,
) -> driver.Batches[list[driver.TrainBatch]]:
    """`train.batch_size` examples in each batch, dealt to the ranks."""
    return driver.Batches(
        taskset,
        make=lambda task: driver.example_of(task, prompter),
        size=config.train.batch_size,
        collate=lambda examples: _shares(examples, config.train.num_ranks),
        start=start,
    )


def _shares(examples: Sequence[Trajectory], num_ranks: int) -> list[driver.TrainBatch]:
    num_tokens = sum(sum(t.loss_mask) for t in examples)
    shares = [examples[rank::num_ranks] for rank in range(num_ranks)]
    return [
        driver.batch_trajectories(share, [0.0] * len(share), num_sequences=len(examples), num_tokens=num_tokens)
        for share in shares
    ]
