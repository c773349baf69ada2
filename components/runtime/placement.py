"""Where processes of a run go. On a cluster of its own: which cores the compute threads of engines and trainers run on;
other parts are kept off the engines' cores. For a joined cluster see `hosts`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..config import Config, Needs, derive
from ..config.derived import devices_of_copy
from ..config.engines import engine_kind
from ..config.inputs import AuxiliaryModel
from .cluster import ray_processes
from .forks import FOR_ENGINE


async def _as_they_are(config: Config) -> Config:
    return config


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of one process. `options`: Ray's, for its actor. `cores`: of its compute threads ([]: not pinned). `folder`: for
    what it writes there, its log and its spans. `host`: the name under which its log is kept, that of another machine
    (empty: the driver's, whose logs lie on top). `localize`: the settings with paths as they are there. `machine`: see
    `failures.machine` (empty: the driver's). `leave(pids)`: these processes, its own, are gone or to be ended, and the
    place is free.
    """

    options: dict[str, Any]
    cores: list[int]
    folder: Path
    machine: str = ""
    host: str = ""
    localize: Callable[[Config], Awaitable[Config]] = _as_they_are
    leave: Callable[[Sequence[int]], None] = lambda pids: None


class Places(Protocol):
    """Each waits for room; the deadline is the caller's."""

    async def trainer(self, rank: int) -> Place: ...

    async def generator(self, index: int, options: dict[str, Any]) -> Place:
        """`options`: Ray's, with the machine of the trainer's ranks where it shares their GPUs."""
        ...

    async def auxiliary(self, role: str, model: AuxiliaryModel) -> Place: ...

    def keep_off_engines(self, process: dict[str, Any], *, cores: Sequence[int] = ()) -> None:
        """A part that has started, but for those of its threads that are on exactly these `cores`: they compute."""
        ...

    def leave_engines_alone(self, trainers: Sequence[dict[str, Any]]) -> None:
        """Trainers, where engines are the slower side by far: what these processes do beside computing, this process
        and Ray's leave the engines' cores, until `close`. What is started later inherits that, and chooses its own.
        """
        ...

    async def close(self, grace_s: float) -> None:
        """All parts have ended: leave nothing on other machines."""
        ...


@dataclass(frozen=True)
class Cores:
    """Cores per process; an empty list: not pinned."""

    engines: list[list[int]]
    trainers: list[list[int]]


def assign_cores(config: Config, recipe: Needs, available: list[int] | None = None) -> Cores:
    """Trainers get the last cores and engines the ones before; if there are too few, processes of a role share.

    With two cores, one engine and one trainer: engine on the first, trainer on the second. Where they
    share devices, both have all.
    """
    need = derive(config, recipe)
    num_engines, num_trainers = need.processes["generator"], need.processes["trainer"]
    if not config.cluster.pin_cores or config.cluster.device != "cpu":
        return Cores([[]] * num_engines, [[]] * num_trainers)
    cores = sorted(os.sched_getaffinity(0)) if available is None else available
    if len(cores) < 2 and num_engines and num_trainers:
        return Cores([[]] * num_engines, [[]] * num_trainers)
    if config.cluster.shares_devices:
        return Cores(
            _deal(config.cluster.engine_cores or cores, num_engines, config.cluster.cpus_per_generator),
            _deal(config.cluster.trainer_cores or cores, num_trainers, config.cluster.cpus_per_trainer),
        )
    for_trainers = min(num_trainers * config.cluster.cpus_per_trainer, len(cores) - (1 if num_engines else 0))
    split = len(cores) - for_trainers
    taken = config.cluster.engine_cores or []
    trainer_cores = config.cluster.trainer_cores or [c for c in cores[split:] if c not in taken] or cores[split:]
    engine_cores = config.cluster.engine_cores or [c for c in cores if c not in trainer_cores] or cores[:split]
    return Cores(
        _deal(engine_cores, num_engines, need.cores_per_engine),
        _deal(trainer_cores, num_trainers, config.cluster.cpus_per_trainer),
    )


