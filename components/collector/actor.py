"""A collector with its engine as a Ray actor."""

from __future__ import annotations

import functools
import logging
import os
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from .. import spans
from ..config import Config, Derived, derive
from ..config.engines import engine_kind
from ..config.inputs import EvalSampling
from ..config.model_files import model_config, of_the_text
from ..envs.registry import build_environment
from ..failures import PartFailed, Watched, as_text
from ..garbage import settle
from ..group import Group
from ..importing import not_loading
from ..monitor.logs import last_error, log_to_file, tail
from ..tasks.prompting import Prompter
from ..transports.transport import TransportSettings, open_transport
from ..types import Admission, Task, Trajectory
from ..weights import Publication
from .adapter_sync import AdapterSync
from .clock import ActivityClock
from .completion_queue import unless
from .engine import Engine, EngineSettings, SampledTokens, start_engine
from .loop_watch import LoopWatch
from .open_requests import OpenRequests, Piece
from .outbox import Outbox
from .weight_sync import WeightSync

logger = logging.getLogger(__name__)


class CollectorRun:
    """What belongs to one run on an engine, which may outlive it: its transport, its weight sync, its collector."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        settings: EngineSettings,
        *,
        name: str,
        buffer: Any,
        param_server: Any,
        transport: TransportSettings,
    ) -> None:
        """`name`: under which groups are asked for. `buffer` and `param_server` are actor handles (None: the engine
        serves the weights it was started with).
        """
        # Here, because torchrl loads vLLM: seconds of the driver, which needs neither to start an actor of this class,
        # and of a collector whose engine is another.
        with not_loading(*engine_kind(settings.name).without):
            from .collector import Collector

        numbers, rollout = derive(config), config.rollout
        deadline_s, oldest = config.cluster.step_timeout_s, rollout.pull == "oldest"

        async def pull(newer_than: int, timeout_s: float) -> Publication | None:
            return await param_server.pull.remote(newer_than=newer_than, timeout_s=timeout_s, oldest=oldest)

        clock = ActivityClock()
        self.buffer, self._name, self._deadline_s = buffer, name, deadline_s
        self.outbox = Outbox(self._put)
        self.transport = open_transport(transport)
        self.weight_sync = _kind_of_sync(settings, numbers)(
            engine,
            pull,
            self.transport,
            in_flight=config.staleness.in_flight,
            tolerance=numbers.served_tolerance,
            pull_every=rollout.pull_every,
            deadline_s=deadline_s,
            paused=lambda: clock.doing("pause"),
            on_quarantine=lambda error: self.collector.discard(str(error)),
            max_failures=config.param_server.quarantine_pulls,
            verified_version=-1 if settings.initial_version is None else settings.initial_version,
            finish_first=oldest,
            caught_up=engine.progress.caught_up,
            asleep=lambda: clock.doing("asleep"),
        )
        self.collector = Collector(
            engine=engine,
            environment=build_environment(config.env),
            prompter=Prompter.of(config.model, path=settings.model_path),
            weight_sync=self.weight_sync,
            clock=clock,
            admit=self._admit,
            retried=lambda admission: buffer.retried.remote(admission.group_id, admission.attempt),
            give_back=lambda reason: buffer.give_back.remote(name, reason),
            fail=lambda admission, reason: buffer.fail.remote(admission.group_id, reason, admission.attempt),
            rollout=rollout,
            samplings=config.samplings,
            greedy_baseline=config.algorithm.greedy_baseline,
            seed=config.seed,
            seeded=numbers.seeded_requests,
            max_in_flight=numbers.groups_per_generator,
            vocab_size=of_the_text(model_config(Path(settings.model_path))).get("vocab_size"),
        )

    async def _admit(self, limit: int) -> list[Admission]:
        """Takes along what has finished: a call costs either process milliseconds."""
        with self.outbox.taken() as finished:
            if finished:
                spans.instant("put", groups=[group.group_id for group in finished])
            return await self.buffer.admit.remote(
                limit, timeout_s=self._deadline_s, collector=self._name, finished=finished
            )

    async def _put(self, finished: list[Group]) -> None:
        with spans.span("put", groups=[group.group_id for group in finished]):
            await self.buffer.put.remote(finished)

    async def close(self) -> None:
        """Waits until nothing of this run touches the engine."""
        self.weight_sync.close()
        await self.weight_sync.ended()
        self.transport.close()


def _kind_of_sync(settings: EngineSettings, numbers: Derived) -> Callable[..., WeightSync]:
    if settings.lora is None:
        return WeightSync
    return functools.partial(AdapterSync, max_versions=numbers.adapter_versions)


class CollectorActor(Watched):
    """A process for one engine, and for one run after the other on it.

    After `start`, `sync_weights_loop` and `collect` run until admission ends or a part fails.
    """

    def __init__(
        self, engine: EngineSettings, *, role: str, log_file: Path, log_level: str, gpus: Sequence[str] = ()
    ) -> None:
        """`gpus`: those of the trainer's ranks that it shares (empty: those that Ray gave it)."""
        if gpus:  # before anything looks for them
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.role = role
        self._log_file = log_file
        # Of this process alone: what is started in its place, perhaps elsewhere, asks for groups under another name.
        self._name = f"{role}/{secrets.token_hex(4)}"
        self._settings = engine
        self._engine: Engine | None = None
        self._current: CollectorRun | None = None
        log_to_file(log_file, log_level)

    @property
    def _run(self) -> CollectorRun:
        assert self._current is not None, "start() comes first"
        return self._current

    def _own_settings(self) -> EngineSettings:
        """With a seed of its own: the same numbers, pass for pass, would make the groups of two engines alike, and
        those of a successor like its predecessor's.
        """
        seed = random.Random(f"{self._settings.seed}/{self._name}").getrandbits(31)
        return replace(self._settings, seed=seed)

    @as_text
    async def start(self, config: Config, **others: Any) -> dict[str, Any]:
        """Start the engine, and its first run; `others`: see `CollectorRun`."""
        try:
            self._engine = engine = await start_engine(self._own_settings())
        except Exception as error:
            # vLLM says "see root cause above", which is in the log of this process.
            cause = last_error(self._log_file, but="Engine core initialization failed") or error
            raise PartFailed(self.role, f"the engine did not start: {cause}", tail(self._log_file)) from None
        self._current = CollectorRun(config, engine, self._settings, name=self._name, **others)
        self._requests = OpenRequests(engine)
        self._quarantines_before: dict[str, int] = {}  # by open request
        settle()
        LoopWatch()
        logger.info("the engine is ready, in process %s", ", ".join(map(str, engine.process_ids() or [os.getpid()])))
        return {
            "name": self._name,
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),
            "engine_pids": engine.process_ids(),
        }

    @as_text
    async def reset(self, config: Config, **others: Any) -> None:
        """Another run on the same engine, which serves nothing before it has pulled that run's weights.

        The last run's `collect` must have returned; its weight sync ends here.
        """
        assert self._engine is not None, "start() comes first"
        await self._run.close()
        self._current = CollectorRun(config, self._engine, self._settings, name=self._name, **others)

    @as_text
    async def sync_weights_loop(self) -> None:
        """Ends with the run, or by failing. An engine that hangs is found out here, if not before: while it is asked
        for anything at all, a load or a canary included.
        """
        await unless(self._run.collector.watch_engine(), self._run.weight_sync.run())

    @as_text
    async def watch_engine(self) -> None:
        """Fails when the engine has work and gives no sign of life; for an engine that syncs no weights."""
        await self._run.collector.watch_engine()

    @as_text
    async def sample(self, name: str, prompt_tokens: list[int], **sampling: Any) -> list[SampledTokens] | None:
        """See `OpenRequests.sample`. Begun when a version is verified, answered when every version in it is.

        What was sampled before a load that went wrong came to light is sampled again: the same version may be proven
        later, by another load. None where somebody has heard of it on the way: it has to be asked for again.
        """
        sync = self._run.weight_sync
        try:
            while True:
                await sync.until_verified(0)
                self._quarantines_before[name] = quarantines = sync.num_quarantines
                async with sync.one_version() as version:
                    under: dict[str, Any] = {} if version is None else {"version": version}
                    sampled = await self._requests.sample(name, prompt_tokens, **sampling, **under)
                if sampled:
                    await sync.until_verified(max(v for s in sampled for v in s.policy_versions))
                if not sampled or sync.num_quarantines == quarantines:
                    return sampled
                if sampling["listens"] or name not in self._quarantines_before:  # ended meanwhile: nobody waits for it
                    return None
        finally:
            self._quarantines_before.pop(name, None)

    @as_text
    async def heard(self, name: str, within_s: float) -> list[Piece]:
        """See `OpenRequests.heard`. Told when every version in it is verified; a request under weights that were
        refused ends, and nothing more is heard of it.
        """
        sync, quarantines = self._run.weight_sync, self._quarantines_before.get(name)  # it may have ended below
        pieces = await self._requests.heard(name, within_s=within_s)
        if pieces:
            await sync.until_verified(max(version for *_, version in pieces))
            if sync.num_quarantines != quarantines:
                self._requests.end(name)
                return []
        return pieces

    async def end(self, name: str) -> None:
        self._quarantines_before.pop(name, None)
        self._requests.end(name)

    @as_text
    async def sleep(self) -> int:
        """See `WeightSync.sleep`."""
        return await self._run.weight_sync.sleep()

    async def wake(self) -> None:
        self._run.weight_sync.wake()

    @as_text
    async def collect(self) -> None:
        """Collect until admission ends. Waits for slots. Finished groups go to the replay buffer while others begin, so
        that an engine with room does not stand idle.
        """
        outbox = self._run.outbox

        async def collecting() -> None:
            async for finished in self._run.collector.groups():
                outbox.add(finished, are_last=not self._run.collector.num_in_flight)
            await outbox.emptied()

        await unless(outbox.run(), collecting())

    @as_text
    async def until_verified(self, policy_version: int) -> None:
        await self._run.weight_sync.until_verified(policy_version)

    @as_text
    async def evaluate(
        self, tasks: list[Task], sampling: EvalSampling, policy_version: int
    ) -> list[list[Trajectory] | str]:
        return await self._run.collector.evaluate(tasks, sampling, policy_version=policy_version)

    async def stop_evaluating(self) -> None:
        self._run.collector.stop_evaluating()

    async def num_evaluated(self) -> int:
        return self._run.collector.num_evaluated()

    @as_text
    async def rollouts(
        self,
        tasks: list[Task],
        temperature: float,
        group_size: int,
        call_limit: int | None = None,
        all_may_fail: bool = False,
    ) -> list[Trajectory]:
        return await self._run.collector.rollouts(
            tasks,
            temperature=temperature,
            group_size=group_size,
            call_limit=call_limit,
            all_may_fail=all_may_fail,
        )

    async def state(self) -> dict[str, int]:
        """What it is doing now: the version that is verified, and the groups in flight."""
        return {"policy_version": self._run.weight_sync.verified_version, "groups": self._run.collector.num_in_flight}

    async def forget_prompts(self) -> None:
        """An engine that keeps prompts for later requests forgets them, as it does when weights are loaded."""
        assert self._engine is not None, "start() comes first"
        if (forget := getattr(self._engine, "forget_prompts", None)) is not None and not await forget():
            logger.warning("the engine kept its prompts: what is measured now may be faster than a run can be")

    async def generating_s(self) -> float:
        return self._run.collector.generating_s()

    async def stats(self) -> dict[str, float]:
        return self._run.collector.stats()

    async def shutdown(self) -> None:
        self._run.collector.shutdown()


# Ray's overloads do not name max_concurrency.
CollectorRemote = ray.remote(num_cpus=0, max_concurrency=1000)(CollectorActor)  # type: ignore[call-overload]
