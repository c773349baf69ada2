"""Cores of engines and trainers."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway.config import Config, derive, find_recipe
from leeway.runtime.forks import FOR_ENGINE
from leeway.runtime.placement import Cores, OwnMachine, assign_cores, beside_engines, keep_on


def config_of(*, generators=1, ranks=1, **cluster: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/models/tiny"},
            "task": {"path": "tasks.jsonl"},
            "rollout": {"num_generators": generators},
            "train": {"steps": 4, "num_ranks": ranks},
            "cluster": {"device": "cpu", **cluster},
        }
    )


def cores_of(available: int, recipe: str = "async_rl", **settings: Any) -> Cores:
    return assign_cores(config_of(**settings), find_recipe(recipe), list(range(available)))


def test_on_two_cores_the_engine_has_the_first_and_the_trainer_the_second():
    assert cores_of(2) == Cores([[0]], [[1]])


def test_engines_and_ranks_that_share_have_the_same_cores():
    both: dict[str, Any] = dict(placement="turns", cpus_per_generator=2, cpus_per_trainer=2)
    assert cores_of(2, **both) == Cores([[0, 1]], [[0, 1]])
    assert cores_of(4, generators=2, ranks=2, **both) == Cores([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    assert derive(config_of(generators=2, ranks=2, **both)).cpus_needed == 4
    assert derive(config_of(generators=2, ranks=1, **both)).cpus_needed == 4


@pytest.mark.parametrize(
    ("available", "settings", "engines", "trainers"),
    [
        (4, {}, [[0]], [[3]]),
        (4, {"cpus_per_generator": 3}, [[0, 1, 2]], [[3]]),
        (4, {"cpus_per_trainer": 2, "cpus_per_generator": 2}, [[0, 1]], [[2, 3]]),
        (
            8,
            {"generators": 2, "ranks": 2, "cpus_per_generator": 2, "cpus_per_trainer": 2},
            [[0, 1], [2, 3]],
            [[4, 5], [6, 7]],
        ),
        # Too few: those of one role share, and the two roles do not.
        (2, {"generators": 3}, [[0], [0], [0]], [[1]]),
        (2, {"ranks": 2}, [[0]], [[1], [1]]),
        (3, {"cpus_per_trainer": 8}, [[0]], [[1, 2]]),
        (2, {"cpus_per_generator": 4, "cpus_per_trainer": 4}, [[0]], [[1]]),
    ],
)
def test_trainers_get_the_last_cores(available, settings, engines, trainers):
    assert cores_of(available, **settings) == Cores(engines, trainers)


def test_one_core_or_no_pinning_leaves_everything_to_float():
    assert cores_of(1) == Cores([[]], [[]])
    assert cores_of(8, generators=2, ranks=3, pin_cores=False) == Cores([[]] * 2, [[]] * 3)
    assert cores_of(8, device="cuda") == Cores([[]], [[]])


@pytest.mark.parametrize(
    ("available", "settings", "free", "others"),
    [
        (2, {}, [], [1]),  # with the trainer
        (4, {}, [1, 2], [1, 2]),
        (4, {"cpus_per_generator": 3}, [], [3]),
        (1, {}, [], []),
        (4, {"pin_cores": False}, [], []),
        (2, {"engine_cores": [0, 1], "cpus_per_generator": 2}, [], []),
    ],
)
def test_other_parts_are_kept_off_the_engines_cores(available, settings, free, others):
    assert beside_engines(cores_of(available, **settings), list(range(available))) == (free, others)
    assert beside_engines(cores_of(4, "sft"), [0, 1, 2, 3]) == ([], [])


WORKER = """
import os, threading, time

def compute():
    os.sched_setaffinity(0, [{core}])
    print(threading.get_native_id(), flush=True)
    time.sleep(600)

