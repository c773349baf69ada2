"""Processes of engines, and workers that have one, are forked by a server of their own: real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor

from leeway.config import plan_run
from leeway.runtime import fork_client
from leeway.runtime.fork_server import ForkServer, Modules, modules_of
from leeway.runtime.forks import ENGINE_FORKS, FOR_ENGINE, MAX_DESCRIPTORS, SET_BY_RAY, set_again

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("environ_of_a_run")]  # several processes for each test
WAIT_S = 120
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
    modules = [name for name in ("calendar", "colorsys") if name in sys.modules]
    pipe.send({
        "pid": os.getpid(), "parent": os.getppid(), "loaded": modules, "environ": dict(os.environ), "argv": sys.argv,
        "cores": sorted(os.sched_getaffinity(0)), "name": multiprocessing.current_process().name,
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
    command = [*map(os.fsdecode, multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2))]
    print(json.dumps({"code": process.exitcode, "command": command}))
"""


class Machine:
    """A fork server with one for engines, and what Ray would start on it."""

    def __init__(self, folder: Path, for_engines: str = "colorsys") -> None:
        self.folder = folder
        self._environ = {**os.environ, **SET_BY_RAY}
        self.scripts = [folder / "setup_worker.py", folder / "default_worker.py"]
        source = str(Path(__file__).resolve().parents[2] / "src")
        for script, text in zip(self.scripts, (SETUP, PARENT.replace("SOURCE", repr(source))), strict=True):
            script.write_text(text)
        (folder / "scratch").mkdir()
        modules = Modules(["calendar"], [], engine=[for_engines], engine_environ={"OF_ENGINES": "set"})
        own = os.dup(2)
        try:
            with (folder / "said").open("wb") as said:
                os.dup2(said.fileno(), 2)
            self.server = ForkServer(folder / "scratch", modules)
        finally:
            os.dup2(own, 2)
            os.close(own)
        self._started: list[subprocess.Popen[str]] = []
        self._reported: list[int] = []

    def worker(
        self, how: str, *, for_engine: bool = True, threads: str = "1", files: Sequence[int] = (), **variables: str
    ) -> subprocess.Popen[str]:
        """One that starts a process as an engine does, which does `how`, with these variables beside its own.

        `threads`, `files`: the worker's own.
        """
        context = {"env_vars": {FOR_ENGINE: "1"} if for_engine else {}}
        options = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
        command = self.server.command([sys.executable, *map(str, self.scripts), how, json.dumps(variables), *options])
        worker = subprocess.Popen(
            command,
            env={**self._environ, "OMP_NUM_THREADS": threads},
            pass_fds=files,
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
        report = json.loads(line)
        self._reported += [report[name] for name in ("pid", "own") if name in report]
        return report

    def said(self) -> str:
        """By the servers, on what they did not fork."""
        return (self.folder / "said").read_text()

    def close(self) -> None:
        for pid in self._reported:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for worker in self._started:
            worker.kill()
            worker.communicate(timeout=WAIT_S)
        self.server.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(WAIT_S)
    return not psutil.pid_exists(pid)


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
    assert last["code"] == 7
    assert last["command"][0] == sys.executable
    assert "fork_client" not in " ".join(last["command"]), "what others spawn is spawned"


def test_a_worker_with_an_engine_is_forked_of_the_same_server(machine: Machine) -> None:
    worker = machine.worker("wait", OF_ENGINES="set")  # it must be there to be looked at
    report = machine.report(worker)
    assert report["loaded_here"]
    engines, own = psutil.Process(report["parent"]), psutil.Process(report["own"])
    assert own.ppid() == engines.pid
    assert engines.ppid() == machine.server._process.pid
    another = machine.report(machine.worker("0", for_engine=False, OF_ENGINES="set"))
    assert not another["loaded_here"]
    assert another["parent"] == engines.pid


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"OF_ENGINES": "other"}, "OF_ENGINES differ"),
        ({"OF_ENGINES": "set", "VLLM_LOGGING_LEVEL": "DEBUG"}, "VLLM_LOGGING_LEVEL differ"),
        ({"OF_ENGINES": "set", "GOMP_CPU_AFFINITY": "0"}, "GOMP_CPU_AFFINITY differ"),
        ({"OF_ENGINES": "set", "LD_PRELOAD": "/nowhere/libtcmalloc.so"}, "/nowhere/libtcmalloc.so, which"),
        ({"OF_ENGINES": "set", "OMP_NUM_THREADS": "0"}, "not a number of threads"),
    ],
)
def test_one_whose_libraries_would_have_read_something_else_starts_by_itself(
    machine: Machine, variables: dict[str, str], why: str
) -> None:
    worker = machine.worker("7", **variables)
    report = machine.report(worker)
    assert report["loaded_here"]
    assert not is_forked(report)
    assert why in machine.said()
    assert machine.report(worker)["code"] == 7


