"""One process that has imported what Ray's workers need, and starts each of them by a fork: the fork server.

A run has four to six Python processes, and each would spend seconds of processor on the same imports. The driver starts
this one first (`ForkServer`), with a socket in the run's scratch folder, which only the user may enter. Ray then runs
`fork_client` for each worker, which asks here.

A fork copies the thread that forks, and nothing of what other threads were about to do. So the server starts no thread,
and forks only while it has one. It also forks only for a worker whose environment is its own, because libraries read
theirs when they are loaded. For any other worker the client does what Ray would have done.

Ray, as it is loaded, reads which cluster and which job a worker is of. Both are known with the first worker: the server
imports what needs Ray then, and everything else at once.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..importing import not_loading

if TYPE_CHECKING:
    from ..config import Stage

CLIENT_S = 5.0
"""A client is a moment old, and does nothing but ask."""
CLOSE_S = 5.0
SET_BY_RAY = {"OMP_NUM_THREADS": "1", "SPT_NOENV": "1"}
"""What Ray sets in a worker that has no such variable, before that loads torch."""
OF_EACH_WORKER = {"PYTHONPATH"}
RAYS_OWN = "RAY_"
"""Variables of this prefix are read when Ray is loaded."""
START = "import sys; sys.path[0] = sys.argv[1]; from leeway.runtime.fork_server import main; main()"


@dataclass(frozen=True)
class Modules:
    """What the workers of a run import. `before_ray` load no Ray; `without`: packages that they must not load."""

    before_ray: Sequence[str]
    with_ray: Sequence[str]
    without: Sequence[str] = ()


class ForkServer:
    """The driver's side of it. Workers that were started live on when it ends; it ends with the driver."""

    def __init__(self, folder: Path, modules: Modules) -> None:
        """Begins to import `modules`, with the environment that this process has now."""
        self._address = str(folder / "fork")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._address)
            listening.listen(64)  # clients wait in line while it imports
            settings = [Path(__file__).parents[2], os.getpid(), listening.fileno(), json.dumps(asdict(modules))]
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, *map(str, settings)],
                env={**SET_BY_RAY, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
                start_new_session=True,  # Ctrl-C is for the driver
            )

    def command(self, worker: Sequence[str]) -> list[str]:
        """Starts what the command `worker` would start."""
        client = Path(__file__).with_name("fork_client.py")
        return [sys.executable, "-I", "-S", str(client), self._address, *worker]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Refused(Exception):
    """Why a worker is not forked."""


