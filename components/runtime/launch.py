"""Starts the parts of a run as Ray actors, with everything they need as data."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import spans
from ..auxiliary.actor import AuxiliaryRemote
from ..collector.actor import CollectorRemote
from ..collector.engine import EngineSettings
from ..config import Config, Recipe, derive
from ..config.inputs import AuxiliaryModel
from ..config.objective import objective_of
from ..config.sampling import kept_width
from ..config.transports import transport_options
from ..failures import Kind, PartFailed, machine
from ..jobs.actor import TrainLinkRemote
from ..jobs.folder import Meeting
from ..monitor.logs import say
from ..param_server.actor import ParameterServerRemote
from ..replay.actor import ReplayBufferRemote
from ..trainer.actor import TrainerRank
from ..trainer.settings import TrainerSettings
from ..transports.transport import TransportSettings
from ..weights import CanaryPrompts
from .fleet import Fleet
from .generators import Generator, Made, Restarts
from .hosts import Cluster
from .placement import OwnMachine, Place, Places
from .supervisor import Instead, Supervisor, as_coroutine, together

KEPT_GROUPS = "groups"
LAST_SPANS_S = 1.0
"""How long the parts have at the end to write their last spans. One that hangs has written all but those."""
CLOCK_LOOKS = 3
OTHER_CALLS = 1000
WAITING_CALLS = 8
"""Of one collector, at most: one waits for slots; a few for weights, of which it has left all but one."""


@dataclass
class Parts:
    """The running parts of one recipe. `processes` lists process ids by role; `watch` notices when any of them dies."""

    supervisor: Supervisor
    generators: Fleet
    restarts: Restarts
    places: Places
    trainers: list[Any] = field(default_factory=list)
    auxiliaries: list[Any] = field(default_factory=list)
    buffer: Any = None
    param_server: Any = None
    processes: dict[str, Any] = field(default_factory=dict)

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """End every part on purpose: engines are asked to stop first, then all actors are killed.

        Each of the two has `grace_s`. Processes that remain are killed at the end of the run: see `runtime.footprint`.
        """
        self.supervisor.forget_all()
        spans.close_writer()
        serving = [*self.generators.actors(), *self.auxiliaries]
        actors = [a for a in (*serving, *self.trainers, self.buffer, self.param_server) if a is not None]
        calls = [asyncio.ensure_future(as_coroutine(actor.shutdown.remote())) for actor in serving]
        closing = [asyncio.ensure_future(as_coroutine(actor.close_spans.remote())) for actor in actors]
        if calls:
            await asyncio.wait(calls, timeout=grace_s)
        if closing:
            await asyncio.wait(closing, timeout=min(grace_s, LAST_SPANS_S))
        for call in [*calls, *closing]:
            # An engine that is already dead cannot answer; all that is left is to kill its actor below.
            if not call.cancel() and not call.cancelled():
                call.exception()  # retrieved, so that asyncio does not warn about it
        # In a thread with a limited wait: killing asks Ray, which may itself not answer.
        thread = threading.Thread(target=_kill, args=(actors,), daemon=True)
        thread.start()
        deadline = time.monotonic() + grace_s
        while thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.places.close(grace_s)


async def _clock_offset(actor: Any) -> tuple[float, float]:
    """(Seconds that the answer took, by how much the actor's clock is ahead of this one)."""
    begun, asked = time.monotonic(), time.time()
    its = await actor.clock.remote()
    took_s = time.monotonic() - begun
    return took_s, its - (asked + took_s / 2)


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def trainer_settings(
    config: Config, recipe: Recipe, *, total_steps: int, canary: CanaryPrompts, cores: list[int]
) -> TrainerSettings:
    return TrainerSettings(
        model=config.model,
        optimizer=config.optimizer,
        train=config.train,
        checkpoint=config.checkpoint,
        param_server=config.param_server,
        cluster=config.cluster,
        critic=config.critic if derive(config, recipe).has_critic else None,
        objective=objective_of(config, recipe),
        canary=canary,
        total_steps=total_steps,
        max_policy_lag=None if recipe.is_offline else config.staleness.max_policy_lag,
        max_length=config.rollout.max_model_len,
        reference_path=config.algorithm.reference_path,
        num_threads=len(cores),
        seed=config.seed,
    )


def engine_settings(config: Config, *, cores: list[int], initial_version: int | None) -> EngineSettings:
    assert config.model.path is not None
    return EngineSettings(
        name=config.rollout.engine_name,
        model_path=config.model.path,
        dtype=config.model.dtype,
        head_dtype=config.model.head_dtype,
        device=config.cluster.device,
        max_model_len=config.rollout.max_model_len,
        seed=config.seed,
        options=config.rollout.engine_options.model_dump(),
        cores=cores,
        kv_cache_gib=config.cluster.kv_cache_gib,
        initial_version=initial_version,
        # With in_flight=off a run's own requests have no seeds, but whoever asks its served model may send one.
        seeded=derive(config).seeded_requests or evaluation_is_seeded(config) or config.staleness.in_flight == "off",
        num_kept=kept_width(config.rollout.top_k or 0),
        read_back=config.param_server.read_back,
        sleep_level=config.rollout.sleep_level if config.cluster.in_turns else None,
        lora=config.model.lora if initial_version is None else None,  # else there is no trainer
        num_versions=derive(config).adapter_versions,
    )


def calls_at_once(config: Config) -> int:
    """How many calls a part must hold if collectors wait at it: the calls that end their waits need room too."""
    return OTHER_CALLS + WAITING_CALLS * config.rollout.num_generators


def transport_settings(config: Config, run_dir: Path) -> TransportSettings:
    """For this process; a trainer's rank is elsewhere, and puts its own host in."""
    p, numbers = config.param_server, derive(config)
    audited = numbers.max_policy_lag + numbers.publish_every + 1 if config.train.audit_every else 1
    options = dict(transport_options(config))
    if config.elsewhere is not None:
        options = {**options, "folder": str(Meeting(config.meeting_folder).weights)}
    return TransportSettings(
        name=p.transport,
        folder=run_dir,
        keep=max(numbers.versions_kept, audited),
        options=options,
        delta=p.delta,
        timeout_s=config.cluster.step_timeout_s,
        host=ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1",
        device=config.cluster.device,
    )


def evaluation_is_seeded(config: Config) -> bool:
    """Whether held-out tasks are sampled, not answered greedily: then each of their requests has a seed."""
    return any(config.eval.sampling(name).temperature > 0 for name in (None, *config.eval.tasksets))


class Launcher:
    """Starts parts in sequence or concurrently; every start has the deadline `cluster.start_timeout_s`."""

    def __init__(self, config: Config, recipe: Recipe, *, run_dir: Path, supervisor: Supervisor) -> None:
        self._config = config
        self._recipe = recipe
        self._run_dir = run_dir.absolute()
        self._spans = self._run_dir / "spans" if config.log.spans else None
        if self._spans is not None:
            spans.open_writer(self._spans / "driver.jsonl", part="driver")
        self._transport = transport_settings(config, self._run_dir)
        self._addresses: dict[str, str] = {}
        cluster = config.cluster
        self._places: Places
        if cluster.address is None:
            self._places = OwnMachine(config, recipe, self._run_dir)
        else:
            watching: Any = {"silent": self._machine_is_silent, "watch": supervisor.watch}
            self._places = Cluster(config, recipe, run_dir=self._run_dir, **watching)
        self._ranks: list[Place] = []
        self._ranks_are_placed = asyncio.Event()
        self._ranks_are_placed.set()
        self._folders: dict[str, Path] = {}
        self._machines: dict[str, str] = {}
        self._instead: dict[str, Instead] = {}
        self._initial_version: int | None = None
        self._options: list[tuple[dict[str, Any], list[str]]] = []
        fleet = Fleet(
            self._generator,
            start=lambda generator: self._wait(generator.start(), generator.role),
            retire=self._retire_generator,
            supervisor=supervisor,
        )
        self.parts = Parts(
            supervisor,
            fleet,
            Restarts(
                allowed=0 if cluster.in_turns else cluster.restarts,
                backoff_s=cluster.restart_backoff_s,
                start_timeout_s=cluster.start_timeout_s,
                tell=say,
                lost=self._lost_generator,
            ),
            self._places,
        )

    async def reset(self, config: Config, *, total_steps: int, canary: CanaryPrompts) -> None:
        """Prepare the running parts for another run of async_rl: the same number of parts, on the same cores."""
        self._config = config = self._with_addresses(config)
        self._transport = transport_settings(config, self._run_dir)
        parts = self.parts
        await self._wait(parts.generators.finish(), "generators")  # while the last run's weights can be pulled
        await self._wait(
            together(
                [parts.param_server.reset.remote(derive(config).versions_kept), parts.buffer.reset.remote(config)]
            ),
            "replay",
        )
        trainers = [
            actor.reset.remote(await self._trainer_settings(place, total_steps, canary), self._transport)
            for actor, place in zip(parts.trainers, self._ranks, strict=True)
        ]
        generators = [g.call(lambda a: a.reset.remote(config, **self._for_collectors())) for g in parts.generators]
        await self._wait(together(trainers), "trainer")
        await self._wait(together(generators), "generators")

    async def trainers(self, *, total_steps: int, canary: CanaryPrompts) -> None:
        ranks = range(self._config.train.num_ranks)
        self._ranks_are_placed.clear()
        self._ranks = await self._wait(together([self._places.trainer(rank) for rank in ranks]), "trainer")
        self._ranks_are_placed.set()
        self.parts.trainers = [
            TrainerRank.options(**place.options).remote(**self._common(f"trainer-{rank}", place), cores=place.cores)
            for rank, place in enumerate(self._ranks)
        ]
        await self._meet({f"trainer-{rank}": actor for rank, actor in enumerate(self.parts.trainers)})
        address = await self._wait(self.parts.trainers[0].address.remote(), "trainer-0")
        starts = [
            actor.start.remote(
                await self._trainer_settings(self._ranks[rank], total_steps, canary), rank, address, self._transport
            )
            for rank, actor in enumerate(self.parts.trainers)
        ]
        # Awaited together, to report the rank that fails, not the one that waits for it.
        processes = await asyncio.gather(*(self._wait(s, f"trainer-{rank}") for rank, s in enumerate(starts)))
        for rank, process in enumerate(processes):
            self._started(f"trainer-{rank}", self.parts.trainers[rank], process)

    async def _trainer_settings(self, place: Place, total_steps: int, canary: CanaryPrompts) -> TrainerSettings:
        config = await self._wait(place.localize(self._config), "trainer")
        return trainer_settings(config, self._recipe, total_steps=total_steps, canary=canary, cores=place.cores)

    async def load_state(self, directory: Path) -> int:
        """All ranks resume from a checkpoint; returns its policy version."""
        calls = [self._wait(t.load_state.remote(str(directory)), "trainer") for t in self.parts.trainers]
        return (await asyncio.gather(*calls))[0]

    async def buffer(self, *, start: dict[str, Any] | None = None) -> None:
        """`start`: the position in the data of the run to resume.

        It reads the tasks, so it runs on the driver's machine, where their files were checked.
        """
        actor, log_file = ReplayBufferRemote.options(**self._beside_driver()), self._common("replay")["log_file"]
        meets = self._config.elsewhere == "generators"
        kept = self._run_dir / KEPT_GROUPS if self._config.replay.keep_groups and not meets else None
        self.parts.buffer = actor.remote(
            self._config, role="replay", log_file=log_file, start=start, meets=meets, kept=kept
        )
        await self._meet({"replay": self.parts.buffer})
        process = await self._wait(self.parts.buffer.start.remote(), "replay")
        self._started("replay", self.parts.buffer, process)
        self._places.keep_off_engines(process)

    async def param_server(self) -> None:
        """On the driver's machine too: the run ends with either of them."""
        self.parts.param_server = ParameterServerRemote.options(**self._beside_driver()).remote(
            keep=derive(self._config).versions_kept, **self._common("param_server")
        )
        await self._meet({"param_server": self.parts.param_server})
        process = await self._wait(self.parts.param_server.start.remote(), "param_server")
        self._started("param_server", self.parts.param_server, process)
        self._places.keep_off_engines(process)

    def _beside_driver(self) -> dict[str, Any]:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {"max_concurrency": calls_at_once(self._config), "scheduling_strategy": here}

    async def link(self, *, clients: bool = False) -> None:
        """Buffer and parameter server are another job's: here is what stands for both. `clients`: see `TrainLink`."""
        own = {**self._common("train_link"), "clients": clients}
        actor = TrainLinkRemote.options(**self._beside_driver()).remote(self._config, **own)
        self.parts.buffer = self.parts.param_server = actor
        await self._meet({"train_link": actor})
        process = await self._wait(actor.start.remote(), "train_link")
        self._started("train_link", actor, process)
        self._places.keep_off_engines(process)

    async def generators(self, *, initial_version: int | None = None) -> None:
        """Start the engines concurrently, once ranks that are being started have their places: those choose first.

        `initial_version`: serve the model's own weights, which have this version, without a parameter server.
        """
        await self._wait(self._ranks_are_placed.wait(), "trainer")
        await self._auxiliaries()
        self._initial_version = initial_version
        self._options = await self._engine_places()
        await self.parts.generators.begin(len(self._options))

    def _generator(self, index: int) -> Generator:
        parts = self.parts
        launch = functools.partial(self._launch_generator, index)
        return Generator(f"generator-{index}", launch, supervisor=parts.supervisor, restarts=parts.restarts)

    async def _launch_generator(
        self, index: int, placed: Callable[[], None], made: Made, instead: Instead | None
    ) -> str:
        """See `generators.Launch`. The deadline is the caller's."""
        role, (options, gpus) = f"generator-{index}", self._options[index % len(self._options)]
        place = await self._places.generator(index, options)
        placed()
        pids: list[int] = []
        try:
            config = await place.localize(self._config)
            settings = engine_settings(config, cores=place.cores, initial_version=self._initial_version)
            actor = CollectorRemote.options(**place.options).remote(settings, gpus=gpus, **self._common(role, place))
        except BaseException:
            place.leave(())
            raise
        made(actor, lambda: place.leave(pids))
        where = await actor.answer.remote()
        if place.machine not in ("", where[0]):  # that machine was lost, and Ray knew before us
            raise PartFailed(role, "it was started on another machine than the one prepared for it", kind=Kind.LOST)
        self._met(role, actor, where, instead)
        await self._open_spans(role, actor, where)
        process = await actor.start.remote(config, **self._for_collectors())
        pids += [process["pid"], *process["engine_pids"]]
        self._started(role, actor, process, instead=instead)
        self._places.keep_off_engines(process, cores=place.cores)
        return process["name"]

    async def _lost_generator(self, name: str, cause: str) -> int:
        """What it held is issued again."""
        if self.parts.buffer is None:
            return 0
        return len(await self.parts.buffer.mark_dead.remote(name, cause))

    async def _retire_generator(self, name: str) -> None:
        if self.parts.buffer is not None:
            await self.parts.buffer.retire.remote(name)

    async def _engine_places(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Of each engine: Ray's options for its actor, and the GPUs of the trainer's ranks that it shares."""
        config = self._config
        number, numbers = config.rollout.num_generators, derive(config, self._recipe)
        each = numbers.gpus["generator"] // number
        if not (numbers.shares_devices and each):
            return [({"num_gpus": each}, [])] * number
        ranks = await self._wait(together([t.devices.remote() for t in self.parts.trainers]), "trainer")
        places = []
        for i in range(number):
            nodes, gpus = zip(*ranks[i * each : (i + 1) * each], strict=True)
            if len(set(nodes)) > 1:
                raise PartFailed(
                    f"generator-{i}",
                    f"its {each} GPUs would be those of trainer ranks on several machines, expected one; lower "
                    "rollout.engine.tensor_parallel_size",
                )
            here = NodeAffinitySchedulingStrategy(nodes[0], soft=False)
            places.append(({"num_gpus": 0, "scheduling_strategy": here}, [gpu for own in gpus for gpu in own]))
        return places

    async def offload(self) -> None:
        """The trainer's ranks leave their devices to the engines that are about to start there."""
        await self._wait(together(t.offload.remote() for t in self.parts.trainers), "trainer")

    def _for_collectors(self) -> dict[str, Any]:
        parts = self.parts
        return {"buffer": parts.buffer, "param_server": parts.param_server, "transport": self._transport}

    async def _auxiliaries(self) -> None:
        """Serve the models of `env.models` that have a path, and tell the collectors where."""
        config = self._config
        copies: dict[str, dict[str, Any]] = {}
        for name, model in config.env.models.items():
            if model.path is not None:
                roles = [f"auxiliary-{name}" + (f".{i}" if i else "") for i in range(model.num_engines)]
                copies[name] = {role: await self._auxiliary(role, name, model) for role in roles}
        everyone = {role: actor for actors in copies.values() for role, actor in actors.items()}
        self.parts.auxiliaries = [*everyone.values()]
        await self._meet(everyone)
        settings = dict(
            dtype=config.model.dtype, device=config.cluster.device, kv_cache_gib=config.cluster.kv_cache_gib
        )
        starts = {role: actor.start.remote(**settings) for role, actor in everyone.items()}
        processes = await asyncio.gather(*(self._wait(start, role) for role, start in starts.items()))
        for (role, actor), process in zip(everyone.items(), processes, strict=True):
            self._started(role, actor, process)
        for name, actors in copies.items():
            first, *others = actors.values()
            self._addresses[name] = await self._wait(first.serve.remote(others), f"auxiliary-{name}")
        self._config = self._with_addresses(config)

    async def _auxiliary(self, role: str, name: str, model: AuxiliaryModel) -> Any:
        place = await self._wait(self._places.auxiliary(role, model), role)
        config = await self._wait(place.localize(self._config), role)
        return AuxiliaryRemote.options(**place.options).remote(config.env.models[name], **self._common(role, place))

    def _with_addresses(self, config: Config) -> Config:
        """The settings with served models as models at an address; never written down, because it holds their key."""
        if not self._addresses:
            return config
        models = dict(config.env.models)
        for name, url in self._addresses.items():
            models[name] = models[name].model_copy(update={"path": None, "url": url})
        return config.model_copy(update={"env": config.env.model_copy(update={"models": models})})

    def _common(self, role: str, place: Place | None = None) -> dict[str, Any]:
        """`place` None: beside the driver."""
        folder = self._folders[role] = self._run_dir if place is None else place.folder
        logs = folder / "logs" / ("" if place is None else place.host)
        return {"role": role, "log_file": logs / f"{role}.log", "log_level": self._config.log.level}

    async def _meet(self, actors: Mapping[str, Any]) -> None:
        """Watch them as soon as their processes exist, even while they are still starting."""
        places = await asyncio.gather(*(self._wait(actor.answer.remote(), role) for role, actor in actors.items()))
        for (role, actor), place in zip(actors.items(), places, strict=True):
            self._met(role, actor, place)
        await asyncio.gather(
            *(
                self._wait(self._open_spans(role, actor, place), role)
                for (role, actor), place in zip(actors.items(), places, strict=True)
            )
        )

    def _met(self, role: str, actor: Any, place: tuple[str, int], instead: Instead | None = None) -> None:
        self._machines[role], pid = place
        pids = [pid] if self._machines[role] == machine() else []
        if instead is not None:
            self._instead[role] = instead
        self.parts.supervisor.watch_process(role, actor.wait_until_death.remote(), pids=pids, instead=instead)

    def _machine_is_silent(self, where: str, cause: str) -> None:
        """Generators there are lost. Of the other parts Ray tells, and the run ends."""
        for role, instead in list(self._instead.items()):
            if self._machines[role] == where:
                del self._instead[role]
                instead(PartFailed(role, cause, kind=Kind.LOST))

    async def _open_spans(self, role: str, actor: Any, place: tuple[str, int]) -> None:
        """Another machine's clock is compared with this one's, by the quickest of a few answers."""
        if self._spans is None:
            return
        looks = [(0.0, 0.0)]
        if place[0] != machine():
            looks = [await _clock_offset(actor) for _ in range(CLOCK_LOOKS)]
        await actor.open_spans.remote(self._folders[role] / "spans" / f"{role}.jsonl", role, min(looks)[1])

    def _started(
        self,
        role: str,
        actor: Any,
        process: dict[str, Any],
        *,
        instead: Instead | None = None,
    ) -> None:
        self.parts.processes[role] = process
        engine_pids = process.get("engine_pids", []) if self._machines[role] == machine() else []
        self.parts.supervisor.watch_pulse(role, lambda: actor.answer.remote(), engine_pids=engine_pids, instead=instead)

    async def _wait(self, call: Any, role: str) -> Any:
        return await self.parts.supervisor.wait(
            call, what=role, timeout_s=self._config.cluster.start_timeout_s, deadline="cluster.start_timeout_s"
        )