def test_what_torch_has_read_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names that torch has for it: each has what a new process reads from the same environment."""
    variables = {"OMP_NUM_THREADS": "2", "TORCH_COMPILE_DISABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    variables["TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] = "1"
    before = torch.get_num_threads()
    for config, name in ((dynamo, "disable"), (inductor, "compile_threads"), (inductor.cpp, "dynamic_threads")):
        monkeypatch.setattr(config, name, getattr(config, name))  # put back afterwards
    try:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        set_again()
        assert [torch.get_num_threads(), dynamo.disable, inductor.compile_threads] == [2, True, 3]
        assert inductor.cpp.dynamic_threads
        for name in variables:
            monkeypatch.delenv(name)
        set_again()
        assert [torch.get_num_threads(), dynamo.disable] == [1, False]
        assert not inductor.cpp.dynamic_threads
    finally:
        torch.set_num_threads(before)


def test_a_worker_with_an_engine_may_be_the_first_or_only_one(machine: Machine) -> None:
    begun = time.monotonic()
    report = machine.report(machine.worker("0", OF_ENGINES="set"))
    assert report["loaded_here"]
    assert is_forked(report)
    assert time.monotonic() - begun < fork_client.ANSWER_S[True]


def test_nobody_waits_for_a_server_of_engines_that_cannot_begin(machine: Machine) -> None:
    machine.report(machine.worker("0", for_engine=False, threads="3"))
    begun = time.monotonic()
    report = machine.report(machine.worker("0"))
    assert not report["loaded_here"]
    assert time.monotonic() - begun < fork_client.ANSWER_S[False]
    assert "OMP_NUM_THREADS differ" in machine.said()


def test_without_a_server_of_engines_all_start_by_themselves(tmp_path: Path) -> None:
    machine = Machine(tmp_path, for_engines="there_is_no_such_module")
    try:
        begun = time.monotonic()
        report = machine.report(machine.worker("0", OF_ENGINES="set"))
        assert not report["loaded_here"]
        assert not is_forked(report)
        assert time.monotonic() - begun < fork_client.ANSWER_S[False]
        [server] = [p for p in psutil.process_iter() if p.pid == machine.server._process.pid]
        assert [p for p in server.children() if p.status() == psutil.STATUS_ZOMBIE] == []
        another = machine.report(machine.worker("0", for_engine=False))
        assert psutil.Process(another["own"]).ppid() == server.pid
    finally:
        machine.close()


def test_a_server_outlives_whatever_it_is_asked(machine: Machine) -> None:
    machine.report(machine.worker("0"))
    worker = [sys.executable, *map(str, machine.scripts), "--serialized-runtime-env-context=no json"]
    rest = {"environ": {}, "folder": "/", "blocked": [], "open_files": [64, 64], "oom_score": "0", "cores": [0]}
    asked = [{"numbers": [0], "command": command, **rest} for command in ([], worker)]
    for text in (b"", b"{}", b"no json", *(json.dumps(one).encode() for one in asked)):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(machine.server._address + "-engine")
            socket.send_fds(client, [len(text).to_bytes(8, "big")], [0])
            with suppress(OSError):  # the server may have refused it already
                client.sendall(text)
                client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
    with ExitStack() as stack:
        files = [stack.enter_context(open(os.devnull)).fileno() for _ in range(MAX_DESCRIPTORS)]
        report = machine.report(machine.worker("0", files=files, OF_ENGINES="set"))
    assert not report["loaded_here"]  # more than can be sent at a time
    assert machine.report(machine.worker("0", OF_ENGINES="set"))["loaded_here"]


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
    assert ended(report["pid"])


def test_it_ends_with_its_client(machine: Machine) -> None:
    worker = machine.worker("wait", OF_ENGINES="set")
    report = machine.report(worker)
    os.kill(report["client"], signal.SIGKILL)
    assert ended(report["pid"])


def test_it_outlives_both_servers(machine: Machine) -> None:
    worker = machine.worker("wait", OF_ENGINES="set")
    report = machine.report(worker)
    machine.server.close()
    assert ended(report["parent"])
    time.sleep(0.5)
    process = psutil.Process(report["pid"])
    assert process.status() in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    process.kill()


def test_without_a_server_nothing_changes(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    source = str(Path(__file__).resolve().parents[2] / "src")
    script.write_text(PARENT.replace("SOURCE", repr(source)))
    environ = {name: value for name, value in os.environ.items() if name != ENGINE_FORKS}
    command = [sys.executable, str(script), "7", "{}"]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    first, last = map(json.loads, output.splitlines())
    assert not is_forked(first)
    assert last["code"] == 7


@pytest.mark.parametrize("eager", ["true", "false"])
def test_a_run_with_vllm_loads_it_for_engines_in_their_environment(eager: str) -> None:
    modules = modules_of(plan_run("quickstart", "async_rl", [f"rollout.engine.enforce_eager={eager}"]))
    assert "vllm.v1.engine.core" in modules.engine
    assert "leeway.engines.vllm_worker" not in modules.engine, "as it is loaded, it looks for its collector and cores"
    assert not any("vllm" in name for name in (*modules.before_ray, *modules.with_ray))
    assert ("TORCH_COMPILE_DISABLE" in modules.engine_environ) == (eager == "true")
    assert modules.engine_environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_run_without_vllm_loads_nothing_for_engines() -> None:
    modules = modules_of(plan_run("quickstart", "async_rl", ["rollout.engine.name=hf"]))
    assert not modules.engine
    assert not modules.engine_environ
