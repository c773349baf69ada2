"""Processes of engines, and workers that have one, are forked by a server of their own: real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.config import plan_run
from leeway.runtime import fork_client
from leeway.runtime.fork_server import ForkServer, Modules, modules_of
from leeway.runtime.forks import ENGINE_PYTHON, FOR_ENGINE, SET_BY_RAY, started_by

pytestmark = pytest.mark.slow  # several processes for each test
WAIT_S = 120
NOTHING: Mapping[str, str] = types.MappingProxyType({})
SETUP = """
import json, os, runpy, sys
for argument in sys.argv[1:]:
    if argument.startswith("--serialized"):
        os.environ.update(json.loads(argument.partition("=")[2])["env_vars"])
sys.argv = [argument for argument in sys.argv[1:] if not argument.startswith(("--language", "--serialized"))]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PARENT = """
import json, multiprocessing, os, signal, sys, threading, time
import psutil
sys.path.insert(0, SOURCE)

def reported(pipe, how):
    if how == "torch":
        import torch
    modules = [name for name in ("calendar", "colorsys") if name in sys.modules]
    pipe.send({
        "pid": os.getpid(), "parent": os.getppid(), "loaded": modules, "environ": dict(os.environ), "argv": sys.argv,
        "cores": sorted(os.sched_getaffinity(0)), "name": multiprocessing.current_process().name,
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
    })
    if how == "wait":
        time.sleep(600)
    if how == "raise":
        raise ValueError("of a test")
    sys.exit(int(how) if how.isdigit() else 0)

if __name__ == "__main__":
    loaded = "colorsys" in sys.modules
    from leeway.runtime.forks import engine_forks, started_by
    how, variables = sys.argv[1], json.loads(sys.argv[2])
    os.environ.update(variables)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=reported, args=(theirs, how), name="EngineCore")
    with engine_forks():
        process.start()
    theirs.close()
    report = ours.recv()
    own = psutil.Process()
    report |= {"own": own.pid, "loaded_here": loaded, "client": process.pid, "started": started_by(own)}
    print(json.dumps(report), flush=True)
    if how == "wait" and sys.stdin.readline() == "end it\\n":
        process.terminate()
    process.join(100)
    print(json.dumps({"code": process.exitcode, "executable": os.fsdecode(multiprocessing.spawn.get_executable())}))
"""


