"""Supervised finetuning on a taskset's reference answers: the warm-up before RL, or a separate job.

    taskset -> prompt + answer tokens -> [batches, one ahead] -> Trainer[N ranks] -> checkpoints/

The response ends with the end-of-turn token, which is also trained on. Held-out questions are excluded here too, and
the loss on their answers is measured before and after training, and every `eval.every` steps. With
`task.messages_key` an example is a whole conversation, and every assistant turn in it is trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import ray

from leeway.config import Config
from leeway.monitor import Monitor, build_monitor, read_metrics
from leeway.recipes.checkpoints import STATE_DIR, Checkpoints, resume_point, saved_position, saved_version
from leeway.recipes.context import StageContext, StageResult, say, timed
from leeway.recipes.learned import LearningWatch, Verdict
from leeway.runtime.launch import Launcher
from leeway.runtime.supervisor import Supervisor, together
from leeway.tasks.batches import Batches
from leeway.tasks.evalsets import build_evalsets
from leeway.tasks.examples import check_examples, example_of
from leeway.tasks.mixed import MixedTaskSet
from leeway.tasks.prompting import Prompter
from leeway.tasks.queue_tasks import QueueTaskSet
from leeway.tasks.taskset import TaskSet, build_taskset
from leeway.types import TrainBatch, Trajectory, batch_trajectories
from leeway.weights import CanaryPrompts

LOSS_WINDOW = 20


class MakeBatches(Protocol):
    """Endless batches; `start`: the state from which a run goes on."""

    def __call__(
        self,
        config: Config,
        taskset: TaskSet | MixedTaskSet,
        prompter: Prompter,
        *,
        start: dict[str, Any] | None = None,
    ) -> Batches[list[TrainBatch]]: ...


HeldOut = Callable[[Config, Prompter], dict[str, list[TrainBatch]]]
"""What is evaluated, by taskset, as one share per rank; {}: nothing."""


async def run(context: StageContext) -> StageResult:
    """Train for `train.steps` (or `train.epochs`) on batches of `train.batch_size` sequences."""
    return await train_offline(
        context, recipe="sft", batches=_batches, loss_name="train/loss/sft", held_out=held_out_examples
    )


async def train_offline(
    context: StageContext,
    *,
    recipe: str,
    batches: MakeBatches,
    loss_name: str,
    held_out: HeldOut,
) -> StageResult:
    """Common to recipes that train on data: start the ranks, feed them, save; `loss_name` is the metric to report.

    `held_out` gives what is evaluated and not trained on.
    """
    config = context.config
    assert config.model.path is not None
    prompter = Prompter.load(config.model.path)
    taskset = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
    assert not isinstance(taskset, QueueTaskSet), "a rule on settings keeps queues to async_rl"
    check_examples(taskset.tasks, prompter, rejected_key=config.task.rejected_key if recipe == "dpo" else None)
    total_steps = num_steps(config, len(taskset) * (2 if recipe == "dpo" else 1))
    resumed = resume_point(context.dir / "checkpoints", config)
    launcher = Launcher(config, recipe, run_dir=context.dir, supervisor=Supervisor(context.watch))
    parts = launcher.parts
    first = saved_version(resumed) if resumed is not None else 0
    monitor = build_monitor(
        context.dir,
        config.monitor,
        config.model_dump(mode="json"),
        total_steps,
        f"{config.name} / {context.name}",
        resumed_at=first if resumed is not None else None,
    )
    earlier = read_metrics(context.dir / "metrics.jsonl")
    record = Record(config, recipe, monitor, name=context.name, loss_name=loss_name, earlier=earlier)
    status = "failed"
    started = time.monotonic()
    try:
        say(f"{context.name}: {total_steps} {recipe} steps of {config.train.batch_size}, {len(taskset)} tasks")
        starting = launcher.trainers(total_steps=total_steps, canary=CanaryPrompts(scored=[], cached=[]))
        await timed(context.name, "trainer ready", starting, see=f"{context.dir / 'logs'}/")  # it publishes nothing
        start = saved_position(resumed)["batches"] if resumed is not None else None
        feed = _Feed(batches(config, taskset, prompter, start=start), taskset, first_step=first)
        checkpoints = Checkpoints(
            context.dir / "checkpoints",
            config=config,
            trainers=parts.trainers,
            supervisor=parts.supervisor,
            position=feed.position,
            resumed=resumed,
        )
        measure = _Measure(context, launcher, monitor, held_out(config, prompter))
        try:
            if resumed is not None:
                await launcher.load_state(resumed / STATE_DIR)
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
        status = "done"
    finally:
        monitor.close(status)
        await parts.stop()
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
    return StageResult(
        summary=summary,
        model_path=str(folder) if folder else None,
        goodbye=[
            f"{context.name}: {last_step} steps, loss {record.loss:.3f}, weights in {folder}",
            *_changes(evals.get("before", {}), evals.get("after", {})),
        ],
    )


def held_out_examples(config: Config, prompter: Prompter) -> dict[str, list[TrainBatch]]:
    """The answers of the evaluation tasks: those held out, and those of `eval.tasksets`."""
    ranks = config.train.num_ranks
    return {e.name: _shares([example_of(task, prompter) for task in e.tasks], ranks) for e in build_evalsets(config)}


class _Measure:
    """Evaluates the current weights on the held-out data, logs the result, and returns it as `_by_taskset` does."""

    def __init__(
        self, context: StageContext, launcher: Launcher, monitor: Monitor, tasksets: dict[str, list[TrainBatch]]
    ) -> None:
        self._name, self._config = context.name, context.config
        self._parts, self._monitor = launcher.parts, monitor
        self._refs = {name: [ray.put(share) for share in shares] for name, shares in tasksets.items()}

    async def __call__(self, step: int) -> dict[str, Any]:
        metrics: dict[str, float] = {}
        for name, refs in self._refs.items():
            numbers = await self._of(refs)
            metrics |= {f"eval/{name}/{key}": value for key, value in numbers.items()}
            told = ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in numbers.items())
            say(f"{self._name}: {name.replace('_', ' ')} at step {step}: {told}")
        if metrics:
            self._monitor.log(step, metrics, role="evaluation")
        return _by_taskset(metrics)

    async def _of(self, refs: list[Any]) -> dict[str, float]:
        pending = together(t.evaluate.remote(ref) for t, ref in zip(self._parts.trainers, refs, strict=True))
        timeout_s = self._config.cluster.step_timeout_s
        metrics = (await self._parts.supervisor.wait(pending, what="trainer", timeout_s=timeout_s))[0]
        return {name.removeprefix("train/").replace("/", "_"): value for name, value in metrics.items()}


def _by_taskset(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The first taskset's numbers (the held-out tasks), with those of the others under "tasksets"; {}: none."""
    by_set: dict[str, dict[str, float]] = {}
    for metric, value in metrics.items():
        if metric.startswith("eval/"):
            _, taskset, name = metric.split("/", 2)
            by_set.setdefault(taskset, {})[name] = value
    first = by_set.pop(next(iter(by_set), ""), {})
    return {**first, "tasksets": by_set} if by_set else dict(first)


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line with the held-out results; none if nothing was measured."""
    numbers = [name for name, value in before.items() if name in after and not isinstance(value, dict)]
    changes = [f"{name.replace('_', ' ')} {before[name]:.3f} -> {after[name]:.3f}" for name in numbers]
    return [f"held out: {', '.join(changes)}"] if changes else []


def num_steps(config: Config, num_sequences: int) -> int:
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    return max(1, round(config.train.epochs * num_sequences / config.train.batch_size))


class Record:
    """The metrics of a stage over its whole life. `earlier`: the rows up to the step that it resumes from."""

    def __init__(
        self,
        config: Config,
        recipe: str,
        monitor: Monitor,
        *,
        name: str,
        loss_name: str,
        earlier: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._monitor, self._name, self._loss_name = monitor, name, loss_name
        self._evaluations = [row for row in earlier if row["role"] == "evaluation"]
        self._learning = LearningWatch(config, recipe, earlier=earlier)
        losses = (row[loss_name] for row in earlier if row.get(loss_name) is not None)
        self._recent: deque[float] = deque(losses, maxlen=LOSS_WINDOW)
        self.num_tokens = int(sum(row.get("train/response_tokens/total", 0) for row in earlier))

    @property
    def loss(self) -> float:
        """Mean of the last `LOSS_WINDOW` steps."""
        return sum(self._recent) / len(self._recent) if self._recent else float("nan")

    def is_below(self, loss: float | None) -> bool:
        return loss is not None and len(self._recent) == LOSS_WINDOW and self.loss < loss

    def step(self, step: int, metrics: dict[str, float], *, num_tokens: int, step_s: float) -> None:
        self._recent.append(metrics[self._loss_name])
        self.num_tokens += num_tokens
        metrics |= {"train/response_tokens/total": num_tokens, "train/tokens_per_s": num_tokens / step_s}
        self._monitor.log(step, metrics | {"step/total_s": step_s})
        for warning in self._learning.step(metrics):
            say(f"{self._name}: warning: {warning}")

    def first_evaluation(self) -> dict[str, Any]:
        """The first evaluation, as `_Measure` returns it; {} if nothing was measured before."""
        return _by_taskset(self._evaluations[0]) if self._evaluations else {}

    def verdict(self) -> Verdict:
        return self._learning.verdict()


async def _train(
    config: Config,
    launcher: Launcher,
    record: Record,
    checkpoints: Checkpoints,
    feed: _Feed,
    total_steps: int,
    *,
    first_step: int = 0,
    measure: _Measure | None = None,
) -> int:
    """Consumes batches, waits for them and for the ranks; returns the last step. The next batch is made meanwhile."""
    parts, timeout_s = launcher.parts, config.cluster.step_timeout_s
    if first_step >= total_steps or (first_step and record.is_below(config.train.stop_below_loss)):
        return first_step
    step = first_step
    for step in range(first_step + 1, total_steps + 1):
        begun = time.monotonic()
        refs, num_tokens = await asyncio.to_thread(feed.next, step)
        calls = [t.train_step.remote(ref, False) for t, ref in zip(parts.trainers, refs, strict=True)]
        pending = together(calls)
        metrics = (await parts.supervisor.wait(pending, what="trainer", timeout_s=timeout_s))[0]
        metrics |= await checkpoints.after_step(step)
        record.step(step, metrics, num_tokens=num_tokens, step_s=time.monotonic() - begun)
        if measure is not None and config.eval.every and step % config.eval.every == 0 and step < total_steps:
            await measure(step)
        if record.is_below(config.train.stop_below_loss):
            break
    return step


class _Feed:
    """The batches of a stage, and the position after each: that of the last step goes into a checkpoint."""

    def __init__(self, batches: Batches[list[TrainBatch]], taskset: TaskSet | MixedTaskSet, *, first_step: int) -> None:
        self._batches = batches
        self._fingerprint = taskset.fingerprint()
        self._after = {first_step: batches.state_dict()}

    def next(self, step: int) -> tuple[list[Any], int]:
        """The batch of this step: a reference to each rank's share, and the number of trained tokens in all."""
        shares = next(self._batches)
        self._after = {step - 1: self._after[step - 1], step: self._batches.state_dict()}
        return [ray.put(share) for share in shares], int(shares[0].num_tokens)

    async def position(self, policy_version: int) -> dict[str, Any]:
        """See `Checkpoints`. An interrupted run may have the next batch already, and not have trained on it."""
        return {"batches": self._after[policy_version], "stream": {"taskset": {"fingerprint": self._fingerprint}}}


def _batches(
    config: Config,
    taskset: TaskSet | MixedTaskSet,
    prompter: Prompter,
    *,
    start: dict[str, Any] | None = None,
) -> Batches[list[TrainBatch]]:
    """`train.batch_size` examples in each batch, dealt to the ranks."""
    return Batches(
        taskset,
        make=lambda task: example_of(task, prompter),
        size=config.train.batch_size,
        collate=lambda examples: _shares(examples, config.train.num_ranks),
        start=start,
    )


def _shares(examples: Sequence[Trajectory], num_ranks: int) -> list[TrainBatch]:
    num_tokens = sum(sum(t.loss_mask) for t in examples)
    shares = [examples[rank::num_ranks] for rank in range(num_ranks)]
    return [
        batch_trajectories(share, [0.0] * len(share), num_sequences=len(examples), num_tokens=num_tokens)
        for share in shares
    ]