@dataclass(frozen=True)
class Worker:
    """One of Ray's workers, and what it inherits from its client."""

    script: str
    options: list[str]
    python_path: list[str]
    environ: dict[str, str]
    folder: str
    blocked: list[int]
    open_files: list[int]
    oom_score: str
    streams: list[int]

    @classmethod
    def asked_for(cls, text: bytes, streams: list[int]) -> Worker:
        """Raises Refused if Ray would start it in another way than `python default_worker.py ...`."""
        asked = json.loads(text)
        python, setup, script, *options = asked.pop("command")
        if (python, Path(setup).name, Path(script).name) != (sys.executable, "setup_worker.py", "default_worker.py"):
            raise Refused("it is no worker that Ray starts with this Python")
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--language")
        parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
        setup_options, options = parser.parse_known_args(options)
        context = setup_options.serialized_runtime_env_context
        variables = context.pop("env_vars", {})
        if (
            setup_options.language != "PYTHON"
            or context.pop("py_executable", python) != python
            or any(context.values())
        ):
            raise Refused("its runtime environment changes the command")
        if set(variables) - {"PYTHONPATH"}:
            raise Refused("its runtime environment sets variables")
        environ = {**asked.pop("environ"), **variables}
        return cls(script, options, _entries(environ), environ, streams=streams, **asked)

    def run(self) -> None:
        """Become this worker."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(self.folder)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files[0], self.open_files[1]))
        Path("/proc/self/oom_score_adj").write_text(self.oom_score)
        sys.argv = [self.script, *self.options]
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # Python's own generator is seeded anew in every child, torch's in no process
        gc.enable()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        runpy.run_path(self.script, run_name="__main__")


@dataclass(frozen=True)
class _Child:
    pid: int
    ended: int
    client: socket.socket


class Server:
    """Serves clients until `driver` is gone (a descriptor of its process)."""

    def __init__(self, listening: socket.socket, driver: int, modules: Modules) -> None:
        self._listening = listening
        self._modules = modules
        self._ray: dict[str, str] | None = None
        self._driver = driver
        self._environ = dict(os.environ)
        self._selector = selectors.DefaultSelector()
        self._selector.register(driver, selectors.EVENT_READ)
        self._selector.register(listening, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}

    def serve(self) -> Worker | None:
        """Returns what to become in each child, and None in the server itself at its end."""
        self._import(self._modules.before_ray)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._driver:
                    return None
                if key.fileobj is self._listening:
                    client, _ = self._listening.accept()
                    if (worker := self._answer(client)) is not None:
                        return worker
                elif key.data in self._children:
                    self._look_after(self._children[key.data], key.fileobj)

    def _answer(self, client: socket.socket) -> Worker | None:
        """Fork, or close the connection, which tells the client that it is on its own."""
        streams: list[int] = []
        try:
            client.settimeout(CLIENT_S)
            text, streams = _read(client)
            worker = Worker.asked_for(text, streams)
            self._check(worker)
            if self._ray is None:
                self._load_ray(worker)
            client.sendall(b"?")
            if not client.recv(1):
                raise ConnectionError("it waits no longer")
            if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
                raise Refused(f"the fork server has {num_threads} threads, expected 1")
            if "ray" in sys.modules and _next_id() == _next_id():
                raise Refused("a module has drawn a number from Ray, so that all workers would draw the same ones")
            gc.freeze()  # a child's collections would write to every page that it shares
            pid = os.fork()
        except (Refused, OSError) as error:
            print(f"fork server: a worker starts by itself: {error}", file=sys.stderr, flush=True)
            client.close()
            _close(streams)
            return None
        if pid == 0:
            self._become_child(client, worker)
            return worker
        _close(streams)
        child = _Child(pid, os.pidfd_open(pid), client)
        self._children[pid] = child
        for source in (child.ended, client):
            self._selector.register(source, selectors.EVENT_READ, pid)
        return None

    def _check(self, worker: Worker) -> None:
        """Raises Refused if the worker would not be what it is when started by itself."""
        theirs, ours = {**SET_BY_RAY, **worker.environ}, self._environ
        known = {*OF_EACH_WORKER, *(_of_ray(theirs) if self._ray is None else ())}
        differ = {name for name in (theirs.keys() | ours.keys()) - known if theirs.get(name) != ours.get(name)}
        if differ:
            raise Refused(f"{', '.join(sorted(differ))} differ from the fork server's")
        more = _more(worker.python_path, _entries(ours))
        loaded = {name.split(".")[0] for name in sys.modules}
        hidden = {entry.split(".")[0] for folder in more if os.path.isdir(folder) for entry in os.listdir(folder)}
        if hidden & loaded:
            raise Refused(f"its own modules {sorted(hidden & loaded)} have names of modules that are loaded")

    def _load_ray(self, worker: Worker) -> None:
        self._ray = _of_ray(worker.environ)
        # No more than that: setproctitle finds the memory for titles by the environment as it was.
        os.environ.update({name: value for name, value in self._ray.items() if os.environ.get(name) != value})
        self._environ |= self._ray
        self._import(self._modules.with_ray)

    def _import(self, modules: Sequence[str]) -> None:
        with not_loading(*self._modules.without):
            for module in modules:
                importlib.import_module(module)

    def _become_child(self, client: socket.socket, worker: Worker) -> None:
        os.setpgid(0, 0)  # Ray ends a worker by its process group
        own = os.pidfd_open(os.getpid())
        try:
            socket.send_fds(client, [b"!"], [own])
        except OSError:
            os._exit(1)
        os.close(own)
        self._listening.close()
        for child in self._children.values():
            child.client.close()
            os.close(child.ended)
        client.close()
        os.close(self._driver)
        self._selector.close()
        imported = {name: value for name, value in os.environ.items() if self._environ.get(name) != value}
        os.environ.clear()
        os.environ.update({**worker.environ, **imported})
        # In place of this source's folder: where Python has the folder of a script.
        here = sys.path.index(sys.argv[1])
        sys.path[here : here + 1] = [
            os.path.dirname(worker.script),
            *_more(worker.python_path, _entries(self._environ)),
        ]
        importlib.invalidate_caches()

    def _look_after(self, child: _Child, source: object) -> None:
        """It has ended, or its client has, which ends it too."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if not pid:
            if source is child.client:
                self._selector.unregister(child.client)
                signal.pidfd_send_signal(child.ended, signal.SIGKILL)
            return
        try:
            child.client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:  # nobody is there to be told
            pass
        for source in {key.fileobj for key in self._selector.get_map().values() if key.data == pid}:
            self._selector.unregister(source)
        child.client.close()
        os.close(child.ended)
        del self._children[pid]


def _next_id() -> bytes:
    """What Ray in a child would draw next: names of objects, for one. Each process begins when it draws first."""
    import ray

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, ray.UniqueID.from_random().binary())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        number = file.read()
    os.waitpid(pid, 0)
    return number


def _of_ray(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(RAYS_OWN)}


def _more(path: list[str], known: list[str]) -> list[str]:
    """The folders that come before `known` in `path`. Raises Refused if `known` is not the rest of it."""
    first = len(path) - len(known)
    if first < 0 or path[first:] != known:
        raise Refused("its PYTHONPATH does not end in the fork server's")
    return path[:first]


def _entries(environ: dict[str, str]) -> list[str]:
    """The folders of PYTHONPATH."""
    return [os.path.abspath(folder) for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _read(client: socket.socket) -> tuple[bytes, list[int]]:
    """A client's request, and its standard streams."""
    length, streams, _, _ = socket.recv_fds(client, 8, 3, socket.MSG_WAITALL)
    with client.makefile("rb") as file:
        return file.read(int.from_bytes(length, "big")), streams


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def modules_of(stages: Sequence[Stage]) -> Modules:
    """What several workers of the run import, or one of them for seconds.

    No module of an actor: naming the actor's class, Ray draws a number.
    """
    from ..config.engines import engine_kind

    kinds = [engine_kind(stage.config.rollout.engine_name) for stage in stages if stage.recipe.generates]
    without = set.intersection(*(set(kind.without) for kind in kinds)) if kinds else set()
    before_ray = ["leeway.trainer.actor_critic", "leeway.tasks.prompting"]
    with_ray = ["leeway.replay.assemble", "leeway.replay.buffer", "leeway.replay.storage"]
    if without:  # torchrl's collectors load whatever engines there are
        before_ray.append("leeway.engines.hf_engine")
        with_ray.append("leeway.collector.collector")
    return Modules(before_ray, with_ray, sorted(without))


def can_fork() -> bool:
    """Whether this system has what the server and its clients use."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def main() -> None:
    """`leeway` is imported from the first argument: see START."""
    _, _, driver, listening, modules = sys.argv
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # until it is a worker
    with socket.socket(fileno=int(listening)) as listening_socket:
        worker = Server(listening_socket, os.pidfd_open(int(driver)), Modules(**json.loads(modules))).serve()
    if worker is not None:
        worker.run()