class Machine:
    """A fork server with one for engines, and what Ray would start on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environ = {**os.environ, **SET_BY_RAY, "PWD": "/"}  # where the shell that starts them finds another
        self.scripts = [folder / "setup_worker.py", folder / "default_worker.py"]
        source = str(Path(__file__).resolve().parents[2] / "src")
        for script, text in zip(self.scripts, (SETUP, PARENT.replace("SOURCE", repr(source))), strict=True):
            script.write_text(text)
        (folder / "scratch").mkdir()
        modules = Modules(["calendar"], [], engine=["colorsys"], engine_environ={"OF_ENGINES": "set"})
        self.server = ForkServer(folder / "scratch", modules)
        self._started: list[subprocess.Popen[str]] = []

    def worker(
        self,
        how: str,
        *,
        for_engine: bool = True,
        environ: Mapping[str, str] = types.MappingProxyType({}),
        **variables: str,
    ) -> subprocess.Popen[str]:
        """One that starts a process as an engine does, which does `how`, with these variables beside its own.

        `environ`: what the worker itself has beside the server's environment.
        """
        context = {"env_vars": {FOR_ENGINE: "1"} if for_engine else {}}
        options = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
        command = self.server.command([sys.executable, *map(str, self.scripts), how, json.dumps(variables), *options])
        worker = subprocess.Popen(
            command,
            env={**self._environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(worker)
        return worker

    def report(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        assert worker.stdout is not None
        assert worker.stderr is not None
        line = worker.stdout.readline()
        assert line, worker.stderr.read()
        return json.loads(line)

    def close(self) -> None:
        for worker in self._started:
            with suppress(psutil.NoSuchProcess):
                for process in map(psutil.Process, started_by(psutil.Process(worker.pid))):
                    process.kill()
            worker.kill()
            worker.communicate(timeout=WAIT_S)
        self.server.close()


@pytest.fixture
def machine_before(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def machine(machine_before: Machine) -> Machine:
    """With the first worker, of any kind, the server of engines begins."""
    machine_before.report(machine_before.worker("0", for_engine=False))
    return machine_before


def ended(pid: int) -> None:
    try:
        psutil.Process(pid).wait(WAIT_S)
    except psutil.NoSuchProcess:
        pass


def is_forked(report: dict[str, Any]) -> bool:
    """Python's own child is the client, and the process that does the work another one's."""
    return report["pid"] != report["client"]


def test_a_process_of_an_engine_is_a_fork_that_has_loaded_what_engines_load(machine: Machine) -> None:
    worker = machine.worker("7", OF_ENGINES="set", OMP_NUM_THREADS="2", RAY_ADDRESS="somewhere")
    report = machine.report(worker)
    assert is_forked(report)
    assert report["loaded"] == ["calendar", "colorsys"]
    assert report["name"] == "EngineCore"
    assert report["argv"][0].endswith("default_worker.py")  # as every process that is spawned has its parent's
    assert report["environ"]["OMP_NUM_THREADS"] == "2"
    assert report["environ"]["RAY_ADDRESS"] == "somewhere"
    assert report["cores"] == [min(os.sched_getaffinity(0))]
    last = machine.report(worker)
    assert last == {"code": 7, "executable": sys.executable}


def test_a_worker_with_an_engine_is_forked_of_the_same_server(machine: Machine) -> None:
    worker = machine.worker("0", OF_ENGINES="set")
    report = machine.report(worker)
    assert report["loaded_here"]
    engines, own = psutil.Process(report["parent"]), psutil.Process(report["own"])
    assert own.ppid() == engines.pid
    assert engines.ppid() == machine.server._process.pid
    another = machine.report(machine.worker("0", for_engine=False, OF_ENGINES="set"))
    assert not another["loaded_here"]
    assert another["parent"] == engines.pid


@pytest.mark.parametrize(
    "variables",
    [
        {},  # OF_ENGINES is not set
        {"OF_ENGINES": "set", "VLLM_LOGGING_LEVEL": "DEBUG"},
        {"OF_ENGINES": "set", "GOMP_CPU_AFFINITY": "0"},
        {"OF_ENGINES": "set", "LD_PRELOAD": "/nowhere/libtcmalloc.so"},
        {"OF_ENGINES": "set", "OMP_NUM_THREADS": ""},
    ],
)
def test_one_whose_libraries_would_have_read_something_else_starts_by_itself(
    machine: Machine, variables: dict[str, str]
) -> None:
    worker = machine.worker("7", for_engine=False, **variables)
    report = machine.report(worker)
    assert not is_forked(report)
    assert machine.report(worker)["code"] == 7


def test_nobody_waits_for_a_server_of_engines_that_cannot_begin(machine_before: Machine) -> None:
    machine_before.report(machine_before.worker("0", for_engine=False, environ={"OMP_NUM_THREADS": "3"}))
    begun = time.monotonic()
    report = machine_before.report(machine_before.worker("0"))
    assert not report["loaded_here"]
    assert time.monotonic() - begun < fork_client.ANSWER_S


def test_what_is_preloaded_and_loaded_is_the_same(machine: Machine) -> None:
    with open("/proc/self/maps") as file:
        libc = next(line.split()[-1] for line in file if "libc.so.6" in line)
    report = machine.report(machine.worker("0", OF_ENGINES="set", LD_PRELOAD=libc))
    assert is_forked(report)


def test_how_it_ends_reaches_the_process_that_started_it(machine: Machine) -> None:
    worker = machine.worker("raise", OF_ENGINES="set")
    assert is_forked(machine.report(worker))
    assert machine.report(worker)["code"] == 1
    worker = machine.worker("wait", OF_ENGINES="set")
    report = machine.report(worker)
    assert report["pid"] in report["started"]
    assert report["client"] not in report["started"]
    assert worker.stdin is not None
    worker.stdin.write("end it\n")
    worker.stdin.flush()
    assert machine.report(worker)["code"] == -signal.SIGTERM
    ended(report["pid"])


def test_it_ends_with_its_client(machine: Machine) -> None:
    worker = machine.worker("wait", OF_ENGINES="set")
    report = machine.report(worker)
    os.kill(report["client"], signal.SIGKILL)
    ended(report["pid"])


def test_it_outlives_both_servers(machine: Machine) -> None:
    worker = machine.worker("wait", OF_ENGINES="set")
    report = machine.report(worker)
    machine.server.close()
    ended(report["parent"])
    process = psutil.Process(report["pid"])
    assert process.status() in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    process.kill()


def test_without_a_server_nothing_changes(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    source = str(Path(__file__).resolve().parents[2] / "src")
    script.write_text(PARENT.replace("SOURCE", repr(source)))
    environ = {name: value for name, value in os.environ.items() if name != ENGINE_PYTHON}
    command = [sys.executable, str(script), "7", "{}"]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    first, last = map(json.loads, output.splitlines())
    assert not is_forked(first)
    assert last["code"] == 7


@pytest.mark.parametrize("eager", ["true", "false"])
def test_a_run_with_vllm_loads_it_for_engines_in_their_environment(eager: str) -> None:
    modules = modules_of(plan_run("quickstart", "async_rl", [f"rollout.engine.enforce_eager={eager}"]))
    assert "vllm.v1.engine.core" in modules.engine
    assert not any("vllm" in name for name in (*modules.before_ray, *modules.with_ray))
    assert ("TORCH_COMPILE_DISABLE" in modules.engine_environ) == (eager == "true")
    assert modules.engine_environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_run_without_vllm_loads_nothing_for_engines() -> None:
    modules = modules_of(plan_run("quickstart", "async_rl", ["rollout.engine.name=hf"]))
    assert not modules.engine
    assert not modules.engine_environ
