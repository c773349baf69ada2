"""The fork server and its client: processes of their own, with scripts in place of Ray's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.config import plan_run
from leeway.runtime.cluster import begin
from leeway.runtime.fork_server import ForkServer, Modules

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("environ_of_a_run")]  # a process or two for each test
WAIT_S = 120
SETUP = """
import runpy, sys
sys.argv = [argument for argument in sys.argv[1:] if not argument.startswith(("--language", "--serialized"))]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WORKER = """
import json, os, random, resource, signal, sys, time
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
is_loaded = "calendar" in sys.modules
report = {
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "arguments": sys.argv, "folder": os.getcwd(),
    "path": sys.path, "environ": dict(os.environ), "blocked": blocked, "name": __name__, "is_loaded": is_loaded,
    "random": random.random(), "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "numpy": float(sys.modules["numpy"].random.random()) if "numpy" in sys.modules else None,
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))), "own": None,
}
if "import-own" in sys.argv:
    import own_module
    report["own"] = own_module.__file__
def ended(*_):
    print("asked to end", flush=True)
    os._exit(5)
signal.signal(signal.SIGTERM, ended)
print(json.dumps(report), flush=True)
print("to stderr", file=sys.stderr)
how = sys.argv[1]
if how == "read":
    print("read " + sys.stdin.readline(), flush=True)
if how == "sleep":
    time.sleep(600)
if how in ("abrt", "kill"):
    os.kill(os.getpid(), getattr(signal, "SIG" + how.upper()))
sys.exit(7 if how == "seven" else 0)
"""