class OwnMachine:
    """Places in a cluster of the run's own."""

    def __init__(self, config: Config, recipe: Needs, run_dir: Path) -> None:
        self._cores = assign_cores(config, recipe)
        self._free, self._others = beside_engines(self._cores)
        self._all, self._kept_off = sorted(os.sched_getaffinity(0)), list[int]()
        self._of_no_engine = sorted(set(self._all).difference(*self._cores.engines)) if self._others else []
        self._on_gpu = config.cluster.device == "cuda"
        self._loads_ahead = not self._on_gpu and engine_kind(config.rollout.engine_name).processes is not None
        self._run_dir = run_dir

    async def trainer(self, rank: int) -> Place:
        return Place(options={"num_gpus": int(self._on_gpu)}, cores=self._cores.trainers[rank], folder=self._run_dir)

    async def generator(self, index: int, options: dict[str, Any]) -> Place:
        cores = self._cores.engines
        if self._loads_ahead:
            options = {**options, "runtime_env": {"env_vars": {FOR_ENGINE: "1"}}}
        return Place(options=options, cores=cores[index % len(cores)], folder=self._run_dir)

    async def auxiliary(self, role: str, model: AuxiliaryModel) -> Place:
        return Place(
            options={"num_gpus": devices_of_copy(model) if self._on_gpu else 0}, cores=[], folder=self._run_dir
        )

    def keep_off_engines(self, process: dict[str, Any], *, cores: Sequence[int] = ()) -> None:
        if not self._others:
            return
        computing = _threads_on(process["pid"], cores)
        # One thread of a process has Python's lock at a time. A trainer's pass would have the core of the one that has
        # it, and an engine in that process would wait for both.
        beside = self._free or (cores if computing else self._others)
        keep_on(process["pid"], beside, but=computing)

    def leave_engines_alone(self, trainers: Sequence[dict[str, Any]]) -> None:
        if not self._of_no_engine:
            return
        for process, cores in zip(trainers, self._cores.trainers, strict=True):
            keep_on(process["pid"], self._of_no_engine, but=_threads_on(process["pid"], cores))
        self._kept_off = [os.getpid(), *(pid for _, pid in ray_processes())]
        for pid in self._kept_off:
            keep_on(pid, self._of_no_engine)

    async def close(self, grace_s: float) -> None:
        """The next stage may have all cores; the run's end removes what is here: see `footprint`."""
        for pid in self._kept_off:
            keep_on(pid, self._all)
        self._kept_off = []


def beside_engines(cores: Cores, available: list[int] | None = None) -> tuple[list[int], list[int]]:
    """(cores that neither engines nor trainers have, cores for collectors, buffer and parameter server).

    [] for both if nothing is pinned or engines have them all. An engine's passes are short and consecutive: anything
    that takes its core in between delays every sequence in it. If trainers leave a core free, the parts get it; else
    they share with trainers, but for a collector in whose process the engine computes: that shares with its engine.
    """
    if not any(cores.engines):
        return [], []
    own = set(os.sched_getaffinity(0) if available is None else available)
    left = own.difference(*cores.engines)
    free = left.difference(*cores.trainers)
    return sorted(free), sorted(free or left)


def keep_on(pid: int, cores: Sequence[int], *, but: Sequence[int] = ()) -> None:
    """Restrict the threads of a process on this machine, and threads that they start, to these cores.

    `but`: ids of threads that chose their own.
    """
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        if int(thread.name) in but:
            continue
        with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
            os.sched_setaffinity(int(thread.name), cores)


def _threads_on(pid: int, cores: Sequence[int]) -> list[int]:
    """Ids of the threads of a process on this machine that are on exactly these cores."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(int(thread.name)) == set(cores):
                found.append(int(thread.name))
    return found


def _deal(cores: list[int], num_processes: int, per_process: int) -> list[list[int]]:
    """`per_process` cores each, wrapping around when they run out."""
    return [
        sorted({cores[(p * per_process + i) % len(cores)] for i in range(per_process)}) for p in range(num_processes)
    ]
