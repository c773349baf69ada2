"""A collector with its engine as a Ray actor."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from ..config import Config
from ..config.engines import engine_kind
from ..config.inputs import EvalSampling
from ..envs.registry import build_environment
from ..failures import PartFailed, Watched, as_text
from ..monitor.logs import last_error, log_to_file, tail
from ..tasks.prompting import Prompter
from ..transports.transport import TransportSettings, open_transport
from ..types import Task, Trajectory
from ..weights import Publication
from .clock import ActivityClock
from .completion_queue import unless
from .engine import Engine, EngineSettings, start_engine
from .loop_watch import LoopWatch
from .settings import CollectorSettings
from .weight_sync import WeightSync


class CollectorActor(Watched):
    """Runs one engine. After `start`, `sync_weights_loop` and `collect` run until admission ends or a part fails."""

    def __init__(self, *, role: str, log_file: Path, log_level: str) -> None:
        self.role = role
        self._log_file = log_file
        log_to_file(log_file, log_level)

    @as_text
    async def start(
        self,
        config: Config,
        engine: EngineSettings,
        settings: CollectorSettings,
        tolerance: float,
        buffer: Any,
        param_server: Any,
        transport: TransportSettings,
    ) -> dict[str, Any]:
        """`buffer` and `param_server` are actor handles (None: this engine serves the weights it was started with)."""
        try:
            self._engine: Engine = await start_engine(engine)
        except Exception as error:
            # vLLM says "see root cause above", which is in the log of this process.
            cause = last_error(self._log_file, but="Engine core initialization failed") or error
            raise PartFailed(self.role, f"the engine did not start: {cause}", tail(self._log_file)) from None
        self._own_weights, self._model_path = engine.load_weights, engine.model_path
        self._unwanted = engine_kind(engine.name).without
        # Of this process: what is started in its place asks for groups under another name.
        self._name = f"{self.role}/{os.getpid()}"
        self._transport = open_transport(transport)
        self._begin(config, settings, tolerance, buffer, param_server)
        # What the engine and torch have loaded stays: each collection would walk it, a fifth of this process's time.
        gc.collect()
        gc.freeze()
        LoopWatch()
        return {
            "name": self._name,
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),
            "engine_pids": self._engine.process_ids(),
            "compute_threads": self._engine.compute_threads(),
        }

    @as_text
    async def begin(
        self,
        config: Config,
        settings: CollectorSettings,
        tolerance: float,
        buffer: Any,
        param_server: Any,
        transport: TransportSettings,
    ) -> None:
        """Another run on the same engine, which serves nothing before it has pulled that run's weights.

        The last run's `collect` must have returned; its weight sync ends here.
        """
        self._weight_sync.close()
        self._transport.close()
        self._transport = open_transport(transport)
        self._begin(config, settings, tolerance, buffer, param_server)

    def _begin(
        self, config: Config, settings: CollectorSettings, tolerance: float, buffer: Any, param_server: Any
    ) -> None:
        # Here, because torchrl loads vLLM: seconds of the driver, which needs neither to start an actor of this class,
        # and of a collector whose engine is another.
        with not_loading(*self._unwanted):
            from .collector import Collector

        deadline_s, oldest = config.cluster.step_timeout_s, config.rollout.pull == "oldest"

        async def pull(newer_than: int, timeout_s: float) -> Publication | None:
            return await param_server.pull.remote(newer_than=newer_than, timeout_s=timeout_s, oldest=oldest)

        clock = ActivityClock()
        self._weight_sync = WeightSync(
            self._engine,
            pull,
            self._transport.fetch,
            in_flight=config.staleness.in_flight,
            tolerance=tolerance,
            pull_every=config.rollout.pull_every * config.param_server.publish_every,  # in optimizer steps
            deadline_s=deadline_s,
            paused=lambda: clock.doing("pause"),
            on_quarantine=lambda error: self._collector.discard(str(error)),
            max_failures=config.param_server.quarantine_pulls,
            verified_version=0 if self._own_weights else -1,
            finish_first=oldest,
            caught_up=self._engine.progress.caught_up,
        )
        self._buffer = buffer
        self._collector = Collector(
            engine=self._engine,
            environment=build_environment(config.env),
            prompter=Prompter.load(self._model_path),
            weight_sync=self._weight_sync,
            clock=clock,
            admit=lambda limit: buffer.admit.remote(limit, timeout_s=deadline_s, collector=self._name),
            retried=lambda admission: buffer.retried.remote(admission.group_id, admission.attempt),
            give_back=lambda reason: buffer.give_back.remote(self._name, reason),
            fail=lambda admission, reason: buffer.fail.remote(admission.group_id, reason, admission.attempt),
            settings=settings,
        )

    @as_text
    async def sync_weights_loop(self) -> None:
        """Ends with the run, or by failing. An engine that hangs is found out here, if not before: while it is asked
        for anything at all, a load or a canary included.
        """
        await unless(self._collector.watch_engine(), self._weight_sync.run())

    @as_text
    async def collect(self) -> None:
        """Collect until admission ends. Waits for slots; every finished batch goes to the replay buffer."""
        async for finished in self._collector.groups():
            await self._buffer.put.remote(finished)

    @as_text
    async def until_verified(self, policy_version: int) -> None:
        await self._weight_sync.until_verified(policy_version)

    @as_text
    async def evaluate(
        self, tasks: list[Task], sampling: EvalSampling, policy_version: int
    ) -> list[list[Trajectory] | str]:
        return await self._collector.evaluate(tasks, sampling, policy_version=policy_version)

    async def num_evaluated(self) -> int:
        return self._collector.num_evaluated()

    @as_text
    async def rollouts(
        self,
        tasks: list[Task],
        temperature: float,
        group_size: int,
        max_response_tokens: int | None = None,
        all_may_fail: bool = False,
    ) -> list[Trajectory]:
        return await self._collector.rollouts(
            tasks,
            temperature=temperature,
            group_size=group_size,
            max_response_tokens=max_response_tokens,
            all_may_fail=all_may_fail,
        )

    async def generating_s(self) -> float:
        return self._collector.generating_s()

    async def stats(self) -> dict[str, float]:
        return self._collector.stats()

    async def shutdown(self) -> None:
        self._collector.shutdown()


@contextmanager
def not_loading(*packages: str) -> Iterator[None]:
    """Within this context, the import system takes `packages` for absent, unless they are loaded already."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is its own sign for that
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# Ray's overloads do not name max_concurrency.
CollectorRemote = ray.remote(num_cpus=0, max_concurrency=1000)(CollectorActor)  # type: ignore[call-overload]