class Clients:
    """Starts clients of a fork server, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scripts = [folder / "setup_worker.py", folder / "default_worker.py"]
        for script, text in zip(self.scripts, (SETUP, WORKER), strict=True):
            script.write_text(text)
        self.server: ForkServer | None = None
        self._started: list[subprocess.Popen[str]] = []

    def serve(self, *modules: str, with_ray: tuple[str, ...] = ()) -> psutil.Process:
        folder = self.folder / "scratch"
        folder.mkdir()
        self.server = ForkServer(folder, Modules(modules, with_ray))
        return psutil.Process(self.server._process.pid)

    def start(self, *options: str, environ: dict[str, str] | None = None, **settings: Any) -> subprocess.Popen[str]:
        assert self.server is not None
        command = self.server.command([sys.executable, *map(str, self.scripts), *options, "--language=PYTHON"])
        client = subprocess.Popen(
            command,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **settings,
        )
        self._started.append(client)
        return client

    def report(self, client: subprocess.Popen[str]) -> dict[str, Any]:
        assert client.stdout is not None
        assert client.stderr is not None
        line = client.stdout.readline()
        assert line, client.stderr.read()
        return json.loads(line)

    def close(self) -> None:
        for client in self._started:
            client.kill()
            client.communicate(timeout=WAIT_S)
        if self.server is not None:
            self.server.close()


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[Clients]:
    made = Clients(tmp_path)
    yield made
    made.close()


def is_forked(report: dict[str, Any], server: psutil.Process) -> bool:
    return report["parent"] == server.pid


def wait_for_end(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(WAIT_S)


def test_a_worker_is_forked_and_gets_all_that_its_client_has(clients: Clients, tmp_path: Path) -> None:
    server = clients.serve("calendar")
    limits = (100, 200)

    def as_ray_does() -> None:
        import resource

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    client = clients.start("read", "--worker-id=12", environ={"RAY_JOB_ID": "01"}, cwd=tmp_path, preexec_fn=as_ray_does)
    report = clients.report(client)
    output, errors = client.communicate("a line\n", timeout=WAIT_S)
    assert is_forked(report, server)
    assert report["pid"] != client.pid
    assert report["is_loaded"]
    assert report["name"] == "__main__"
    assert report["arguments"] == [str(clients.scripts[1]), "read", "--worker-id=12"]
    assert report["folder"] == str(tmp_path)
    assert report["environ"]["RAY_JOB_ID"] == "01"
    assert report["blocked"] == [signal.SIGINT]
    assert report["open_files"] == list(limits)
    assert report["group"] == report["pid"]
    assert report["descriptors"] == [0, 1, 2, 3]  # the last: the folder that it lists
    assert (output, errors, client.returncode) == ("read a line\n\n", "to stderr\n", 0)


def test_a_forked_worker_finds_modules_where_another_does(clients: Clients) -> None:
    own = clients.folder / "own"
    own.mkdir()
    (own / "own_module.py").write_text("")
    path = os.pathsep.join([str(own), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = clients.serve("calendar")
    forked = clients.report(clients.start("seven", "import-own", environ={"PYTHONPATH": path}))
    server.kill()
    wait_for_end(server.pid)
    other = clients.report(clients.start("seven", "import-own", environ={"PYTHONPATH": path}))
    assert is_forked(forked, server)
    assert not is_forked(other, server)
    assert forked["own"] == other["own"] == str(own / "own_module.py")
    assert forked["path"] == other["path"]


@pytest.mark.parametrize(("how", "code"), [("seven", 7), ("abrt", -signal.SIGABRT), ("kill", -signal.SIGKILL)])
def test_the_client_ends_as_the_worker_does(clients: Clients, how: str, code: int) -> None:
    server = clients.serve()
    client = clients.start(how)
    assert is_forked(clients.report(client), server)
    assert client.wait(WAIT_S) == code


def test_signals_are_passed_on(clients: Clients) -> None:
    clients.serve()
    client = clients.start("sleep")
    clients.report(client)
    client.terminate()
    output, _ = client.communicate(timeout=WAIT_S)
    assert (output, client.returncode) == ("asked to end\n", 5)


def test_a_worker_ends_with_its_client(clients: Clients) -> None:
    clients.serve()
    client = clients.start("sleep")
    report = clients.report(client)
    client.kill()
    wait_for_end(report["pid"])
    assert not psutil.pid_exists(report["pid"])


def test_a_worker_outlives_the_server_and_its_client_stays_for_it(clients: Clients) -> None:
    server = clients.serve()
    client = clients.start("read")
    report = clients.report(client)
    server.kill()
    wait_for_end(server.pid)
    output, _ = client.communicate("it goes on\n", timeout=WAIT_S)
    assert output == "read it goes on\n\n"
    assert client.returncode == 1  # nobody lived to know how it ended
    wait_for_end(report["pid"])


def broken(clients: Clients) -> psutil.Process:
    server = clients.serve("calendar")
    server.kill()
    wait_for_end(server.pid)
    return server


def with_a_module(text: str) -> Callable[[Clients], psutil.Process]:
    def serve(clients: Clients) -> psutil.Process:
        clients.folder.joinpath("module_of_test.py").write_text(text)
        sys_path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(clients.folder), *filter(None, [sys_path])])
        try:
            return clients.serve("calendar", "module_of_test")
        finally:
            if sys_path is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = sys_path

    return serve


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
UNABLE = {
    "it was killed": broken,
    "it cannot import": with_a_module("raise ImportError('for a test')"),
    "it has a thread": with_a_module(THREAD),
}


@pytest.mark.parametrize("why", UNABLE)
def test_a_worker_starts_by_itself_where_the_server_cannot_fork(clients: Clients, why: str) -> None:
    server = UNABLE[why](clients)
    path = [str(clients.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = clients.start("seven", environ={"PYTHONPATH": os.pathsep.join(path)})
    report = clients.report(client)
    assert report["pid"] == client.pid
    assert not is_forked(report, server)
    assert client.wait(WAIT_S) == 7


def test_a_worker_starts_by_itself_where_the_fork_would_be_another(clients: Clients) -> None:
    server = clients.serve("calendar")
    own = clients.folder / "own"
    own.mkdir()
    (own / "calendar.py").write_text("")
    path = os.pathsep.join([str(own), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert is_forked(clients.report(clients.start("seven", environ={"RAY_JOB_ID": "01"})), server)
    for environ in ({"RAY_JOB_ID": "02"}, {"RAY_JOB_ID": "01", "OMP_NUM_THREADS": "3"}, {"PYTHONPATH": path}):
        client = clients.start("seven", environ={"RAY_JOB_ID": "01", **environ})
        assert clients.report(client)["pid"] == client.pid
        assert client.wait(WAIT_S) == 7
    context = {"env_vars": {}, "command_prefix": ["nice"]}
    client = clients.start("seven", f"--serialized-runtime-env-context={json.dumps(context)}")
    assert clients.report(client)["pid"] == client.pid


def test_forked_workers_share_no_random_numbers(clients: Clients) -> None:
    server = clients.serve("random", "numpy")
    first, second = (clients.report(clients.start("seven")) for _ in range(2))
    assert is_forked(first, server)
    assert is_forked(second, server)
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]


def test_a_module_that_draws_from_ray_prevents_forks(clients: Clients) -> None:
    """All workers would name their objects alike."""
    server = with_a_module("import ray\nray.UniqueID.from_random()")(clients)
    path = [str(clients.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = clients.start("seven", environ={"PYTHONPATH": os.pathsep.join(path)})
    report = clients.report(client)
    assert report["pid"] == client.pid
    assert not is_forked(report, server)


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    text = (
        "import pathlib, sys, time\n"
        "from leeway.runtime.fork_server import ForkServer, Modules\n"
        "print(ForkServer(pathlib.Path(sys.argv[1]), Modules([], []))._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", text, str(tmp_path)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        server = int(driver.stdout.readline())
        assert psutil.pid_exists(server)
        driver.kill()
    wait_for_end(server)


@pytest.mark.parametrize("override", ["cluster.device=cuda", "cluster.address=auto"])
def test_runs_on_gpus_and_on_a_cluster_of_others_have_none(override: str, tmp_path: Path) -> None:
    assert begin(plan_run("quickstart", "async_rl", [override]), scratch=tmp_path) is None
