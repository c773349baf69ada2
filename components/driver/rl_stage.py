"""A stage of RL, around its training loop: start the parts, serve version 0, evaluate, train, evaluate, save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from ..config import derive
from ..jobs.folder import Meeting, claimed
from ..monitor import build_monitor, read_metrics
from ..monitor.logs import say
from ..runtime.fleet import Duty
from ..runtime.launch import Launcher
from ..runtime.limit import Speeds
from ..tasks.evalsets import build_evalsets
from ..tasks.prompting import Prompter
from ..tasks.queue_tasks import QueueTaskSet
from ..tasks.taskset import build_taskset
from ..weights import CanaryPrompts
from .canary import canary_prompts
from .checkpoints import STATE_DIR, Checkpoints, resume_point, saved_position, saved_version
from .context import StageContext, StageResult, timed
from .control import Control
from .engines_alone import EnginesAlone
from .evaluation import asks_explorers, evaluated_at_start, in_one_line
from .rl_report import LAST_REPORTS_S, Reporter, describe_memory, describe_time_shares
from .rl_run import EvalPoint, RLRun
from .speeds import measure_speeds, save_speeds, saved_speeds
from .turns import Turns

T = TypeVar("T")
SAYINGS_S = 1.0
TrainingLoop = Callable[[RLRun], Awaitable[None]]


class RLStage:
    """One stage. `launcher` holds the parts: the first stage that gets it starts them, and each later one resets them.

    `speeds`: what each side of the run can do alone, if it has been measured already.
    """

    def __init__(self, context: StageContext, launcher: Launcher, *, speeds: Speeds | None = None) -> None:
        config = self._config = context.config
        assert config.model.path is not None
        self._context = context
        self._launcher = launcher
        self._parts = launcher.parts
        self._numbers = derive(config)
        self._prompter = Prompter.of(config.model)
        self._train_tasks = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
        self._generates = context.recipe.generates
        self._evalsets = build_evalsets(config)
        self._total_steps = self._num_steps()
        self._resumed = resume_point(context.dir / "checkpoints", config)
        self._first_step = saved_version(self._resumed) if self._resumed is not None else 0
        self.speeds = speeds
        self.eval_points: Sequence[EvalPoint] = ()

    async def run(self, loop: TrainingLoop) -> StageResult:
        if self._generates:
            return await self._run(loop)
        with claimed(Meeting(self._config.meeting_folder), "explorer.folder"):  # before anything is touched there
            return await self._run(loop)

    async def _run(self, loop: TrainingLoop) -> StageResult:
        started, status = time.monotonic(), "failed"
        monitor = build_monitor(
            self._context.dir,
            self._config.monitor,
            self._config.written(),
            self._total_steps,
            f"{self._config.name} / {self._context.name}",
            resumed_at=self._first_step if self._resumed is not None else None,
        )
        try:
            report = Reporter(
                self._config,
                self._parts,
                monitor,
                first_step=self._first_step,
                warn=lambda text: say(f"{self._context.name}: warning: {text}"),
                on_limit=EnginesAlone(self._parts).step,
            )
            await self._launch()
            checkpoints = self._checkpoints(report)
            run = RLRun(
                self._config,
                self._parts,
                name=self._context.name,
                version=self._first_step,
                total_steps=self._total_steps,
                report=report,
                checkpoints=checkpoints,
                evalsets=self._evalsets,
                ask=None if self._generates else asks_explorers(self._config, self._parts),
            )
            try:
                result = await self._run_launched(run, loop, report, checkpoints, started)
            except asyncio.CancelledError:
                status = "interrupted"
                await asyncio.shield(self._save_interrupted(run, report))
                raise
            status = "done"
            return result
        except asyncio.CancelledError:  # also while it starts
            status = "interrupted"
            raise
        finally:
            monitor.close(status)

    async def _launch(self) -> None:
        """Start everything concurrently; engines take longest."""
        config, launcher = self._config, self._launcher
        canary = canary_prompts(config, self._prompter, self._train_tasks.tasks)
        if self._parts.buffer is not None:
            assert self._resumed is None, "a study's runs all begin at the start"
            await launcher.reset(config, total_steps=self._total_steps, canary=canary)
        else:
            generators = f"{config.rollout.num_generators} generator(s), " if self._generates else ""
            say(f"{self._context.name}: starting {generators}{config.train.num_ranks} trainer rank(s)")
            start = saved_position(self._resumed) if self._resumed else None
            trainers = asyncio.ensure_future(self._timed("trainer ready", self._trainers(canary)))
            await asyncio.gather(  # begun in this order: collectors are given the handles of the first two
                launcher.param_server(),
                launcher.buffer(start=start),
                trainers,
                *([self._timed("generators ready", self._generators(trainers))] if self._generates else []),
            )
            if not self._generates:
                buffer: Any = self._parts.buffer
                self._parts.supervisor.watch("replay", buffer.host.remote())
                self._parts.supervisor.watch("driver", self._say_who_comes())
        self._parts.generators.always(lambda actor: actor.sync_weights_loop.remote())

    async def _trainers(self, canary: CanaryPrompts) -> None:
        await self._launcher.trainers(total_steps=self._total_steps, canary=canary)
        if self._resumed is not None:
            await self._launcher.load_state(self._resumed / STATE_DIR)
        if self._config.cluster.in_turns:
            await self._launcher.offload()

    async def _generators(self, trainers: asyncio.Future[None]) -> None:
        if self._config.cluster.shares_devices:  # engines start where the trainer is, and has left
            await asyncio.wait([trainers])
        await self._launcher.generators()

    async def _say_who_comes(self) -> None:
        """Never returns."""
        folder, wait_s = self._config.meeting_folder, self._config.explorer.wait_s
        say(f"{self._context.name}: explorers are met in {folder} (within {wait_s:g} s, explorer.wait_s)")
        while True:
            for text in await self._wait(self._parts.buffer.sayings.remote(), "replay"):
                say(f"{self._context.name}: {text}")
            await asyncio.sleep(SAYINGS_S)

    def _checkpoints(self, report: Reporter) -> Checkpoints:
        return Checkpoints(
            self._context.dir / "checkpoints",
            config=self._config,
            trainers=self._parts.trainers,
            supervisor=self._parts.supervisor,
            position=lambda version: self._wait(self._parts.buffer.position.remote(version), "replay"),
            # A resumed run calibrates anew: its engines are new, and may be on another machine.
            on_record=lambda: report.served_tolerance,
            resumed=self._resumed,
        )

    async def _run_launched(
        self,
        run: RLRun,
        loop: TrainingLoop,
        report: Reporter,
        checkpoints: Checkpoints,
        started: float,
    ) -> StageResult:
        what = "served and proven" if self._generates else "published"
        await self._timed(f"version {run.version} {what}", run.serve())
        earlier = read_metrics(self._context.dir / "metrics.jsonl")  # of the run's earlier part, if it is resumed
        folder, name = self._config.run_dir.absolute(), self._context.name
        control = Control(self._config, self._parts, folder, stage=name, version=lambda: run.version)
        controlling = self._parts.supervisor.watch("driver", control.run())
        evals = {}
        if self._config.eval.at_start:
            if before := evaluated_at_start(earlier, self._evalsets):
                evals["before"] = before
            elif not run.version:
                evals["before"] = await run.evaluate()
        speeds = self.speeds = await self._speeds(report, run.turns) if self._generates else None
        begun = time.monotonic()
        say(
            f"{self._context.name}: {self._total_steps} steps, lag bound {self._numbers.max_policy_lag}, "
            f"up after {begun - started:.0f} s"
        )
        collecting = self._parts.generators.always(lambda actor: actor.collect.remote(), drains=True)
        control.allow_changes()
        report.begin(speeds)
        await loop(run)
        await run.finish()
        await report.end()
        controlling.cancel()
        if self._generates:
            await self._no_more_groups(collecting)
        rl_s = time.monotonic() - begun + sum(row.get("step/total_s", 0.0) for row in earlier)
        await run.serve()
        if self._config.eval.at_end:
            evals["after"] = await run.evaluate(tell_first=not evals.get("before"))
        if not self._generates:  # with the buffer's end explorers go
            await self._no_more_groups(collecting)
        await report.collect_stats(run.version)
        await run.turns.trainer()
        folder = await checkpoints.at_end()
        self.eval_points = run.eval_points
        summary = report.summary(steps=run.version) | {
            "wall_s": round(time.monotonic() - started, 1),
            "rl_s": round(rl_s, 1),
            "eval": evals,
            "max_policy_lag": self._numbers.max_policy_lag,
            "processes": self._parts.processes,
            "failed_sinks": report.failed_sinks,
            **asdict(report.verdict()),
        }
        report.totals(summary)
        return StageResult(summary=summary, model_path=str(folder) if folder else None, goodbye=goodbye(summary))

    async def _no_more_groups(self, collecting: Duty) -> None:
        await self._wait(self._parts.buffer.close.remote(), "replay")
        await self._wait(collecting.wound_up(), "generators finishing")

    async def _speeds(self, report: Reporter, turns: Turns) -> Speeds:
        """What was measured: by this study's earlier run, by this run's earlier part, or now."""
        if self.speeds is not None:
            return self.speeds
        if self._resumed is not None and (saved := saved_speeds(self._config, self._context.dir)) is not None:
            return saved
        pause_s = (await report.collect_stats()).get("collector/pause_s", 0.0)
        tasks = self._train_tasks.tasks
        measuring = measure_speeds(self._config, self._parts, tasks, turns, weight_sync_s=pause_s)
        speeds = await self._timed("speeds measured", measuring)
        save_speeds(speeds, self._config, self._context.dir)
        return speeds

    async def _save_interrupted(self, run: RLRun, report: Reporter) -> None:
        """Everything that the ranks did is saved and logged."""
        if not self._generates:
            await self._wait(self._parts.buffer.leave.remote(ended=False), "replay")
        last = await run.interrupted()
        if not await report.end_interrupted(last):
            say(f"{self._context.name}: the last steps' metrics were not written within {LAST_REPORTS_S:g} s")

    def _num_steps(self) -> int:
        train = self._config.train
        if train.steps is not None:
            return train.steps
        assert train.epochs is not None
        assert not isinstance(self._train_tasks, QueueTaskSet), "a rule on settings: nobody knows how long it will be"
        groups = round(train.epochs * len(self._train_tasks))
        return -(-groups // self._numbers.fresh_groups_per_batch) * train.updates_per_batch

    async def _timed(self, what: str, work: Awaitable[T]) -> T:
        return await timed(self._context.name, what, work, see=f"{self._context.dir / 'logs'}/")

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._parts.supervisor.wait(call, what=what, timeout_s=self._config.cluster.step_timeout_s)


def goodbye(summary: dict[str, Any]) -> list[str]:
    """The closing lines of an RL run."""
    first, last, evals = summary["reward_first"], summary["reward_last"], summary["eval"]
    lines = [f"reward {first:.3f} -> {last:.3f}" if first is not None and last is not None else "no reward was seen"]
    if evals.get("before") and evals.get("after"):
        lines.append(f"held-out {in_one_line(evals['before'], evals['after'])}")
    lines += describe_time_shares(summary["time_shares"])
    lines += describe_memory(summary["memory_peak_gib"])
    if restarts := summary["restarts"]:
        lines.append(f"{restarts} times a generator died or hung, and was replaced: see the warnings above")
    if (efficiency := summary["efficiency"]) is not None:
        begin, end = summary["efficiency_steps"]
        when = f"step {begin}" if begin == end else f"steps {begin} to {end}"
        lines.append(f"{efficiency:.0%} of the speed limit in {when}")
    return lines
