"""One process that has imported what Ray's workers need, and starts each of them by a fork: the fork server.

A run has four to six Python processes, and each would spend seconds of processor on the same imports. The driver starts
this one first (`ForkServer`), with a socket in the run's scratch folder, which only the user may enter. Ray then runs
`fork_client` for each worker, which asks here.

A fork copies the thread that forks, and nothing of what other threads were about to do. So the server starts no thread,
and forks only while it has one. It also forks only for a process whose environment is its own, because libraries read
theirs when they are loaded. For any other one the client does what would have been done without a server.

Ray, as it is loaded, reads which cluster and which job a worker is of. Both are known with the first worker: the server
imports what needs Ray then, and everything else at once.

Engines have processes of their own, which import most of all. A second server, which the first one forks as soon as it
has all that it imports itself, imports what those need beside it, and is asked for them in the same way.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..importing import not_loading
from .forks import (
    ENGINE_FORKS,
    FOR_ENGINES,
    MAX_DESCRIPTORS,
    SET_BY_RAY,
    Child,
    Refused,
    asked_for,
    client_of,
    of_ray,
    open_descriptors,
    set_again,
)

if TYPE_CHECKING:
    from ..config import Stage

CLIENT_S = 5.0
"""A client is a moment old, and does nothing but ask."""
CLOSE_S = 5.0
MAX_WAITING = 64
STREAMS = (0, 1, 2)
PR_SET_PDEATHSIG = 1
START = "import sys; sys.path[0] = sys.argv[1]; from leeway.runtime.fork_server import main; main()"


@dataclass(frozen=True)
class Modules:
    """What the workers of a run import. `before_ray` load no Ray; `without`: packages that they must not load.

    `engine`: what processes of an engine import beside it, in an environment with `engine_environ`.
    """

    before_ray: Sequence[str]
    with_ray: Sequence[str]
    without: Sequence[str] = ()
    engine: Sequence[str] = ()
    engine_environ: Mapping[str, str] = field(default_factory=dict)


class ForkServer:
    """The driver's side of it. Processes that were started live on when it ends; it ends with the driver."""

    def __init__(self, folder: Path, modules: Modules) -> None:
        """Begins to import `modules`, with the environment that this process has now."""
        self._address = str(folder / "fork")
        addresses = [self._address]
        if modules.engine:
            addresses.append(self._address + FOR_ENGINES)
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in addresses]
            for listening, address in zip(sockets, addresses, strict=True):
                listening.bind(address)
                listening.listen(MAX_WAITING)  # clients wait in line while it imports
            descriptors = [listening.fileno() for listening in sockets]
            settings = [json.dumps(descriptors), addresses[-1], json.dumps(asdict(modules))]
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(Path(__file__).parents[2]), str(os.getpid()), *settings],
                env={**SET_BY_RAY, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the driver
            )

    def command(self, worker: Sequence[str]) -> list[str]:
        """Starts what the command `worker` would start."""
        return client_of(self._address, worker)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class _Forked:
    pid: int
    ended: int
    client: socket.socket


@dataclass(frozen=True)
class _Ending:
    """A child that has no client. `ended`: a descriptor of its process."""

    pid: int
    ended: int

    def reap(self) -> None:
        os.waitpid(self.pid, 0)
        os.close(self.ended)


@dataclass(frozen=True)
class _Asked:
    """`descriptors`: the child's, in this process."""

    client: socket.socket
    child: Child
    descriptors: list[int]


