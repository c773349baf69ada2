"""For recipes that train on data: their batches in the object store, their record, their evaluations."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from ..config import Config
from ..monitor import Monitor
from ..monitor.logs import say
from ..runtime.launch import Launcher
from ..runtime.supervisor import together
from ..tasks.batches import Batches
from ..tasks.mixed import MixedTaskSet
from ..tasks.taskset import TaskSet
from ..types import TrainBatch
from .context import StageContext
from .learned import LearningWatch, Verdict

LOSS_WINDOW = 20


B = TypeVar("B")


async def _nothing(launcher: Launcher) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class OfflineData(Generic[B]):
    """What a recipe trains on that generates nothing.

    `batches(start)`: see `Batches`. `split(batch)`: one share per rank, and what there is to say of the batch, as
    metrics. `held_out()`: what is evaluated, by taskset, as one share per rank; `measured`: the metrics that are
    reported of it (None: all). `size`: how much there is, for people. `prepare`: done once the ranks are up, before
    anything is evaluated or trained on in a run that is not resumed.
    """

    taskset: TaskSet | MixedTaskSet
    total_steps: int
    size: str
    batches: Callable[[dict[str, Any] | None], Batches[B]]
    split: Callable[[B], tuple[list[TrainBatch], dict[str, float]]]
    held_out: Callable[[], dict[str, list[TrainBatch]]]
    measured: tuple[str, ...] | None = None
    prepare: Callable[[Launcher], Awaitable[None]] = _nothing


def as_shares(shares: list[TrainBatch]) -> tuple[list[TrainBatch], dict[str, float]]:
    """`OfflineData.split` of batches that are shares already."""
    return shares, {}


class Feed(Generic[B]):
    """The batches of a stage, and the position after each: that of the last step goes into a checkpoint."""

    def __init__(
        self,
        batches: Batches[B],
        taskset: TaskSet | MixedTaskSet,
        *,
        first_step: int,
        split: Callable[[Any], tuple[list[TrainBatch], dict[str, float]]] = as_shares,
    ) -> None:
        self._batches, self._split = batches, split
        self._fingerprint = taskset.fingerprint()
        self._after = {first_step: batches.state_dict()}

    def next(self, step: int) -> tuple[list[Any], int, dict[str, float]]:
        """The batch of this step: a reference to each rank's share, the trained tokens in all, and its metrics."""
        shares, metrics = self._split(next(self._batches))
        self._after = {step - 1: self._after[step - 1], step: self._batches.state_dict()}
        return [ray.put(share) for share in shares], int(shares[0].num_tokens), metrics

    async def position(self, policy_version: int) -> dict[str, Any]:
        """See `Checkpoints`. An interrupted run may have the next batch already, and not have trained on it."""
        return {"batches": self._after[policy_version], "stream": {"taskset": {"fingerprint": self._fingerprint}}}


class Measure:
    """Evaluates the current weights on the held-out data, logs the result, and returns it as `_by_taskset` does."""

    def __init__(
        self,
        context: StageContext,
        launcher: Launcher,
        monitor: Monitor,
        tasksets: dict[str, list[TrainBatch]],
        *,
        measured: tuple[str, ...] | None = None,
    ) -> None:
        self._name, self._config, self._measured = context.name, context.config, measured
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
        kept = {name: value for name, value in metrics.items() if self._measured is None or name in self._measured}
        return {name.removeprefix("train/").replace("/", "_"): value for name, value in kept.items()}


def _by_taskset(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The first taskset's numbers (the held-out tasks), with those of the others under "tasksets"; {}: none."""
    by_set: dict[str, dict[str, float]] = {}
    for metric, value in metrics.items():
        if metric.startswith("eval/"):
            _, taskset, name = metric.split("/", 2)
            by_set.setdefault(taskset, {})[name] = value
    first = by_set.pop(next(iter(by_set), ""), {})
    return {**first, "tasksets": by_set} if by_set else dict(first)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line with the held-out results; none if nothing was measured."""
    numbers = [name for name, value in before.items() if name in after and not isinstance(value, dict)]
    changes = [f"{name.replace('_', ' ')} {before[name]:.3f} -> {after[name]:.3f}" for name in numbers]
    return [f"held out: {', '.join(changes)}"] if changes else []


class OfflineReport:
    """The metrics of a stage over its whole life. `earlier`: the rows up to the step that it resumes from."""

    def __init__(
        self,
        config: Config,
        monitor: Monitor,
        *,
        name: str,
        loss_name: str,
        trains_on: str = "answers",
        earlier: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._monitor, self._name, self._loss_name = monitor, name, loss_name
        self._evaluations = [row for row in earlier if row["role"] == "evaluation"]
        self._learning = LearningWatch(
            config, monitor.run_dir, trains_on=trains_on, loss_name=loss_name, earlier=earlier
        )
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
