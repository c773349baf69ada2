"""The machines of a joined cluster, and what a run needs on each: room, cores, models, a folder for logs, and an end.

    driver's machine                                every other machine with a part of the run
    Cluster, Hosts  ----------- actor calls ------> HostActor
      models        ----------- files ------------>   its scratch folder: models, temporary files,
      logs/*.log    <---------- new lines ---------   logs
                                                      its guardian, which removes all of it when the driver is gone

Nothing has to lie on a disk that they share, but what the trainer's ranks save if they are on another machine, and the
folder of the transport `files`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import secrets
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from .. import __version__
from ..config import Config, Needs, derive
from ..config.derived import devices_of_copy
from ..config.engines import is_local_path
from ..config.inputs import AuxiliaryModel
from ..config.paths import is_folder, user_path
from ..failures import InputRefused, Kind, PartFailed, Watched, as_text, machine
from ..monitor.logs import log_to_file, say
from .footprint import MARK_ENV, PREFIX_ENV, Footprint, marked
from .guardian import Guardian
from .placement import Place

logger = logging.getLogger(__name__)

POLL_S = 0.25
SAY_AFTER_S = 10.0
LOGS_EVERY_S = 2.0
MOST_LINES_BYTES = 4 << 20
"""Of one log, at a time."""
CHUNK_BYTES = 16 << 20
MARKER = ".machines"
FILES = "run"
"""A folder below the scratch folder of another machine, for what parts write into the stage's own here."""
Watch = Callable[[str, Awaitable[Any]], "asyncio.Future[Any]"]
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Left alone, gloo listens where the machine's own name leads, which may be loopback."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """`machine`: see `failures.machine`. `cores`: that processes of the cluster may use there. `sees_run`: the run's
    folder is the driver's. `scratch`: what the run may fill there. `environ`: for the processes of the run there.
    """

    machine: str
    name: str
    leeway: str
    cores: list[int]
    sees_run: bool
    scratch: Path
    environ: dict[str, str]


class HostActor(Watched):
    """On a machine that is not the driver's. It ends with the driver, and its guardian with everything of the run."""

    def __init__(self, *, role: str, log_level: str, address: str) -> None:
        self.role = role
        self._address = address
        # A mark of its own: what is started after it is gone, its guardian leaves alone.
        self._footprint = Footprint.make()
        self._files = self._footprint.scratch / FILES
        self._guardian = Guardian(self._footprint, self._footprint.scratch / "no run", detached=True)
        log_to_file(self._files / "logs" / os.uname().nodename / f"{role}.log", log_level)

    @as_text
    async def facts(self, run_dir: Path, token: str) -> HostFacts:
        own = {"TMPDIR": str(self._footprint.scratch), MARK_ENV: self._footprint.mark}
        return HostFacts(
            machine=machine(),
            name=os.uname().nodename,
            leeway=__version__,
            cores=sorted(os.sched_getaffinity(0)),
            sees_run=_token_in(run_dir) == token,
            scratch=self._footprint.scratch,
            environ={**own, PREFIX_ENV: self._footprint.memory_prefix, **reached_at(self._address)},
        )

    @as_text
    async def sees(self, folder: str, token: str) -> bool:
        """Whether this is the folder into which the driver has put that."""
        return _token_in(Path(folder)) == token

    @as_text
    async def has(self, folder: str, sums: Mapping[str, str]) -> bool:
        """Whether there is a folder of that name with these files in it."""
        return is_folder(folder) and await asyncio.to_thread(checksums, Path(folder)) == sums

    @as_text
    async def write(self, file: str, content: bytes) -> None:
        """Append to a file below the scratch folder."""
        place = self._footprint.scratch / file
        await asyncio.to_thread(_append, place, content)

    @as_text
    async def lines(self, known: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
        """What logs and spans have beyond the bytes that are known of them, by their paths in the stage's folder."""

        def read() -> dict[str, tuple[int, bytes]]:
            found = {}
            for path in sorted(p for p in self._files.rglob("*") if p.is_file()):
                name = str(path.relative_to(self._files))
                if name.endswith(".old.jsonl"):  # spans that have been brought under their first name
                    continue
                with path.open("rb") as file:
                    begun_anew = known.get(name, 0) > os.fstat(file.fileno()).st_size
                    file.seek(0 if begun_anew else known.get(name, 0))
                    if more := file.read(MOST_LINES_BYTES):
                        found[name] = (file.tell(), more)
            return found

        return await asyncio.to_thread(read)

    @as_text
    async def kill(self, pids: Sequence[int]) -> None:
        """Those that are still processes of this run."""
        for pid in {*pids} & {*marked(self._footprint.mark)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @as_text
    async def clean_up(self) -> None:
        """End what the run has here, but for this process."""
        await asyncio.to_thread(self._guardian.finish)


HostRemote = ray.remote(num_cpus=0, max_concurrency=100)(HostActor)  # type: ignore[call-overload]  # as of the others


def reached_at(address: str) -> dict[str, str]:
    """Variables by which libraries of a process listen at this address of its machine; the user's own stand."""
    names = [name for name, own in psutil.net_if_addrs().items() if any(a.address == address for a in own)]
    found = {"VLLM_HOST_IP": address, **(dict.fromkeys(INTERFACES, names[0]) if names else {})}
    return {name: value for name, value in found.items() if name not in os.environ}


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in it, by its path from there."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                sums[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


class CorePool:
    """The cores of one machine: each process gets those that the fewest have."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._used = Counter(dict.fromkeys(cores, 0))

    def take(self, number: int, *, among: Sequence[int] | None = None, from_the_end: bool = False) -> list[int]:
        """[]: nothing to choose from, so that nothing is pinned. `among`: those that the settings name."""
        if len(self._used) < 2:
            return []
        allowed = [core for core in self._used if among is None or core in among]
        by_use = sorted(allowed, key=lambda core: (self._used[core], -core if from_the_end else core))
        taken = sorted(by_use[:number])
        self._used.update(taken)
        return taken

    def give_back(self, cores: Sequence[int]) -> None:
        self._used.subtract(cores)


@dataclass
class Host:
    """`actor` None: the driver's own machine. `models`: what folders of this one are called there."""

    node: str
    name: str
    machine: str
    folder: Path
    sees_run: bool
    cores: CorePool
    environ: dict[str, str]
    actor: Any = None
    is_silent: bool = False
    models: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)


class Hosts:
    """The machines on which a stage has parts; `run_dir`: the stage's folder, `whole_run`: that of its run.

    `silent`: is told of one that has not answered for `silent_s`; it may answer again. `watch(part, work)`: has `work`
    done until the stage ends, which it does if that fails.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        whole_run: Path,
        log_level: str,
        silent_s: float,
        silent: Callable[[Host], None],
        watch: Watch,
    ) -> None:
        self._run_dir = run_dir
        self._silent_s = silent_s
        self._silent = silent
        self._watch = watch
        self._whole_run = whole_run
        self._log_level = log_level
        self._token = secrets.token_hex(16)
        self._marked: set[Path] = set()
        self._found: dict[str, asyncio.Future[Host]] = {}
        self._sums: dict[str, asyncio.Future[dict[str, str]]] = {}
        self._following: list[asyncio.Future[Any]] = []

    @functools.cached_property
    def own_node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    async def at(self, node: str) -> Host:
        """Of Ray's id of a node. Raises what kept us from it."""
        if node not in self._found:
            self._found[node] = asyncio.ensure_future(self._meet(node))
        try:
            return await asyncio.shield(self._found[node])
        except Exception:
            self._found.pop(node, None)
            raise

    def is_silent(self, node: str) -> bool:
        """Whether this node does not answer, as far as is known. Ray may still take it for a place."""
        found = self._found.get(node)
        return found is not None and found.done() and not found.exception() and found.result().is_silent

    async def sees(self, host: Host, folder: Path) -> bool:
        """Whether a folder of this machine is the same one there."""
        if host.actor is None:
            return True
        await self._mark(folder)
        return await host.actor.sees.remote(str(folder), self._token)

    async def model(self, host: Host, path: str) -> str:
        """What a model is called on this host: its folder is brought there, unless the host has the same one."""
        folder = user_path(path)
        if host.actor is None or not is_local_path(path):
            return path
        if host.sees_run and folder.is_relative_to(self._whole_run):
            return path
        if path not in host.models:
            host.models[path] = asyncio.ensure_future(self._bring(host, folder))
        try:
            return await asyncio.shield(host.models[path])
        except Exception:
            host.models.pop(path, None)
            raise

    async def close(self, grace_s: float) -> None:
        """Bring the last lines of the logs, and end what the run has on other machines."""
        for following in self._following:
            following.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await asyncio.gather(*(self._leave(found, grace_s) for found in self._found.values()))
        self._found.clear()
        for folder in self._marked:
            (folder / MARKER).unlink(missing_ok=True)

    async def _leave(self, found: asyncio.Future[Host], grace_s: float) -> None:
        with contextlib.suppress(Exception):  # a machine that is gone, or cannot be reached: its guardian ends it
            async with asyncio.timeout(grace_s):
                host = await found
                if host.actor is not None:
                    await self._bring_lines(host)
                    await host.actor.clean_up.remote()
                    ray.kill(host.actor)

    async def _mark(self, folder: Path) -> None:
        """Leave there what another machine may look for."""

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARKER).write_text(self._token)

        if folder not in self._marked:
            await asyncio.to_thread(write)
            self._marked.add(folder)

    async def _meet(self, node: str) -> Host:
        if node == self.own_node:
            cores = CorePool(sorted(os.sched_getaffinity(0)))
            environ = reached_at(ray.util.get_node_ip_address())
            return Host(node, os.uname().nodename, machine(), self._run_dir, True, cores, environ)
        address = next(n["NodeManagerAddress"] for n in await asyncio.to_thread(ray.nodes) if n["NodeID"] == node)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        role = f"host-{address}"
        actor = HostRemote.options(scheduling_strategy=where).remote(
            role=role, log_level=self._log_level, address=address
        )
        await self._mark(self._run_dir)
        facts: HostFacts = await actor.facts.remote(self._run_dir, self._token)
        if facts.leeway != __version__:
            raise InputRefused(
                role,
                f"cluster.address: {facts.name} has Leeway {facts.leeway}, expected {__version__} as here; install it",
            )
        host = Host(
            node=node,
            name=facts.name,
            machine=facts.machine,
            folder=self._run_dir if facts.sees_run else facts.scratch / FILES,
            sees_run=facts.sees_run,
            cores=CorePool(facts.cores),
            environ=facts.environ,
            actor=actor,
        )
        self._following.append(self._watch(role, self._follow(host)))
        return host

    async def _follow(self, host: Host) -> None:
        """Logs of other machines appear where those of this one are, which also shows that they can be reached."""
        while True:
            await asyncio.sleep(LOGS_EVERY_S)
            bringing = asyncio.ensure_future(self._bring_lines(host))
            try:
                if not (await asyncio.wait({bringing}, timeout=self._silent_s))[0]:
                    host.is_silent = True
                    self._silent(host)
                await bringing
                host.is_silent = False
            except (RayActorError, PartFailed) as error:  # of its parts Ray tells too; it is met anew when it is needed
                logger.warning("%s is gone: %s", host.name, " ".join(str(error).split())[:200])
                self._found.pop(host.node, None)
                return
            finally:
                bringing.cancel()

    async def _bring_lines(self, host: Host) -> None:
        if host.actor is None:
            return
        for name, (known, content) in (await host.actor.lines.remote(host.known)).items():
            host.known[name] = known
            await asyncio.to_thread(_append, self._run_dir / name, content)

    async def _bring(self, host: Host, folder: Path) -> str:
        key = str(folder)
        if key not in self._sums:
            self._sums[key] = asyncio.ensure_future(asyncio.to_thread(checksums, folder))
        sums = await asyncio.shield(self._sums[key])
        if await host.actor.has.remote(key, sums):
            return key
        name = f"models/{len(host.models)}-{folder.name}"
        num_bytes = 0
        for file in sums:
            with (folder / file).open("rb") as source:
                while True:
                    chunk = await asyncio.to_thread(source.read, CHUNK_BYTES)
                    if not chunk and source.tell():
                        break
                    await host.actor.write.remote(f"{name}/{file}", chunk)
                    num_bytes += len(chunk)
                    if not chunk:
                        break
        place = str((await host.actor.facts.remote(self._run_dir, self._token)).scratch / name)
        if not await host.actor.has.remote(place, sums):
            raise PartFailed(f"host {host.name}", f"{folder} did not arrive there whole", kind=Kind.LOST)
        say(f"{folder} was brought to {host.name}: {num_bytes / 1e6:.1f} MB")
        return place


