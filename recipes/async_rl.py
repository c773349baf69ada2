"""Train with RL: engines generate while the trainer learns, within staleness.max_policy_lag.

The driver wires the parts, watches them, and holds the loops. P groups of rollouts are a batch, v is the policy version
(the number of optimizer steps in the weights), N engines generate, M ranks train.

    taskset --> admit() --> Collector[N] --> ReplayBuffer ------------> Trainer[M ranks] ----> ParameterServer
                  | (group, task, min version) ^  | take(P groups)        | train_step             |
                  | env + vLLM, per-token v    |  | in admission order    |                        |
                  | put(group)                 |  v                       |                        |
                  |                            +--+-- published(v+1) <----+------------------------+
                  +<------- pull(v+1) when behind: pause, load, resume, canary, then release ------+

The collectors' loops run in their actors. Here run: `_train_loop` (takes -> steps), one `_publish` after each published
step (beside the next step), `Reporter.run` (metrics, off the critical path). Synchronous RL is the same code with
`staleness.max_policy_lag=0`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from leeway import driver
from leeway.config import Config, Recipe, derive
from leeway.config.rules import RL_RULES
from leeway.monitor import build_monitor, read_metrics

T = TypeVar("T")
LAST_REPORTS_S = 30.0
"""How long an interrupted run waits for the metrics of its last steps to be written."""


async def run(context: driver.StageContext) -> driver.StageResult:
    """GRPO with generation and training side by side. What to turn, by config section:

    - `staleness.max_policy_lag`: how many optimizer steps the generating policy may lag; 0 is synchronous RL
    - `train.groups_per_step`, `train.updates_per_batch`, `algorithm.*`, `optimizer.*`: what is learned from a batch
    - `rollout.num_generators`, `train.num_ranks`: how the machine is split
    - `env.name`, `env.reward`, `task.*`: what is learned
    - `eval.*`: reward and accuracy on held-out tasks before, during and after
    """
    launcher = driver.Launcher(
        context.config, context.recipe, run_dir=context.dir, supervisor=driver.Supervisor(context.watch)
    )
    try:
        result = await AsyncRL(context, launcher).run()
    finally:
        await launcher.parts.stop()
    advice = await asyncio.to_thread(driver.advice_after, context.config, context.dir)
    if advice is None:
        return result
    return replace(result, summary=result.summary | {"advice": advice}, goodbye=[*result.goodbye, advice])


RECIPE = Recipe(run=run, generates=True, trains_on="rollouts", rules=RL_RULES)


@dataclass(frozen=True)
class EvalPoint:
    """How good one version is on held-out tasks, and how many seconds of training it took to get there.

    By `measure`: "accuracy", or "reward" where nothing says which answers are right.
    """

    policy_version: int
    train_s: float
    accuracy: float
    measure: str = "accuracy"


class AsyncRL:
    """One run. `launcher` holds the parts: the first run that gets it starts them, and each later run resets them."""

    def __init__(
        self, context: driver.StageContext, launcher: driver.Launcher, *, speeds: driver.Speeds | None = None
    ) -> None:
        self._context = context
        self._config: Config = context.config
        self._numbers = derive(self._config)
        self._launcher = launcher
        self._parts = launcher.parts
        self._supervisor = self._parts.supervisor
        assert self._config.model.path is not None
        self._prompter = driver.Prompter.load(self._config.model.path)
        self._train_tasks = driver.build_taskset(
            self._config.task, seed=self._config.seed, split="train", eval_config=self._config.eval
        )
        self._evalsets = driver.build_evalsets(self._config)
        self._total_steps = self._num_steps()
        self._resumed = driver.resume_point(context.dir / "checkpoints", self._config)
        self._first_step = driver.saved_version(self._resumed) if self._resumed is not None else 0
        self._monitor = build_monitor(
            context.dir,
            self._config.monitor,
            self._config.written(),
            self._total_steps,
            f"{self._config.name} / {context.name}",
            resumed_at=self._first_step if self._resumed is not None else None,
        )
        self._earlier = read_metrics(context.dir / "metrics.jsonl")
        self._report = driver.Reporter(
            self._config,
            self._parts,
            self._monitor,
            first_step=self._first_step,
            warn=lambda text: driver.say(f"{context.name}: warning: {text}"),
        )
        self._kept = driver.KeptPublications(
            every=self._config.train.audit_every,
            reach=self._numbers.max_policy_lag + self._config.param_server.publish_every,
        )
        self._status = "failed"
        self._version = 0
        self._published = -1
        self._publishing: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._stepping: asyncio.Future[list[dict[str, float]]] | None = None
        self._under_way: driver.StepReport | None = None
        self._clock = driver.StepClock()
        self._timeout_s = self._config.cluster.step_timeout_s
        self._train_s = 0.0
        self.speeds = speeds
        self.eval_points: list[EvalPoint] = []

    async def run(self) -> driver.StageResult:
        started = time.monotonic()
        try:
            await self._launch()
            try:
                result = await self._run_launched(started)
            except asyncio.CancelledError:
                self._status = "interrupted"
                await asyncio.shield(self._save_interrupted())
                raise
            self._status = "done"
            return result
        finally:
            self._monitor.close(self._status)

    async def _save_interrupted(self) -> None:
        """All ranks finish the step that they are in, then save. Everything they did is logged."""
        if self._stepping is not None:
            # Save even if this fails, as long as the ranks are alive.
            await self._wait(asyncio.wait({self._stepping}), "trainer")
        await self._checkpoints.at_end(interrupted=True)
        if self._reporting is None or self._reporting.done():
            return
        last_reports = asyncio.ensure_future(self._log_to_the_end(self._reporting))
        _, late = await asyncio.wait({last_reports}, timeout=LAST_REPORTS_S)
        last_reports.cancel()
        if late or last_reports.exception() is not None:
            driver.say(f"{self._context.name}: the last steps' metrics were not written within {LAST_REPORTS_S:g} s")

    async def _log_to_the_end(self, reporting: asyncio.Task[None]) -> None:
        if self._under_way is not None and self._stepping is not None and self._stepping.done():
            metrics = self._stepping.result()[0] | self._under_way.metrics
            await self._report.put(replace(self._under_way, metrics=metrics | self._clock.end(metrics)))
        await self._report.end(reporting)

    async def _run_launched(self, started: float) -> driver.StageResult:
        """Hand out version 0, evaluate, measure, train, evaluate, save."""
        if self._resumed is not None:
            self._version = await self._launcher.load_state(self._resumed / driver.STATE_DIR)
        await self._timed(f"version {self._version} served and proven", self._publish_first())
        evals = {}
        if self._config.eval.at_start:
            evals["before"] = driver.evaluated_at_start(self._earlier, self._evalsets) or await self._evaluate()
        if self.speeds is None and self._resumed is not None:
            self.speeds = driver.saved_speeds(self._config, self._context.dir)
        if self.speeds is None:
            pause_s = (await self._report.collect_stats()).get("collector/pause_s", 0.0)
            measuring = driver.measure_speeds(self._config, self._parts, self._train_tasks.tasks, weight_sync_s=pause_s)
            self.speeds = await self._timed("speeds measured", measuring)
            driver.save_speeds(self.speeds, self._config, self._context.dir)
        begun = time.monotonic()
        driver.say(
            f"{self._context.name}: {self._total_steps} steps, lag bound {self._numbers.max_policy_lag}, "
            f"up after {begun - started:.0f} s"
        )
        await self._collect_and_train(self.speeds)
        rl_s = time.monotonic() - begun + sum(row.get("step/total_s", 0.0) for row in self._earlier)
        await self._wait_engines_at(self._version)
        if self._config.eval.at_end:
            evals["after"] = await self._evaluate()
        await self._report.collect_stats(self._version)
        folder = await self._checkpoints.at_end()
        return self._result(evals, str(folder) if folder else None, wall_s=time.monotonic() - started, rl_s=rl_s)

    async def _collect_and_train(self, speeds: driver.Speeds) -> None:
        """Start the collectors' loops and the reports, train to the end, and wait for all of them to end."""
        collecting = [
            self._supervisor.watch(f"generator-{i}", c.collect.remote()) for i, c in enumerate(self._parts.collectors)
        ]
        self._reporting = asyncio.create_task(self._report.run(speeds))
        self._supervisor.watch("driver", self._reporting)
        await self._train_loop()
        await self._report.end(self._reporting)
        await self._wait(self._parts.buffer.close.remote(), "replay")
        await self._wait(asyncio.gather(*collecting), "generators finishing")

    async def _launch(self) -> None:
        """Start everything concurrently; engines take longest."""
        canary = driver.canary_prompts(self._config, self._prompter, self._train_tasks.tasks)
        if self._parts.buffer is not None:
            assert self._resumed is None, "a study's runs all begin at the start"
            await self._launcher.begin(self._config, total_steps=self._total_steps, canary=canary)
        else:
            driver.say(
                f"{self._context.name}: starting {self._config.rollout.num_generators} generator(s), "
                f"{self._config.train.num_ranks} trainer rank(s)"
            )
            start = driver.saved_position(self._resumed) if self._resumed else None
            await asyncio.gather(  # begun in this order: collectors are given the handles of the first two
                self._launcher.param_server(),
                self._launcher.buffer(start=start),
                self._timed("trainer ready", self._launcher.trainers(total_steps=self._total_steps, canary=canary)),
                self._timed("generators ready", self._launcher.collectors()),
            )
        self._checkpoints = driver.Checkpoints(
            self._context.dir / "checkpoints",
            config=self._config,
            trainers=self._parts.trainers,
            supervisor=self._supervisor,
            position=lambda version: self._wait(self._parts.buffer.position.remote(version), "replay"),
            resumed=self._resumed,
        )
        for i, collector in enumerate(self._parts.collectors):
            self._supervisor.watch(f"generator-{i}", collector.sync_weights_loop.remote())

    async def _train_loop(self) -> None:
        """Consumes takes; waits for complete ones; unblocked by collectors' puts; produces policy versions."""
        n, buffer = self._config.param_server.publish_every, self._parts.buffer
        upcoming = self._ask_for_take()
        clock = self._clock = driver.StepClock()
        while self._version < self._total_steps:
            with clock.waiting("wait_for_batch"):
                take = await self._next_take(upcoming)
            if take is None:
                break
            upcoming = self._ask_for_take()  # collected while this one is trained on
            with clock.waiting("audit"):
                of_take = await self._audit(take)
            of_take |= await self._begin_take(take)
            for i, batches in enumerate(take.batches):
                publish = (self._version + 1) % n == 0 or self._version + 1 == self._total_steps
                first = i == 0
                self._under_way = driver.StepReport(
                    self._version + 1,
                    of_take if first else {},
                    take.metrics,
                    take.rollouts if first else None,
                    take.suspects if first else (),
                )
                metrics = await self._step(batches, publish) | self._under_way.metrics
                if publish:
                    with clock.waiting("wait_for_publish"):
                        await self._finish_publishing()
                    # Requested before the next step, because that step's publication replaces an unclaimed one.
                    publication = self._parts.trainers[0].publication.remote()
                    self._publishing = asyncio.create_task(self._publish_to_engines(self._version, publication))
                    self._supervisor.watch("publishing", self._publishing)
                if i == len(take.batches) - 1:  # between takes: none is ever half trained on resume
                    with clock.waiting("checkpoint"):
                        metrics |= await self._checkpoints.after_step(self._version)
                self._train_s += clock.so_far()
                with clock.waiting("evaluate"):
                    await self._maybe_evaluate()
                await self._report.put(replace(self._under_way, metrics=metrics | clock.end(metrics)))
                self._under_way = None
            replay = await self._wait(buffer.trained.remote(take.group_ids), "replay")
            await self._report.put(driver.StepReport(self._version, replay))
        await self._finish_publishing()
        if self._published < self._version:  # the tasks ended between two publications
            await self._publish()

    def _ask_for_take(self) -> asyncio.Future[driver.TakeRefs | None]:
        upcoming = asyncio.ensure_future(driver.awaited(self._parts.buffer.take.remote(self._timeout_s)))
        # Whoever awaits it gets its exception; when the run is ending, nobody does.
        upcoming.add_done_callback(lambda call: None if call.cancelled() else call.exception())
        return upcoming

    async def _next_take(self, upcoming: asyncio.Future[driver.TakeRefs | None]) -> driver.TakeRefs | None:
        """Waits as long as the buffer's groups make progress: the buffer itself ends a standstill, and names the cause.

        A buffer that does not respond at all is detected here.
        """
        while not upcoming.done():
            half_s = self._timeout_s / 2
            await self._supervisor.wait(asyncio.wait({upcoming}, timeout=half_s), what="replay", timeout_s=half_s + 60)
            if not upcoming.done():
                await self._supervisor.wait(self._parts.buffer.ping.remote(), what="replay", timeout_s=half_s)
        return await self._wait(upcoming, "replay")

    async def _audit(self, take: driver.TakeRefs) -> dict[str, float]:
        """If an audit is due: score the take's tokens of every older version again, under exactly those weights."""
        audits = []
        for publication in self._kept.due(self._version):
            calls = [
                t.audit.remote(batch, publication)
                for t, batch in zip(self._parts.trainers, take.batches[0], strict=True)
            ]
            audits.append((await self._wait(driver.together(calls), "trainer"))[0])
        tokens = sum(a["tokens"] for a in audits)
        if not tokens:
            return {}
        return {
            "train/audit_gap/mean": sum(a["sum"] for a in audits) / tokens,
            "train/audit_gap/max": max(a["max"] for a in audits),
            "train/audit_tokens": tokens,
            "train/audit_versions": float(sum(a["tokens"] > 0 for a in audits)),
        }

    async def _begin_take(self, take: driver.TakeRefs) -> dict[str, float]:
        """Later steps of a take compare with the weights at its start: score it now, once, if that is configured."""
        if not (self._numbers.scores_proximal or self._numbers.has_critic) or len(take.batches) == 1:
            return {}
        calls = [
            t.begin_take.remote(*shares)
            for t, shares in zip(self._parts.trainers, zip(*take.batches, strict=True), strict=True)
        ]
        return (await self._wait(driver.together(calls), "trainer"))[0]

    async def _step(self, batches: list[Any], publish: bool) -> dict[str, float]:
        """One optimizer step on all ranks."""
        calls = [t.train_step.remote(b, publish) for t, b in zip(self._parts.trainers, batches, strict=True)]
        self._stepping = driver.together(calls)
        metrics = (await self._wait(asyncio.shield(self._stepping), "trainer"))[0]
        self._version += 1
        return metrics

    async def _publish_first(self) -> None:
        await self._publish()
        await self._wait_engines_at(self._version)

    async def _publish(self) -> None:
        """Gather the current weights on the trainer and hand them out."""
        await self._wait(driver.together(t.publish.remote() for t in self._parts.trainers), "trainer")
        await self._publish_to_engines(self._version, self._parts.trainers[0].publication.remote())

    async def _publish_to_engines(self, version: int, upload: Awaitable[driver.Publication]) -> None:
        """Make rank 0's upload of `version` available, and let more groups start. Runs beside the next step."""
        started = time.monotonic()
        publication = await self._wait(upload, "trainer-0")
        assert publication.manifest.policy_version == version, "the trainer and the driver count steps differently"
        await self._wait(self._parts.param_server.publish.remote(publication), "param_server")
        await self._wait(self._parts.buffer.published.remote(version), "replay")
        self._published = version
        self._kept.add(publication)
        await self._report.put(driver.StepReport(version, {"param_server/publish_s": time.monotonic() - started}))

    async def _finish_publishing(self) -> None:
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    async def _maybe_evaluate(self) -> None:
        """In mid-run: training stands still until the engines serve this version and have evaluated it."""
        every = self._config.eval.every
        if not every or self._version % every or self._version == self._total_steps:
            return
        await self._finish_publishing()
        await self._wait_engines_at(self._version)
        await self._evaluate()

    async def _evaluate(self) -> dict[str, Any]:
        """Evaluate the current version on every evaluation taskset; an empty dict if there is none.

        The first taskset's numbers (the held-out tasks) are at the top level; the others' are under "tasksets".
        """
        if not self._evalsets:
            return {}
        metrics, _ = await driver.evaluate(self._config, self._parts, self._evalsets, policy_version=self._version)
        self._monitor.log(self._version, metrics, role="evaluation")
        by_set = {e.name: driver.of_set(metrics, e.name) for e in self._evalsets}
        for name, numbers in by_set.items():
            driver.say(
                f"{self._context.name}: {name.replace('_', '-')} {driver.told(numbers)} at version {self._version}"
            )
        first = by_set.pop(self._evalsets[0].name)
        measure, value = driver.measured_by(first)
        self.eval_points.append(EvalPoint(self._version, self._train_s, value, measure))
        return {**first, "tasksets": by_set} if by_set else dict(first)

    async def _wait_engines_at(self, version: int) -> None:
        calls = [c.until_verified.remote(version) for c in self._parts.collectors]
        await self._wait(driver.together(calls), "generators")

    async def _timed(self, what: str, work: Awaitable[T]) -> T:
        return await driver.timed(self._context.name, what, work, see=f"{self._context.dir / 'logs'}/")

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._supervisor.wait(call, what=what, timeout_s=self._timeout_s)

    def _num_steps(self) -> int:
        train = self._config.train
        if train.steps is not None:
            return train.steps
        assert train.epochs is not None
        assert not isinstance(self._train_tasks, driver.QueueTaskSet), (
            "a rule on settings: nobody knows how long it will be"
        )
        groups = round(train.epochs * len(self._train_tasks))
        return -(-groups // self._numbers.fresh_groups_per_take) * train.updates_per_batch

    def _result(self, evals: dict[str, Any], folder: str | None, *, wall_s: float, rl_s: float) -> driver.StageResult:
        summary = self._report.summary(steps=self._version) | {
            "wall_s": round(wall_s, 1),
            "rl_s": round(rl_s, 1),
            "eval": evals,
            "max_policy_lag": self._numbers.max_policy_lag,
            "processes": self._parts.processes,
            "failed_sinks": self._monitor.failed_sinks,
            **asdict(self._report.verdict()),
        }
        first, last = summary["reward_first"], summary["reward_last"]
        lines = [
            f"reward {first:.3f} -> {last:.3f}" if first is not None and last is not None else "no reward was seen"
        ]
        if "before" in evals and "after" in evals and evals["before"]:
            lines.append(f"held-out {driver.told(evals['before'], evals['after'])}")
        lines += driver.in_words(summary["time_shares"])
        if (efficiency := summary["efficiency_second_half"]) is not None:
            lines.append(f"{efficiency:.0%} of the speed limit in the second half")
        return driver.StageResult(summary=summary, model_path=folder, goodbye=lines)