threading.Thread(target=compute).start()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("free", "kept_on"), [(False, 0), (True, 1)])
def test_a_collector_shares_cores_with_the_engine_in_its_process_unless_some_are_free(
    free: bool, kept_on: int, tmp_path: Path
) -> None:
    """Two threads of one process: on the trainer's core, one would hold Python's lock while it waits for a pass."""
    two = sorted(os.sched_getaffinity(0))[:2]
    config = config_of()
    machine = OwnMachine(config, find_recipe("async_rl"), tmp_path)
    machine._free, machine._others = [two[1]] if free else [], [two[1]]
    program = WORKER.format(core=two[0])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        machine.keep_off_engines({"pid": process.pid}, cores=[two[0]])
        assert os.sched_getaffinity(process.pid) == {two[kept_on]}
        assert os.sched_getaffinity(engine) == {two[0]}
        machine.keep_off_engines({"pid": process.pid}, cores=[99])  # its engine is another process
        assert os.sched_getaffinity(process.pid) == {two[1]}
        process.kill()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_driver_and_ray_leave_the_engines_cores_until_the_stage_is_over(
    is_pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.sched_getaffinity(0)
    machine = OwnMachine(config_of(pin_cores=is_pinned), find_recipe("async_rl"), tmp_path)
    others = own.difference(*machine._cores.engines) if is_pinned else own
    assert (others < own) == is_pinned
    sleeps = ["sleep", "600"]
    with subprocess.Popen(sleeps) as raylet, subprocess.Popen(sleeps) as trainer:
        monkeypatch.setattr("leeway.runtime.placement.ray_processes", lambda: [("raylet", raylet.pid)])
        try:
            machine.leave_engines_alone([{"pid": trainer.pid}])
            for pid in (0, raylet.pid, trainer.pid):
                assert os.sched_getaffinity(pid) == others
        finally:
            asyncio.run(machine.close(1.0))
        assert os.sched_getaffinity(0) == os.sched_getaffinity(raylet.pid) == own
        raylet.kill()
        trainer.kill()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_trainers_computing_threads_stay_and_its_others_may_use_every_core_but_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    machine = OwnMachine(config_of(), find_recipe("async_rl"), tmp_path)
    machine._cores, machine._of_no_engine = Cores([[first]], [[first]]), [second]
    monkeypatch.setattr("leeway.runtime.placement.ray_processes", list)
    program = WORKER.format(core=first)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        computes = int(process.stdout.readline())
        try:
            machine.leave_engines_alone([{"pid": process.pid}])
        finally:
            asyncio.run(machine.close(1.0))
        assert os.sched_getaffinity(computes) == {first}
        assert os.sched_getaffinity(process.pid) == {second}
        process.kill()


@pytest.mark.parametrize(
    ("engine", "device", "ahead"), [("vllm", "cpu", True), ("hf", "cpu", False), ("vllm", "cuda", False)]
)
def test_a_generator_whose_engine_has_processes_is_forked_of_what_they_load(
    engine: str, device: str, ahead: bool, tmp_path: Path
) -> None:
    config = config_of(device=device)
    rollout = config.rollout.model_copy(update={"engine": {"name": engine}})
    config = config.model_copy(update={"rollout": rollout})
    place = asyncio.run(OwnMachine(config, find_recipe("async_rl"), tmp_path).generator(0, {"num_gpus": 0}))
    wanted = {"runtime_env": {"env_vars": {FOR_ENGINE: "1"}}} if ahead else {}
    assert place.options == {"num_gpus": 0, **wanted}


def test_a_process_is_kept_on_cores_with_all_its_threads():
    core = sorted(os.sched_getaffinity(0))[0]
    program = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        keep_on(process.pid, [core])
        threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len(threads) == 2
        assert all(os.sched_getaffinity(thread) == {core} for thread in threads)
        process.kill()


def test_a_recipe_with_one_role_gives_it_what_there_is():
    assert cores_of(4, "sft", cpus_per_trainer=4) == Cores([], [[0, 1, 2, 3]])
    assert cores_of(1, "sft") == Cores([], [[0]])
    evaluation = cores_of(4, "evaluate", generators=2, cpus_per_generator=2)
    assert evaluation == Cores([[0, 1], [2, 3]], [])


def test_chosen_cores_are_used():
    chosen = cores_of(8, generators=2, engine_cores=[5, 3], trainer_cores=[7])
    assert chosen == Cores([[5], [3]], [[7]])


def test_choosing_the_trainers_cores_keeps_engines_off_them():
    cores = cores_of(2, trainer_cores=[0])
    assert cores == Cores([[1]], [[0]])


def test_every_process_is_placed_on_cores_that_exist_and_roles_never_mix():
    for available, generators, ranks, g, t in itertools.product(
        (2, 3, 4, 7), (1, 2, 3), (1, 2, 4), (1, 2, 5), (1, 2, 5)
    ):
        cores = cores_of(available, generators=generators, ranks=ranks, cpus_per_generator=g, cpus_per_trainer=t)
        assert len(cores.engines) == generators
        assert len(cores.trainers) == ranks
        engine_cores = {c for process in cores.engines for c in process}
        trainer_cores = {c for process in cores.trainers for c in process}
        assert all(cores.engines)
        assert all(cores.trainers)
        assert engine_cores | trainer_cores <= set(range(available))
        assert not engine_cores & trainer_cores