class Cluster:
    """Places in a joined cluster. Each process that computes has a group of Ray's of its own, which holds its CPUs and
    GPUs: groups do not grow, and generators come and go.
    """

    def __init__(
        self, config: Config, recipe: Needs, *, run_dir: Path, silent: Callable[[str, str], None], watch: Watch
    ) -> None:
        """`silent(machine, cause)`: parts there cannot be reached; see `Place.machine`. `watch`: see `Hosts`."""
        self._config = config
        self._numbers = derive(config, recipe)
        self.hosts = Hosts(
            run_dir,
            whole_run=config.run_dir.absolute(),
            log_level=config.log.level,
            silent_s=(silent_s := config.cluster.silent_s),
            silent=lambda host: silent(
                host.machine, f"its machine {host.name} has not answered for {silent_s:g} s (cluster.silent_s)"
            ),
            watch=watch,
        )
        self._run_dir = run_dir
        self._ranks: dict[int, Host] = {}
        self._groups: list[PlacementGroup] = []

    async def trainer(self, rank: int) -> Place:
        """On the driver's machine as long as it has room."""
        cluster, role = self._config.cluster, f"trainer-{rank}"
        host, place = await self._room(
            role,
            cpus=cluster.cpus_per_trainer,
            gpus=int(cluster.device == "cuda"),
            among=cluster.trainer_cores,
            from_the_end=True,
            rather=self.hosts.own_node,
        )
        self._ranks[rank] = host
        if not host.sees_run:
            place.leave(())
            raise InputRefused(
                role,
                f"output_dir: got {self._run_dir}, which {host.name} does not see, where {role} would be and save "
                "checkpoints; expected a folder that both share, or room for all ranks on the machine where the run "
                "is started; change one of them",
            )
        return place

    async def generator(self, index: int, options: dict[str, Any]) -> Place:
        cluster, role = self._config.cluster, f"generator-{index}"
        cpus, among = self._numbers.cores_per_engine, cluster.engine_cores
        if self._numbers.shares_devices:
            strategy = options.get("scheduling_strategy")
            host = self._ranks[index % len(self._ranks)] if strategy is None else await self.hosts.at(strategy.node_id)
            here = NodeAffinitySchedulingStrategy(host.node, soft=False)
            place = self._on(host, cpus, among=among, options={**options, "scheduling_strategy": here})
        else:
            host, place = await self._room(role, cpus=cpus, gpus=options["num_gpus"], among=among)
        try:
            await self._check_files(role, host)
        except BaseException:
            place.leave(())
            raise
        return place

    async def auxiliary(self, role: str, model: AuxiliaryModel) -> Place:
        number = devices_of_copy(model)
        on_gpu = self._config.cluster.device == "cuda"
        return (await self._room(role, cpus=number, gpus=number if on_gpu else 0, among=()))[1]

    def keep_off_engines(self, process: dict[str, Any], *, cores: Sequence[int] = ()) -> None:
        """Ray knows how many CPUs are taken, and not which: parts without one float."""

    def leave_engines_alone(self, trainers: Sequence[dict[str, Any]]) -> None:
        """As `keep_off_engines`."""

    async def close(self, grace_s: float) -> None:
        """The next stage of the run finds room."""
        for group in list(self._groups):
            self._remove(group)
        await self.hosts.close(grace_s)

    async def _check_files(self, role: str, host: Host) -> None:
        server = self._config.param_server
        if server.transport != "files":
            return
        folder = user_path(server.transport_options.get("folder", self._run_dir / "weights"))
        if not await self.hosts.sees(host, folder):
            raise InputRefused(
                role,
                f"param_server.transport: got files in {folder}, which {host.name} does not see, where {role} "
                "would be; expected a folder that all machines share (param_server.transport_options.folder), or "
                "object_store or broadcast; change one of them",
            )

    async def _room(
        self,
        role: str,
        *,
        cpus: int,
        gpus: int,
        among: Sequence[int] | None = None,
        from_the_end: bool = False,
        rather: str | None = None,
    ) -> tuple[Host, Place]:
        bundle = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
        group = await asyncio.to_thread(placement_group, [bundle], strategy="STRICT_PACK", _soft_target_node_id=rather)
        self._groups.append(group)
        try:
            host = await self.hosts.at(await self._node_of(group, role, bundle))
        except BaseException:
            self._remove(group)
            raise
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        options = {"num_gpus": gpus, "scheduling_strategy": where}
        place = self._on(
            host,
            cpus,
            among=among,
            from_the_end=from_the_end,
            options=options,
            then=lambda: self._remove(group),
        )
        return host, place

    def _remove(self, group: PlacementGroup) -> None:
        """In the background: Ray is asked, which may not answer."""
        if group in self._groups:
            self._groups.remove(group)
            asyncio.get_running_loop().run_in_executor(None, remove_placement_group, group)

    async def _node_of(self, group: PlacementGroup, role: str, bundle: Mapping[str, float]) -> str:
        """The deadline is the caller's."""
        waited_s = 0.0
        while True:
            table: Any = await asyncio.to_thread(placement_group_table, group)
            if table["state"] == "CREATED" and not self.hosts.is_silent(node := table["bundles_to_node_id"][0]):
                return node
            await asyncio.sleep(POLL_S)
            if waited_s < SAY_AFTER_S <= waited_s + POLL_S:
                wanted = " and ".join(f"{number:g} {kind}" for kind, number in bundle.items())
                say(f"{role} waits for a machine of the cluster with {wanted} free")
            waited_s += POLL_S

    def _on(
        self,
        host: Host,
        cpus: int,
        *,
        among: Sequence[int] | None,
        options: dict[str, Any],
        from_the_end: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> Place:
        cluster = self._config.cluster
        pins = cluster.pin_cores and cluster.device == "cpu"
        cores = host.cores.take(cpus, among=among, from_the_end=from_the_end) if pins else []

        def leave(pids: Sequence[int]) -> None:
            host.cores.give_back(cores)
            if host.actor is not None and pids:
                host.actor.kill.remote(pids)  # it is told when it can be reached
            then()

        return Place(
            options={**options, "runtime_env": {"env_vars": host.environ}},
            cores=cores,
            folder=host.folder,
            machine=host.machine,
            host="" if host.actor is None else host.name,
            localize=lambda config: self._localized(config, host),
            leave=leave,
        )

    async def _localized(self, config: Config, host: Host) -> Config:
        """The settings with models by what they are called there."""

        async def there(path: str | None) -> str | None:
            return None if path is None else await self.hosts.model(host, path)

        models = {
            name: own if own.path is None else own.model_copy(update={"path": await there(own.path)})
            for name, own in config.env.models.items()
        }
        reference, critic = await there(config.algorithm.reference_path), await there(config.critic.path)
        return config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": await there(config.model.path)}),
                "algorithm": config.algorithm.model_copy(update={"reference_path": reference}),
                "critic": config.critic.model_copy(update={"path": critic}),
                "env": config.env.model_copy(update={"models": models}),
            }
        )


def _token_in(folder: Path) -> str | None:
    try:
        return (folder / MARKER).read_text()
    except OSError:
        return None


def _append(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(content)
