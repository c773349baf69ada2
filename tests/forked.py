"""Processes that have imported what the tests have, at the price of a fork: torch alone costs a new one seconds.

When all tests are collected, and none has run, pytest's process forks a server. It has one thread and starts none, so
what it forks for a test is what `python -c CODE` is once that has imported all that the tests import. To show something
of a process's own imports, or of the environment that libraries read when they are loaded, takes `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MAX_BYTES = 100_000
"""Of a request: mostly an environment."""
MAX_DESCRIPTORS = 8
ANSWER_S = 250.0
"""A server may still be importing."""
GIVES_MEMORY_BACK = """
import ctypes

libc = ctypes.CDLL("libc.so.6")
for setting, value in ((-8, 1), (-1, 2**20), (-3, 2**20)):  # arenas, and from which size on freed blocks are given back
    libc.mallopt(setting, value)
"""
"""The beginning of code that measures its memory: the C library keeps freed blocks for itself, some or all."""
_server: socket.socket | None = None


@dataclass(frozen=True)
class _Request:
    code: str
    args: Sequence[str]
    env: dict[str, str]
    cwd: str
    start_new_session: bool


class Forked:
    """As `subprocess.Popen([sys.executable, "-c", code, *args])`, with what the tests use of it.

    `stdin` and `stdout` are pipes if they are not given; `stderr` is this process's. It has `more` as descriptors 3, 4
    and so on. /proc shows its server's command line, and the environment of the process that `begin` was called in.
    `server`: another one than that of `begin`.
    """

    def __init__(
        self,
        code: str,
        *args: str,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = 2,
        more: Sequence[Any] = (),
        start_new_session: bool = False,
        server: socket.socket | None = None,
    ) -> None:
        server = server or _server
        assert server is not None, "no test runs yet"
        self.returncode: int | None = None
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_S)
        streams: list[Any] = [stdin, stdout, stderr, *more]
        self.stdin: BinaryIO | None = None
        self.stdout: BinaryIO | None = None
        if stdin is None:
            streams[0], write = os.pipe()
            self.stdin = os.fdopen(write, "wb")
        if stdout is None:
            read, streams[1] = os.pipe()
            self.stdout = os.fdopen(read, "rb")
        asked = _Request(code, args, dict(env), str(cwd or Path.cwd()), start_new_session)
        request = json.dumps(asdict(asked)).encode()
        assert len(request) < MAX_BYTES
        descriptors = [s if isinstance(s, int) else s.fileno() for s in streams]
        socket.send_fds(server, [request], [*descriptors, theirs.fileno()])
        theirs.close()
        if stdin is None:
            os.close(descriptors[0])
        if stdout is None:
            os.close(descriptors[1])
        self._ended = ours
        pid, (self._process,), _, _ = socket.recv_fds(ours, 4, 1)
        self.pid = int.from_bytes(pid, "big")

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._ended.settimeout(timeout)
            try:
                self.returncode = int.from_bytes(self._ended.recv(4), "big", signed=True)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
            self._ended.close()
            os.close(self._process)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its server has yet to say so
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, text: str = "", timeout: float | None = None) -> str:
        """Writes `text` to its stdin, and returns what it has written to its stdout once it has ended."""
        assert self.stdin is not None
        assert self.stdout is not None
        with self.stdin, self.stdout:
            self.stdin.write(text.encode())
            self.stdin.close()
            said = self.stdout.read().decode()
        self.wait(timeout)
        return said


def begin() -> None:
    """Fork the server. It ends with this process."""
    global _server
    assert _server is None
    _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
    else:
        serve(theirs, _set_environment)


def serve(requests: socket.socket, take_environment: Callable[[Mapping[str, str]], None]) -> NoReturn:
    """Fork for each request, until nobody can ask any more. `take_environment`: what a fork does with its own."""
    try:
        request = _serve(requests)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if request is not None:
        _become(request, take_environment)
    os._exit(0)


def _serve(requests: socket.socket) -> _Request | None:
    """Returns in each child what it is to be, and in the server itself None at its end."""
    faulthandler.disable()  # pytest's, to a descriptor that is closed now
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    keep = requests.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, 65_536)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                pid, told = key.data
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                with told:
                    try:
                        told.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
                    except OSError:  # nobody waits for it
                        pass
                continue
            text, descriptors, _, _ = socket.recv_fds(requests, MAX_BYTES, MAX_DESCRIPTORS)
            if not text:
                return None
            *streams, told = descriptors
            pid = os.fork()
            if pid == 0:
                selector.close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                os.closerange(len(streams), 65_536)
                return _Request(**json.loads(text))
            for stream in streams:
                os.close(stream)
            ended, conn = os.pidfd_open(pid), socket.socket(fileno=told)
            socket.send_fds(conn, [pid.to_bytes(4, "big")], [ended])
            selector.register(ended, selectors.EVENT_READ, (pid, conn))


def _become(request: _Request, take_environment: Callable[[Mapping[str, str]], None]) -> None:
    """What pytest has changed is undone, and the code run as a program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.start_new_session:
        os.setsid()
    os.chdir(request.cwd)
    take_environment(request.env)
    tempfile.tempdir = None  # where that was, the environment said
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.set_threshold(700, 10, 10)
    if (torch := sys.modules.get("torch")) is not None and "OMP_NUM_THREADS" in request.env:
        torch.set_num_threads(int(request.env["OMP_NUM_THREADS"]))
    path = [folder for folder in request.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = ["", *dict.fromkeys([*path, *filter(None, sys.path)])]
    sys.argv = ["-c", *request.args]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        exec(compile(request.code, "<string>", "exec"), program.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            sys.stdout.flush()
        os._exit(code)


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


_pointers: Any = None


def lay_out_environment(env: Mapping[str, str]) -> None:
    """Have `env` where a process that is started has it: /proc shows it, and what looks for it in memory finds it.

    The server needs as much room there, which its own environment has to leave.
    """
    global _pointers
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    entries = [os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items()]
    block = b"".join(entries)
    assert len(block) < end - start, f"an environment of {len(block)} bytes, room for {end - start}"
    os.environ.clear()
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
    addresses, at = [], start
    for entry in entries:
        addresses.append(at)
        at += len(entry)
    _pointers = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, None)
    ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value = ctypes.addressof(_pointers)
    encoded = {os.environ.encodekey(name): os.environ.encodevalue(value) for name, value in env.items()}  # type: ignore[attr-defined]
    os.environ._data.update(encoded)  # type: ignore[attr-defined]