class Server:
    """Serves clients until `owner` is gone (a descriptor of its process)."""

    def __init__(
        self,
        listening: socket.socket,
        owner: int,
        modules: Modules,
        *,
        for_engines: socket.socket | None = None,
        variables: Mapping[str, str],
    ) -> None:
        """`for_engines`: where another server listens, which this one forks. `variables`: of all that it forks."""
        self._listening = listening
        self._modules = modules
        self._for_engines = for_engines
        self._engines: _Ending | None = None
        self._variables = variables
        self._ray: dict[str, str] | None = None
        self._owner = owner
        self._environ = dict(os.environ)
        self._selector = selectors.DefaultSelector()
        for source in (owner, listening, for_engines):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)
        self._forked: dict[int, _Forked] = {}

    def serve(self, first: _Asked | None = None) -> Callable[[], None]:
        """Returns what to do: in each child, and in the server itself at its end. `first`: a client that waits."""
        self._import(self._modules.before_ray)
        if first is not None and self._fork(first):
            return first.child.run
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._owner:
                    return _end
                if key.fileobj is self._listening:
                    client, _ = self._listening.accept()
                    if (asked := self._hear(client)) is not None and self._fork(asked):
                        return asked.child.run
                    if self._ray is not None and (serve := self._begin_engines(None)) is not None:
                        return serve()
                elif (for_engines := self._for_engines) is not None and key.fileobj is for_engines:
                    client, _ = for_engines.accept()
                    asked = self._hear(client)
                    if asked is not None and (serve := self._begin_engines(asked)) is not None:
                        return serve()
                elif key.data in self._forked:
                    self._look_after(self._forked[key.data], key.fileobj)
                elif self._engines is not None and key.fileobj == self._engines.ended:
                    self._selector.unregister(self._engines.ended)
                    self._engines.reap()
                    self._engines = None

    def _hear(self, client: socket.socket) -> _Asked | None:
        """With what is asked for, Ray is loaded."""
        descriptors: list[int] = []
        try:
            client.settimeout(CLIENT_S)
            child = asked_for(_read(client, descriptors), descriptors)
            child.check(self._environ, self._ray)
            if self._ray is None:
                self._load_ray(child)
            return _Asked(client, child, descriptors)
        except (Refused, OSError) as error:
            self._refuse(client, descriptors, error)
            return None

    def _refuse(self, client: socket.socket, descriptors: list[int], error: Exception) -> None:
        """Close the connection, which tells the client that it is on its own."""
        print(f"fork server: a process starts by itself: {error}", file=sys.stderr, flush=True)
        client.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if self._ray is None:  # the other server will hardly begin: let nobody wait for it
            self._leave_engines()

    def _fork(self, asked: _Asked) -> bool:
        """Whether this process is the child now."""
        client, child = asked.client, asked.child
        try:
            _check_threads()
            if "ray" in sys.modules and _next_id() == _next_id():
                raise Refused("a module has drawn a number from Ray, so that all workers would draw the same ones")
            own = {*STREAMS, *asked.descriptors, *map(_number, [client, *self._own()])}
            if taken := child.descriptors.keys() & ({*open_descriptors()} - own):
                raise Refused(f"a module has the descriptors {sorted(taken)} open")
            client.sendall(b"?")
            if not client.recv(1):
                raise ConnectionError("it waits no longer")
            gc.freeze()  # a child's collections would write to every page that it shares
            pid = os.fork()
        except (Refused, OSError) as error:
            self._refuse(client, asked.descriptors, error)
            return False
        if pid == 0:
            self._become(client, child)
            return True
        for descriptor in asked.descriptors:
            os.close(descriptor)
        forked = _Forked(pid, os.pidfd_open(pid), client)
        self._forked[pid] = forked
        for source in (forked.ended, client):
            self._selector.register(source, selectors.EVENT_READ, pid)
        return False

    def _load_ray(self, child: Child) -> None:
        self._ray = of_ray(child.environ)
        # No more than that: setproctitle finds the memory for titles by the environment as it was.
        os.environ.update({name: value for name, value in self._ray.items() if os.environ.get(name) != value})
        self._environ |= self._ray
        self._import(self._modules.with_ray)

    def _import(self, modules: Sequence[str]) -> None:
        with not_loading(*self._modules.without):
            for module in modules:
                importlib.import_module(module)

    def _begin_engines(self, first: _Asked | None) -> Callable[[], Callable[[], None]] | None:
        """Its `serve`, in a child: it has loaded what this one has, and serves engines from then on."""
        if self._for_engines is None:
            return None
        server = os.pidfd_open(os.getpid())
        try:
            _check_threads()
            pid = os.fork()
        except (Refused, OSError) as error:
            os.close(server)
            self._leave_engines()
            if first is not None:
                self._refuse(first.client, first.descriptors, error)
            return None
        if pid:
            os.close(server)
            self._leave_engines()
            if first is not None:
                first.client.close()
                for descriptor in first.descriptors:
                    os.close(descriptor)
            self._engines = _Ending(pid, os.pidfd_open(pid))
            self._selector.register(self._engines.ended, selectors.EVENT_READ)
            return None
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it may be about to import for seconds
        listening, self._for_engines = self._for_engines, None
        for own in self._own():
            _close(own)
        os.environ.update(self._modules.engine_environ)
        set_again()
        engines = Server(listening, server, Modules(self._modules.engine, ()), variables=self._variables)
        engines._ray, engines._environ = self._ray, self._environ
        return functools.partial(engines.serve, first)

    def _leave_engines(self) -> None:
        """To the other server, or to nobody."""
        if self._for_engines is not None:
            self._selector.unregister(self._for_engines)
            self._for_engines.close()
            self._for_engines = None

    def _own(self) -> list[Any]:
        """What it has open."""
        own: list[Any] = [self._listening, self._selector, self._owner]
        if self._for_engines is not None:
            own.append(self._for_engines)
        if self._engines is not None:
            own.append(self._engines.ended)
        for forked in self._forked.values():
            own += [forked.client, forked.ended]
        return own

    def _become(self, client: socket.socket, child: Child) -> None:
        os.setpgid(0, 0)  # Ray ends a worker by its process group
        process = os.pidfd_open(os.getpid())
        try:
            socket.send_fds(client, [b"!"], [process])
        except OSError:
            os._exit(1)
        for own in (process, client, *self._own()):
            _close(own)
        child.prepare()
        environ = {**child.environment(self._environ), **self._variables}
        path = child.path(sys.argv[1], self._environ)
        os.environ.clear()
        os.environ.update(environ)
        here = sys.path.index(sys.argv[1])
        sys.path[here : here + 1] = path
        importlib.invalidate_caches()

    def _look_after(self, forked: _Forked, source: object) -> None:
        """It has ended, or its client has, which ends it too."""
        pid, status = os.waitpid(forked.pid, os.WNOHANG)
        if not pid:
            if source is forked.client:
                self._selector.unregister(forked.client)
                signal.pidfd_send_signal(forked.ended, signal.SIGKILL)
            return
        try:
            forked.client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:  # nobody is there to be told
            pass
        for source in {key.fileobj for key in self._selector.get_map().values() if key.data == pid}:
            self._selector.unregister(source)
        forked.client.close()
        os.close(forked.ended)
        del self._forked[pid]


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


