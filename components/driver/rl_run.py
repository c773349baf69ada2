"""The verbs of an RL training loop: next batch, step, publish, evaluate, save, log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import spans
from ..config import Config, derive
from ..monitor.logs import say
from ..replay.actor import BatchRefs
from ..runtime.launch import Parts
from ..runtime.supervisor import together
from ..tasks.evalsets import EvalSet
from .audit import Audits
from .batch_feed import BatchFeed
from .checkpoints import Checkpoints
from .evaluation import Asks, asks_generators, in_one_line, measured, measured_by, of_set
from .publishing import Publishing
from .rl_report import Reporter, StepClock, StepReport
from .turns import Turns

if TYPE_CHECKING:
    from ..trainer.actor import TrainedStep


@dataclass(frozen=True)
class EvalPoint:
    """How good one version is on held-out tasks, and how many seconds of training it took to get there.

    By `measure`: "accuracy", or "reward" where nothing says which answers are right.
    """

    policy_version: int
    train_s: float
    accuracy: float
    measure: str = "accuracy"


class RLRun:
    """A run whose parts are up. `version` counts the optimizer steps in the trainer's weights; `total_steps` ends it.

    What a verb measures belongs to the step under way, which `log` ends. Every wait has a deadline
    (`cluster.step_timeout_s`), and ends with the cause if any part dies.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        *,
        name: str,
        version: int,
        total_steps: int,
        report: Reporter,
        checkpoints: Checkpoints,
        evalsets: Sequence[EvalSet] = (),
        ask: Asks | None = None,
    ) -> None:
        """`ask`: has a taskset answered (None: by the generators of this job)."""
        self.config = config
        self.version = version
        self.total_steps = total_steps
        self.eval_points: list[EvalPoint] = []
        self._parts = parts
        self._name = name
        self._report = report
        self._checkpoints = checkpoints
        self._evalsets = evalsets
        self._ask = ask or asks_generators(config, parts)
        self._numbers = derive(config)
        self._timeout_s = config.cluster.step_timeout_s
        self._audits = Audits(config, parts)
        self._feed = BatchFeed(config, parts)
        self._publishing = Publishing(config, parts, report=report.put, keep=self._audits.keep)
        self.turns = Turns(config, parts, sent=self._publishing.finish)
        self._clock = StepClock()
        self._train_s = 0.0
        self._batch: BatchRefs | None = None
        self._metrics: dict[str, float] = {}
        self._update = 0  # which step of its batch is under way
        self._stepping: asyncio.Future[list[TrainedStep]] | None = None
        self._unlogged: int | None = None

    async def batches(self) -> AsyncIterator[BatchRefs]:
        """Batches in admission order, until `total_steps` or the end of the tasks. The next one is collected while one
        is trained on. With `train.stream_groups` a batch's shares hold what was not trained before all of it was there.
        """
        streams = self.config.train.stream_groups is not None
        upcoming = None if streams else self._feed.ask()
        self._clock = StepClock()
        while self.version < self.total_steps:
            if upcoming is None:
                await self._train_ahead()
                upcoming = self._feed.ask()
            if not upcoming.done():  # else the trainer goes on where it is
                with self._clock.waiting("turns"):
                    await self.turns.engines()
            with self._clock.waiting("wait_for_batch"):
                batch = await self._feed.complete(upcoming)
            if batch is None:
                return
            with self._clock.waiting("turns"):
                await self.turns.trainer()
            upcoming = None if streams else self._feed.ask()
            self._batch, self._metrics, self._update = batch, {}, 0
            yield batch
            replay = await self._wait(self._parts.buffer.trained.remote(batch.group_ids), "replay")
            await self._report.put(StepReport(self.version, replay))

    async def _train_ahead(self) -> None:
        """Add the gradients of the next batch's groups as they come, a part at a time, until the rest is there."""
        at_least = self.config.train.stream_groups
        assert at_least is not None
        while True:
            with self._clock.waiting("wait_for_batch"):
                shares = await self._feed.part(at_least=at_least)
            if shares is None:
                return
            calls = [t.train_part.remote(share) for t, share in zip(self._parts.trainers, shares, strict=True)]
            await self._wait(together(calls), "trainer")

    async def score(self, batch: BatchRefs) -> None:
        """What is computed once for a batch, under the weights at its start: audits, and what its steps compare with.

        Without several steps on a batch there is nothing to compare with but the step's own pass.
        """
        with self._clock.waiting("audit"):
            self._metrics |= await self._audits.of(batch, self.version)
        if len(batch.steps) == 1 or not (self._numbers.scores_proximal or self._numbers.has_critic):
            return
        calls = [
            t.score_batch.remote(*shares)
            for t, shares in zip(self._parts.trainers, zip(*batch.steps, strict=True), strict=True)
        ]
        self._metrics |= (await self._wait(together(calls), "trainer"))[0]

    async def step(self, shares: Sequence[Any], *, publish: bool) -> None:
        """One optimizer step on all ranks, each with its share; with `publish`, the new weights are gathered too."""
        with self._clock.waiting("turns"):
            await self.turns.trainer()  # a step of the same batch, after an evaluation
        self._unlogged = self.version + 1
        assert self._batch is not None, "a step is on a batch"
        with spans.span("step", step=self._unlogged, batch=self._batch.index, groups=self._batch.group_ids):
            calls = [t.train_step.remote(share, publish) for t, share in zip(self._parts.trainers, shares, strict=True)]
            self._stepping = together(calls)
            by_rank = await self._wait(asyncio.shield(self._stepping), "trainer")
        self._metrics |= by_rank[0].metrics
        self.version += 1

    def publishes(self, version: int) -> bool:
        """Whether `version` is one that engines can pull: every n-th (`param_server.publish_every`), and the last."""
        return version % self._numbers.publish_every == 0 or version == self.total_steps

    async def publish(self) -> None:
        """Hand the gathered weights out beside the next step; waits for the publication before it."""
        with self._clock.waiting("wait_for_publish"):
            await self._publishing.begin(self.version)

    async def checkpoint(self) -> None:
        """Save if `checkpoint.every` says so; between batches only, so that none is half trained on resume."""
        with self._clock.waiting("checkpoint"):
            self._metrics |= await self._checkpoints.after_step(self.version)

    async def evaluate_if_due(self) -> None:
        """In mid-run, training stands still until the engines serve this version and have evaluated it."""
        self._train_s += self._clock.so_far()
        every = self.config.eval.every
        if not every or self.version % every or self.version == self.total_steps:
            return
        with self._clock.waiting("evaluate"):
            await self._publishing.finish()
            await self.turns.engines()
            await self._publishing.wait_engines_at(self.version)
            await self.evaluate()

    async def log(self) -> None:
        """End the step under way: everything measured in it goes to the monitors, beside the next step."""
        await self._report.put(self._ended_step())
        self._metrics, self._unlogged = {}, None
        self._update += 1

    async def serve(self) -> None:
        """Publish this version and wait until every engine serves it, proven."""
        if self._publishing.published < self.version:
            await self.turns.trainer()
            await self._publishing.gather(self.version)
        await self.turns.engines()
        await self._publishing.wait_engines_at(self.version)

    async def finish(self) -> None:
        """After the loop: whatever was trained is published."""
        await self._publishing.finish()
        if self._publishing.published < self.version:  # the tasks ended between two publications
            await self.turns.trainer()
            await self._publishing.gather(self.version)
        await self.turns.engines()  # groups that no batch needed are finished there

    async def evaluate(self, *, tell_first: bool = True) -> dict[str, Any]:
        """Evaluate the current version on every evaluation taskset; an empty dict if there is none, or nobody can.

        `tell_first`: say the first one's numbers too, which the run's closing lines may have.
        The first taskset's numbers (the held-out tasks) are at the top level; the others' are under "tasksets".
        """
        if not self._evalsets:
            return {}
        metrics = await measured(self._ask, self._evalsets, policy_version=self.version)
        if not metrics:
            return {}
        self._report.evaluation(self.version, metrics)
        by_set = {e.name: of_set(metrics, e.name) for e in self._evalsets}
        for name, numbers in [*by_set.items()][0 if tell_first else 1 :]:
            say(f"{self._name}: {name.replace('_', '-')} {in_one_line(numbers)} at version {self.version}")
        first = by_set.pop(self._evalsets[0].name)
        measure, value = measured_by(first)
        self.eval_points.append(EvalPoint(self.version, self._train_s, value, measure))
        return {**first, "tasksets": by_set} if by_set else dict(first)

    async def interrupted(self) -> StepReport | None:
        """All ranks finish the step that they are in, then save. Returns that step, if it was not logged."""
        if self._stepping is not None:
            # Save even if this fails, as long as the ranks are alive.
            await self._wait(asyncio.wait({self._stepping}), "trainer")
        await self.turns.trainer()
        await self._checkpoints.at_end(interrupted=True)
        if self._unlogged is None or self._stepping is None or not self._stepping.done():
            return None
        self._metrics |= self._stepping.result()[0].metrics
        return self._ended_step()

    def _ended_step(self) -> StepReport:
        batch, step, metrics = self._batch, self._unlogged, self._metrics
        assert batch is not None
        assert step is not None, "no step is under way"
        assert self._stepping is not None, "step() was called"
        rollouts = list(batch.rollouts[self._update])
        for rank in self._stepping.result():
            for row, logprobs in rank.logprobs.items():
                rollouts[row] = rollouts[row] | {"trainer_logprobs": logprobs}
        return StepReport(
            step,
            metrics | self.turns.metrics() | self._clock.end(metrics),
            batch.metrics,
            rollouts,
            begins_batch=self._update == 0,
            suspects=batch.suspects if self._update == 0 else (),
        )

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._parts.supervisor.wait(call, what=what, timeout_s=self._timeout_s)
