"""The generating half of a run as a job of its own: engines and environments for a train job elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..config import Config
from ..config.errors import ConfigError
from ..config.inputs import EvalSampling
from ..failures import PartFailed, Refused
from ..jobs.fit import check_fit
from ..jobs.folder import UP, Meeting, read_json
from ..monitor import Monitor, build_monitor
from ..monitor.logs import say
from ..monitor.metrics import reduced
from ..runtime.fleet import first_of
from ..runtime.launch import Launcher, Parts
from ..runtime.supervisor import Supervisor, together
from ..types import Evaluated, Task
from .context import StageContext, StageResult, timed
from .control import Control
from .evaluation import PROGRESS_S, evaluated_of, num_evaluated, shared_out

LOOK_S = 1.0
STATS_EVERY_S = 15.0


Work = Callable[[Config, Parts], Awaitable[None]]
"""What an explorer does with engines that have joined, until the train job has ended or they must start again."""


async def collect(config: Config, parts: Parts) -> None:
    """Groups of the train job's tasks, or of its own."""
    collecting = parts.generators.always(lambda actor: actor.collect.remote(), drains=True)
    await first_of(collecting.ended(), parts.buffer.until_over.remote())
    await collecting.wound_up()


class ExploreStage:
    """One explorer. It waits for the train job, works for it until that has done all of its steps, and then ends.

    `clients`: it works on no tasks, see `TrainLink`.
    """

    def __init__(self, context: StageContext, work: Work = collect, *, clients: bool = False) -> None:
        self._context = context
        self._work = work
        self._clients = clients
        self._config = context.config
        self._name = context.name
        self._meeting = Meeting(self._config.meeting_folder)
        self._processes: dict[str, Any] = {}
        self._num_groups = self._num_starts = self.version = 0

    async def run(self) -> StageResult:
        started, status = time.monotonic(), "failed"
        train = await self._train_job()
        config = self._fitting(train)
        label = f"{config.name} / {config.explorer.name}"
        monitor = build_monitor(self._context.dir, config.monitor, config.written(), None, label)
        try:
            while not await self._serve(config, monitor):
                say(f"{self._name}: the train job continues from an earlier version: the engines start again")
            status = "done"
        except asyncio.CancelledError:
            status = "interrupted"
            raise
        finally:
            monitor.close(status)
        summary = {
            "explorer": config.explorer.name,
            "groups": self._num_groups,
            "policy_version": self.version,
            "engine_starts": self._num_starts,
            "wall_s": round(time.monotonic() - started, 1),
            "processes": self._processes,
        }
        return StageResult(summary=summary, model_path=None, goodbye=[f"{self._num_groups} groups were finished here"])

    async def _train_job(self) -> dict[str, Any]:
        """What the train job says of itself, once it gives signs of life."""
        wait_s, since = self._config.explorer.wait_s, time.monotonic()
        before: dict[str, Any] | None = None
        while True:
            train = await asyncio.to_thread(read_json, self._meeting.train)
            if train is not None and train.get("state") == UP and before is not None and train != before:
                return train
            waited_s = time.monotonic() - since
            if 2 * LOOK_S < waited_s <= 3 * LOOK_S:
                where = f"{self._meeting.folder} (within {wait_s:g} s, explorer.wait_s)"
                say(f"{self._name}: waits for a train job at {where}")
            if waited_s > wait_s:
                raise Refused(
                    f"explorer.wait_s: got {wait_s:g}, within which no train job came to {self._meeting.folder}; start "
                    "`leeway run train` with the same output_dir, project and name, or the same explorer.folder"
                )
            before = train
            await asyncio.sleep(LOOK_S)

    def _fitting(self, train: dict[str, Any]) -> Config:
        try:
            check_fit(self._config, train["must_be_equal"])
        except ConfigError as error:
            raise Refused(str(error)) from None
        return self._config.with_model_path(train["model"] or self._meeting.model)

    async def _refuse_a_namesake(self) -> None:
        files = self._meeting.explorer(self._config.explorer.name)
        first = await asyncio.to_thread(read_json, files.about)
        if first is None or first.get("state") != UP:
            return
        await asyncio.sleep(3 * LOOK_S)
        now = await asyncio.to_thread(read_json, files.about) or {}
        if now.get("beat") != first.get("beat"):
            raise Refused(
                f"explorer.name: got {files.name}, which explores already (process {now.get('pid')} on "
                f"{now.get('host')}); set explorer.name=..."
            )

    async def _serve(self, config: Config, monitor: Monitor) -> bool:
        """Engines and collectors until the train job has ended (True), or continues from weights older than theirs."""
        await self._refuse_a_namesake()
        launcher = Launcher(
            config, self._context.recipe, run_dir=self._context.dir, supervisor=Supervisor(self._context.watch)
        )
        parts = launcher.parts
        self._num_starts += 1
        try:
            await launcher.link(clients=self._clients)
            link = parts.buffer
            parts.supervisor.watch("train_link", link.serve.remote())
            say(f"{self._name}: starting {config.rollout.num_generators} generator(s)")
            await timed(self._name, "generators ready", launcher.generators(), see=f"{self._context.dir / 'logs'}/")
            parts.generators.always(lambda actor: actor.sync_weights_loop.remote())
            control = Control(config, parts, config.run_dir.absolute(), stage=self._name, version=lambda: self.version)
            control.allow_changes()
            controlling = parts.supervisor.watch("driver", control.run())
            evaluating = parts.supervisor.watch("driver", self._evaluate(parts))
            ended = asyncio.ensure_future(self._work(config, parts))
            try:
                await self._watch_until(ended, parts, monitor)
            except asyncio.CancelledError:
                await asyncio.shield(self._leave(parts))
                raise
            finally:
                ended.cancel()
                controlling.cancel()
                evaluating.cancel()
            state = await self._wait(parts, link.state.remote())
            self._say(state["said"])
            self._num_groups += state["given"]
            await self._leave(parts)
            return not state["must_start_again"]
        finally:
            self._processes = parts.processes
            await parts.stop()

    async def _watch_until(self, ended: asyncio.Future[None], parts: Parts, monitor: Monitor) -> None:
        next_stats = time.monotonic() + STATS_EVERY_S
        while not ended.done():
            await self._wait(parts, asyncio.wait({ended}, timeout=LOOK_S))
            state = await self._wait(parts, parts.buffer.state.remote())
            self._say(state["said"])
            self.version = max(self.version, state["policy_version"])
            if time.monotonic() >= next_stats or ended.done():
                next_stats = time.monotonic() + STATS_EVERY_S
                await self._log(parts, monitor)
        ended.result()

    async def _evaluate(self, parts: Parts) -> None:
        """Held-out tasks for the train job, under the version that it names, beside the groups."""
        while (asked := await parts.buffer.evaluation.remote()) is not None:
            session, number, version = asked["session"], asked["number"], asked["policy_version"]
            tasks = {index: Task(**task) for index, task in asked["tasks"].items()}
            pending = asyncio.ensure_future(
                shared_out(parts, [*tasks.values()], EvalSampling.model_validate(asked["sampling"]), version)
            )
            try:
                num_ended: list[int | None] = []
                while not (await asyncio.wait({pending}, timeout=PROGRESS_S))[0]:
                    before, num_ended = num_ended, await num_evaluated(parts)
                    if not await parts.buffer.evaluating.remote(session, num_ended != before):
                        # The engines are to load what the train job's new life publishes.
                        stopping = (g.call_now(lambda actor: actor.stop_evaluating.remote()) for g in parts.generators)
                        await together(stopping)
                        say(f"{self._name}: the train job was started again: its held-out tasks are answered no more")
                answers, why = evaluated_of(pending.result()), ""
            except PartFailed as error:  # others are asked; an engine that is lost ends its explorer elsewhere
                answers, why = [], str(error)
                say(f"{self._name}: warning: held-out tasks were not answered: {why}")
            finally:
                pending.cancel()
            by_index = dict(zip(tasks, map(_as_json, answers), strict=False))
            await parts.buffer.evaluated.remote(session, number, by_index, why)

    async def _log(self, parts: Parts, monitor: Monitor) -> None:
        stats = reduced(await self._of_all(parts, lambda actor: actor.stats.remote()))
        self._num_groups += int(stats.get("collector/groups_finished", 0))
        monitor.log(self.version, stats, role="collector")

    async def _of_all(self, parts: Parts, ask: Any) -> list[Any]:
        answers = await self._wait(parts, together(g.call_now(ask) for g in parts.generators))
        return [answer for answer in answers if answer is not None]

    async def _leave(self, parts: Parts) -> None:
        """The train job need not find out by itself."""
        await self._wait(parts, parts.buffer.leave.remote())

    def _say(self, said: list[str]) -> None:
        for text in said:
            say(f"{self._name}: {text}")

    async def _wait(self, parts: Parts, call: Any) -> Any:
        return await parts.supervisor.wait(call, what="train_link", timeout_s=self._config.cluster.step_timeout_s)


def _as_json(answers: list[Evaluated] | str) -> Any:
    """See `Evaluations.answer`."""
    return answers if isinstance(answers, str) else [[a.reward, a.num_tokens, a.metrics] for a in answers]