def _read(client: socket.socket, descriptors: list[int]) -> bytes:
    """A client's request; adds the descriptors that it has open."""
    length, received, _, _ = socket.recv_fds(client, 8, MAX_DESCRIPTORS, socket.MSG_WAITALL)
    descriptors += received
    with client.makefile("rb") as file:
        return file.read(int.from_bytes(length, "big"))


def _end() -> None:
    """At once: what libraries do at the end is for processes that have used them."""
    os._exit(0)


def _number(own: Any) -> int:
    return own if isinstance(own, int) else own.fileno()


def _close(own: Any) -> None:
    if isinstance(own, int):
        os.close(own)
    else:
        own.close()


def _check_threads() -> None:
    """Raises Refused where a fork would leave some behind."""
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        raise Refused(f"the fork server has {num_threads} threads, expected 1")


def modules_of(stages: Sequence[Stage]) -> Modules:
    """What several workers of the run import, or one of them for seconds.

    No module of an actor: naming the actor's class, Ray draws a number.
    """
    from ..config.engines import engine_kind

    generating = [stage.config.rollout for stage in stages if stage.recipe.generates]
    kinds = [engine_kind(rollout.engine_name) for rollout in generating]
    without = set.intersection(*(set(kind.without) for kind in kinds)) if kinds else set()
    before_ray = ["leeway.trainer.actor_critic", "leeway.tasks.prompting"]
    with_ray = ["leeway.replay.assemble", "leeway.replay.buffer", "leeway.replay.storage"]
    if without:  # torchrl's collectors load whatever engines there are
        before_ray.append("leeway.engines.hf_engine")
        with_ray.append("leeway.collector.collector")
    modules = Modules(before_ray, with_ray, sorted(without))
    for rollout, kind in zip(generating, kinds, strict=True):
        if kind.processes is not None:  # of the first stage that has some: another's start by themselves if they differ
            environ = kind.processes.environ(rollout.engine_options)
            return replace(modules, engine=kind.processes.modules, engine_environ=environ)
    return modules


def can_fork() -> bool:
    """Whether this system has what the server and its clients use."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def main() -> None:
    """`leeway` is imported from the first argument: see START."""
    _, _, driver, descriptors, last_address, modules = sys.argv
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # until it is a worker
    listening, *others = (socket.socket(fileno=number) for number in json.loads(descriptors))
    server = Server(
        listening,
        os.pidfd_open(int(driver)),
        Modules(**json.loads(modules)),
        for_engines=others[0] if others else None,
        variables={ENGINE_FORKS: last_address} if others else {},
    )
    server.serve()()
