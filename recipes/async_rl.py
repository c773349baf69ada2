"""Asynchronous RL: the driver wires the parts, watches them, and holds the loops.

    taskset --> admit() --> Collector[N] --> ReplayBuffer ------------> Trainer[M ranks] ----> ParameterServer
                  | (group, task, floor)       ^  | take(P groups)        | train_step             |
                  | env + vLLM, per-token v    |  | in admission order    |                        |
                  | put(group)                 |  v                       |                        |
                  |                            +--+-- published(v+1) <----+------------------------+
                  +<------- pull(v+1) when behind: pause, load, resume, canary, then release ------+

The collectors' loops run in their actors. Here run: `_train_loop` (takes -> steps), one `_publish` after each published
step (beside the next step), `_report_loop` (metrics, off the critical path). Synchronous RL is the same code with
`staleness.max_policy_lag=0`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

from leeway.config import Config, derive
from leeway.monitor import build_monitor, read_metrics, reward_first, reward_last
from leeway.recipes.checkpoints import Checkpoints, resume_point, saved_position
from leeway.recipes.context import StageContext, StageResult, say
from leeway.recipes.evaluation import evaluate
from leeway.recipes.speeds import measure_speeds
from leeway.replay.actor import TakeRefs
from leeway.runtime.launch import Launcher
from leeway.runtime.limit import LimitMeter, Speeds
from leeway.runtime.supervisor import Supervisor
from leeway.tasks.prompting import Prompter
from leeway.tasks.taskset import build_taskset
from leeway.weights import CanaryPrompts


async def run(context: StageContext) -> StageResult:
    """GRPO with generation and training side by side. What to turn, by config section:

    - `staleness.max_policy_lag`: how many optimizer steps the generating policy may lag; 0 is synchronous RL
    - `train.groups_per_step`, `train.updates_per_batch`, `algorithm.*`, `optimizer.*`: what is learned from a batch
    - `rollout.num_generators`, `train.num_ranks`: how the machine is split
    - `env.name`, `env.reward`, `task.*`: what is learned
    - `eval.*`: greedy accuracy on held-out tasks before, during and after
    """
    job = AsyncRL(context)
    try:
        return await job.run()
    finally:
        await job.stop()


@dataclass(frozen=True)
class _StepReport:
    """Something to log at a step. With a `take`: one of its optimizer steps."""

    step: int
    metrics: dict[str, float]
    take: TakeRefs | None = None
    first_of_take: bool = False


class AsyncRL:
    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._config: Config = context.config
        self._numbers = derive(self._config)
        self._supervisor = Supervisor()
        self._launcher = Launcher(self._config, "async_rl", run_dir=context.dir, supervisor=self._supervisor)
        self._parts = self._launcher.parts
        assert self._config.model.path is not None
        self._prompter = Prompter.load(self._config.model.path)
        self._train_tasks = build_taskset(
            self._config.task, seed=self._config.seed, split="train", eval_config=self._config.eval
        )
        self._eval_tasks = build_taskset(
            self._config.task, seed=self._config.seed, split="eval", eval_config=self._config.eval
        )
        self._total_steps = self._num_steps()
        self._monitor = build_monitor(
            context.dir,
            self._config.monitor,
            self._config.model_dump(mode="json"),
            self._total_steps,
            f"{self._config.name} / {context.name}",
        )
        self._resumed = resume_point(context.dir / "checkpoints", self._config)
        self._status = "failed"
        self._version = 0
        self._published = -1
        self._num_tokens = 0
        self._max_lag = 0.0
        self._served_gap = 0.0
        self._num_pulls = 0.0
        self._publishing: asyncio.Task[None] | None = None
        self._stepping: asyncio.Future[list[dict[str, float]]] | None = None
        self._reports: asyncio.Queue[_StepReport | None] = asyncio.Queue()
        self._timeout_s = self._config.cluster.step_timeout_s

    async def run(self) -> StageResult:
        started = time.monotonic()
        say(
            f"{self._context.name}: starting {self._config.rollout.num_generators} generator(s), "
            f"{self._config.train.num_ranks} trainer rank(s)"
        )
        await self._launch()
        try:
            result = await self._run_launched(started)
        except asyncio.CancelledError:
            self._status = "interrupted"
            await asyncio.shield(self._save_interrupted())
            raise
        self._status = "done"
        return result

    async def _save_interrupted(self) -> None:
        """The ranks finish the step that they are in, all of them, then save."""
        if self._stepping is not None:
            await asyncio.wait({self._stepping}, timeout=self._timeout_s)
        await self._checkpoints.at_end(interrupted=True)

    async def _run_launched(self, started: float) -> StageResult:
        """Hand out version 0, evaluate, measure, train, evaluate, save."""
        if self._resumed is not None:
            self._version = await self._launcher.load_state(self._resumed / "dcp")
        await self._publish()
        await self._until_served(self._version)
        evals = {"before": await self._evaluate()} if self._config.eval.at_start else {}
        pause_s = (await self._collect_stats()).get("collector/pause_s", 0.0)
        speeds = await measure_speeds(self._config, self._parts, self._train_tasks.tasks, hand_over_s=pause_s)
        begun = time.monotonic()
        say(
            f"{self._context.name}: {self._total_steps} steps, lag bound {self._numbers.max_policy_lag}, "
            f"up after {begun - started:.0f} s"
        )
        await self._collect_and_train(speeds)
        rl_s = time.monotonic() - begun
        await self._until_served(self._version)
        if self._config.eval.at_end:
            evals["after"] = await self._evaluate()
        await self._collect_stats()
        folder = await self._checkpoints.at_end()
        return self._result(evals, str(folder) if folder else None, wall_s=time.monotonic() - started, rl_s=rl_s)

    async def _collect_and_train(self, speeds: Speeds) -> None:
        """Start the collectors' loops and the reports, train to the end, and see all of them end."""
        collecting = [
            self._supervisor.watch(f"generator-{i}", c.collect.remote()) for i, c in enumerate(self._parts.collectors)
        ]
        reporting = asyncio.create_task(self._report_loop(speeds))
        self._supervisor.watch("driver", reporting)
        await self._train_loop()
        self._reports.put_nowait(None)
        await self._supervisor.wait(reporting, what="reports", timeout_s=self._timeout_s)
        await self._wait(self._parts.buffer.close.remote(), "replay")
        await self._wait(asyncio.gather(*collecting), "generators finishing")

    async def stop(self) -> None:
        try:
            self._monitor.close(self._status)
        finally:
            await self._parts.stop()

    async def _launch(self) -> None:
        """Everything starts beside everything else; engines take longest."""
        start = saved_position(self._resumed) if self._resumed else None
        await asyncio.gather(self._launcher.param_server(), self._launcher.buffer(start=start))
        await asyncio.gather(
            self._launcher.trainers(total_steps=self._total_steps, canary=self._canary()),
            self._launcher.collectors(),
        )
        self._context.processes.extend(self._parts.local_processes())
        self._checkpoints = Checkpoints(
            self._context.dir / "checkpoints",
            config=self._config,
            trainers=self._parts.trainers,
            supervisor=self._supervisor,
            position=lambda version: self._wait(self._parts.buffer.position.remote(version), "replay"),
        )
        for i, collector in enumerate(self._parts.collectors):
            self._supervisor.watch(f"generator-{i}", collector.keep_current.remote())

    async def _train_loop(self) -> None:
        """Consumes takes; waits for complete ones; unblocked by collectors' puts; produces policy versions."""
        timeout_s, n = self._timeout_s, self._config.param_server.publish_every
        buffer = self._parts.buffer
        upcoming = buffer.take.remote(timeout_s)
        last_end = time.monotonic()
        while self._version < self._total_steps:
            begun = time.monotonic()
            take = await self._supervisor.wait(upcoming, what="replay", timeout_s=timeout_s + 10)
            if take is None:
                break
            waited_s = time.monotonic() - begun
            upcoming = buffer.take.remote(timeout_s)  # collected while this one is trained on
            proximal = await self._begin_take(take)
            for i, batches in enumerate(take.batches):
                publish = (self._version + 1) % n == 0 or self._version + 1 == self._total_steps
                metrics = await self._step(batches, publish)
                if publish:
                    await self._finish_publishing()
                    self._publishing = asyncio.create_task(self._hand_out())
                    self._supervisor.watch("publishing", self._publishing)
                await self._maybe_evaluate()
                now = time.monotonic()
                metrics |= {"step/wait_for_batch_s": waited_s if i == 0 else 0.0, "step/total_s": now - last_end}
                metrics |= proximal if i == 0 else {}
                last_end = now
                self._reports.put_nowait(_StepReport(self._version, metrics, take, first_of_take=i == 0))
            replay = await self._wait(buffer.trained.remote(take.group_ids), "replay")
            await self._checkpoints.after_step(self._version)  # between takes: none is ever half trained on resume
            self._reports.put_nowait(_StepReport(self._version, replay))
            self._num_tokens += int(take.metrics["train/response_tokens/total"])
        await self._finish_publishing()
        if self._published < self._version:  # the tasks ended between two publications
            await self._publish()

    async def _begin_take(self, take: TakeRefs) -> dict[str, float]:
        """Later steps of a take compare with the policy that took it: score it now, once, where that is asked for."""
        if self._config.algorithm.correction == "none" or len(take.batches) == 1:
            return {}
        calls = [
            t.begin_take.remote(*shares)
            for t, shares in zip(self._parts.trainers, zip(*take.batches, strict=True), strict=True)
        ]
        return (await self._wait(asyncio.gather(*map(_awaited, calls)), "trainer"))[0]

    async def _step(self, batches: list[Any], publish: bool) -> dict[str, float]:
        """One optimizer step on all ranks."""
        calls = [t.train_step.remote(b, publish) for t, b in zip(self._parts.trainers, batches, strict=True)]
        self._stepping = asyncio.gather(*map(_awaited, calls))
        metrics = (await self._wait(asyncio.shield(self._stepping), "trainer"))[0]
        self._version += 1
        self._max_lag = max(self._max_lag, metrics.get("train/policy_lag/max", 0.0))
        return metrics

    async def _publish(self) -> None:
        """Gather the current weights on the trainer and hand them out."""
        await self._wait(asyncio.gather(*(_awaited(t.publish.remote()) for t in self._parts.trainers)), "trainer")
        await self._hand_out()

    async def _hand_out(self) -> None:
        """Upload what rank 0 has gathered, make it available, and let more groups start. Runs beside the next step."""
        started = time.monotonic()
        version = self._version
        publication = await self._wait(self._parts.trainers[0].publication.remote(), "trainer-0")
        assert publication.manifest.policy_version == version, "the trainer and the driver count steps differently"
        await self._wait(self._parts.param_server.publish.remote(publication), "param_server")
        await self._wait(self._parts.buffer.published.remote(version), "replay")
        self._published = version
        self._reports.put_nowait(_StepReport(version, {"param_server/publish_s": time.monotonic() - started}))

    async def _finish_publishing(self) -> None:
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    async def _report_loop(self, speeds: Speeds) -> None:
        """Consumes step reports; waits for steps; asks the collectors for theirs; ends with None."""
        limit = LimitMeter(speeds, max_policy_lag=self._numbers.max_policy_lag)
        updates = self._config.train.updates_per_batch
        while (report := await self._reports.get()) is not None:
            if report.take is None:
                self._monitor.log(report.step, report.metrics, role="driver")
                continue
            take, step_s = report.take.metrics, report.metrics["step/total_s"]
            response_tokens = take["train/response_tokens/total"] / updates
            metrics = report.metrics | limit.step(
                response_tokens=response_tokens,
                trained_tokens=take["train/tokens_in_pass"] / updates,
                longest_response_tokens=take["train/response_tokens/max"],
                step_s=step_s,
            )
            metrics["train/tokens_per_s"] = response_tokens / step_s
            if report.first_of_take:  # what describes the take is said once
                metrics |= take
                self._monitor.rollouts(report.step, report.take.rollouts)
            self._monitor.log(report.step, metrics, role="trainer")
            await self._collect_stats()

    async def _collect_stats(self) -> dict[str, float]:
        """Log what the collectors did since the last time."""
        calls = asyncio.gather(*(_awaited(c.stats.remote()) for c in self._parts.collectors))
        stats = reduce_stats(await self._wait(calls, "generators"))
        self._served_gap = max(self._served_gap, stats.get("param_server/served_gap/max", 0.0))
        self._num_pulls += stats["param_server/pulls"]
        self._monitor.log(self._version, stats, role="collector")
        return stats

    async def _maybe_evaluate(self) -> None:
        """In mid-run: training stands still until the engines serve this version and have evaluated it."""
        every = self._config.eval.every
        if not every or self._version % every or self._version == self._total_steps:
            return
        await self._finish_publishing()
        await self._until_served(self._version)
        await self._evaluate()

    async def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the current version; an empty dict where nothing is held out."""
        if not self._eval_tasks.tasks:
            return {}
        metrics, _ = await evaluate(
            self._config, self._parts, self._eval_tasks.tasks, name=self._eval_tasks.name, policy_version=self._version
        )
        self._monitor.log(self._version, metrics, role="evaluation")
        accuracy = metrics.get(
            f"eval/{self._eval_tasks.name}/exact_match", metrics[f"eval/{self._eval_tasks.name}/reward"]
        )
        say(f"{self._context.name}: held-out accuracy {accuracy:.3f} at version {self._version}")
        return {k.rsplit("/", 1)[1]: v for k, v in metrics.items()}

    async def _until_served(self, version: int) -> None:
        calls = [_awaited(c.until_verified.remote(version)) for c in self._parts.collectors]
        await self._wait(asyncio.gather(*calls), "generators")

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._supervisor.wait(call, what=what, timeout_s=self._timeout_s)

    def _num_steps(self) -> int:
        train = self._config.train
        if train.steps is not None:
            return train.steps
        assert train.epochs is not None
        groups = round(train.epochs * len(self._train_tasks))
        return -(-groups // train.groups_per_step) * train.updates_per_batch

    def _canary(self) -> CanaryPrompts:
        """Real prompts with their answers, one by one and (for the prefix cache) one after the other."""
        server, room = self._config.param_server, self._config.rollout.max_model_len - 1
        length = min(server.canary_tokens, room)
        tasks = self._train_tasks.tasks
        examples = [
            self._prompter.encode(task.prompt) + self._prompter.encode_plain(task.answer)
            for task in itertools.islice(itertools.cycle(tasks), max(server.canary_prompts, length))
        ]
        scored = [example[:length] for example in examples[: server.canary_prompts]]
        chains = [
            itertools.chain.from_iterable(examples[i:] + examples[:i])
            for i in range(max(1, server.canary_prompts // 2))
        ]
        return CanaryPrompts(scored=scored, cached=[list(itertools.islice(chain, length)) for chain in chains])

    def _result(self, evals: dict[str, Any], folder: str | None, *, wall_s: float, rl_s: float) -> StageResult:
        rows = list(read_metrics(self._context.dir / "metrics.jsonl"))
        late = [r for r in rows if "limit/step_s" in r and r["step"] > self._version / 2]
        efficiency = sum(r["limit/step_s"] for r in late) / sum(r["step/total_s"] for r in late) if late else None
        dropped = max((r["replay/dropped_stale"] for r in rows if "replay/dropped_stale" in r), default=0.0)
        first, last = reward_first(rows), reward_last(rows)
        summary = {
            "steps": self._version,
            "wall_s": round(wall_s, 1),
            "rl_s": round(rl_s, 1),
            "tokens": self._num_tokens,
            "reward_first": first,
            "reward_last": last,
            "eval": evals,
            "max_policy_lag": self._numbers.max_policy_lag,
            "max_policy_lag_observed": int(self._max_lag),
            "dropped_stale": int(dropped),
            "served_gap_max": self._served_gap,
            "pulls": int(self._num_pulls),
            "efficiency_second_half": efficiency,
            "processes": self._parts.processes,
            "failed_sinks": self._monitor.failed_sinks,
        }
        lines = [
            f"reward {first:.3f} -> {last:.3f}" if first is not None and last is not None else "no reward was seen"
        ]
        if "before" in evals and "after" in evals and evals["before"]:
            name = "exact_match" if "exact_match" in evals["after"] else "reward"
            lines.append(f"held-out {name} {evals['before'][name]:.3f} -> {evals['after'][name]:.3f}")
        if efficiency is not None:
            lines.append(f"{efficiency:.0%} of the speed limit in the second half")
        return StageResult(summary=summary, model_path=folder, goodbye=lines)


def reduce_stats(stats: list[dict[str, float]]) -> dict[str, float]:
    """One set of numbers for all collectors: rates and counts add up, shares of time are averaged, maxima are kept."""
    reduced: dict[str, float] = {}
    for name in {name for s in stats for name in s}:
        values = [s[name] for s in stats if name in s]
        if name.endswith(("/max", "_gap", "_s")) and not name.endswith("tokens_per_s"):
            reduced[name] = max(values)
        elif name.endswith(("_frac", "/bytes")):
            reduced[name] = sum(values) / len(values)
        else:
            reduced[name] = sum(values)
    return reduced


async def _awaited(ref: Any) -> Any:
    return await ref
