"""Runs untrusted code: each job in its own process, without network, files or privileges, within limits."""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import jail_wire as wire

_SCRIPT = Path(__file__).with_name("jail_process.py")
MAX_OUTPUT_BYTES = 2**20
_ONE = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"]
_MAX_KEYS = 1000  # of a set or dict that are no strings, see jail_wire
_TRIES = 2  # of a job whose zygote died under it


@dataclass(frozen=True)
class Limits:
    """Limits of one process: seconds of processor time and of sleep, memory and files in MB, concurrent threads.

    `cpu_s` is the processor time of all threads together. `timeout_s` is the time in which it neither computes nor
    waits for a processor, so a busy machine costs a program nothing. A process cannot start others, so it uses at
    most `memory_mb` (beyond the interpreter's own, which is shared) plus `disk_mb`.
    """

    cpu_s: int = 5
    timeout_s: float = 5.0
    memory_mb: int = 512
    disk_mb: int = 16
    threads: int = 16

    @property
    def backstop_s(self) -> float:
        """Seconds by the wall clock after which a job is ended whatever it has used."""
        return 10 * (self.cpu_s + self.timeout_s) + 10


@dataclass(frozen=True)
class Finished:
    """`finished`: the script ended by itself with exit code 0; `reason` says what happened otherwise."""

    finished: bool
    reason: str
    stdout: str


@dataclass(frozen=True)
class Verdict:
    """`is_bad_test`: no program could pass, because of the test."""

    passed: bool
    reason: str
    is_bad_test: bool


class JailError(RuntimeError):
    """A job gave no value; the message says why."""


class NoJailError(RuntimeError):
    """This system cannot jail a process, or not with these modules; the message says what is missing."""


class Jail:
    """A warm interpreter with `modules` imported, from which every job is forked. Works from any thread.

    A module is a name, or the path of a file that is loaded under its stem. `prepare`, if given, is called then:
    ("module:function", arguments ...), for work that no job should repeat. All of this is trusted: it runs before
    anything is locked. The first job starts the interpreter; one that has died is restarted.
    """

    def __init__(
        self,
        modules: Sequence[str | Path] = (),
        *,
        prepare: Sequence[str] = (),
        start_timeout_s: float = 60.0,
    ) -> None:
        self._modules = [str(module) for module in modules]
        self._prepare = list(prepare)
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None
        # More would not finish sooner; a few extra, because some may sleep.
        self._free = threading.BoundedSemaphore(len(os.sched_getaffinity(0)) + 2)

    def run(self, function: str, *arguments: Any, limits: Limits | None = None) -> Any:
        """The value of "module:function" for these arguments: data in, data out, see `jail_wire`.

        Raises JailError when the function raises, is out of time or memory, or returns something else than data, and
        NoJailError. The value is as honest as the code that ran: what evaluates a model's text returns what that wants.
        """
        job = _Job("call", limits or Limits(), wire.dumps([function, list(arguments)]))
        self._do(job)
        try:
            kind, value = wire.loads(job.replied, max_keys=_MAX_KEYS)
        except (ValueError, TypeError):
            raise JailError(job.reason or "the reply is no data") from None
        if kind != "value":
            raise JailError(f"raised {value}"[:1000])
        return value

    def run_script(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> Finished:
        """Run Python source as a script. Of what it prints, at most `MAX_OUTPUT_BYTES` are allowed."""
        job = _Job("program", limits or Limits(), wire.dumps([source, stdin]), takes_stdout=True)
        self._do(job)
        reason = job.reason
        if job.exit_code not in (0, None):
            reason = job.replied.decode(errors="replace") or reason
        return Finished(job.exit_code == 0 and not job.reason, reason, job.stdout.decode(errors="surrogateescape"))

    def judge(self, program: str, test: Any, *, limits: Limits | None = None) -> Verdict:
        """Whether a program passes one test, see `jail_judge`; `limits` are for the program and for the judge, each."""
        limits = limits or Limits()
        job = _Job("pair", limits, wire.dumps([program, test]), judge=replace(limits, disk_mb=0))
        self._do(job)
        try:
            passed, reason, is_bad_test = wire.loads(job.replied, max_keys=_MAX_KEYS)
        except (ValueError, TypeError):
            return Verdict(False, job.reason or "the test did not end", False)
        return Verdict(passed is True, str(reason), is_bad_test is True)

    def pid(self) -> int:
        """The interpreter's process id; starts it if necessary."""
        return self._living().pid

    def close(self) -> None:
        """End the interpreter, and with it all jobs; the next job starts a new one."""
        with self._lock:
            zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    def _do(self, job: _Job) -> None:
        with self._free:
            for _ in range(_TRIES):
                zygote = self._living()
                try:
                    return job.run(zygote)
                except ConnectionError:
                    self._forget(zygote)
        raise JailError("the jail's own process died twice")

    def _living(self) -> _Zygote:
        with self._lock:
            if self._zygote is None or not self._zygote.is_ours():
                self._zygote = _Zygote(self._modules, self._prepare, self._start_timeout_s)
            return self._zygote

    def _forget(self, zygote: _Zygote) -> None:
        with self._lock:
            if self._zygote is zygote:
                self._zygote = None
        zygote.close()


class _Zygote:
    """The process of a jail, as seen from outside: a control socket. It ends when the socket is closed."""

    def __init__(self, modules: list[str], prepare: list[str], start_timeout_s: float) -> None:
        self._owner_pid = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The folder is where the zygote makes its new root, which only it sees; once it has moved in, nobody needs it.
        with (
            theirs,
            tempfile.TemporaryFile() as errors,
            tempfile.TemporaryDirectory(prefix="leeway-jail-") as folder,
        ):
            # PYTHONHASHSEED: a set printed twice is printed in the same order. The rest keeps libraries to one thread,
            # and threads from reserving 64 MB of address space each.
            variables = dict.fromkeys(_ONE, "1")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", str(_SCRIPT)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/box", "PYTHONHASHSEED": "0", **variables},
                start_new_session=True,
            )
            self.pid = self._process.pid
            theirs.close()
            try:
                path = [p for p in sys.path if p]
                settings = {"modules": modules, "prepare": prepare, "path": path, "folder": folder}
                self._control.settimeout(start_timeout_s)
                self._control.send(json.dumps(settings).encode())
                reply = self._control.recv(2**16).decode()
            except (TimeoutError, ConnectionError) as error:
                reply = f"missing: its process did not answer ({type(error).__name__})"
            if reply != "ready":
                self.close()
                errors.seek(0)
                last = (errors.read().decode(errors="replace").strip().splitlines() or ["its process ended"])[-1]
                raise NoJailError(f"no jail for code on this system: {reply.removeprefix('missing: ') or last}")
        self._control.settimeout(None)
        self._lock = threading.Lock()

    def is_ours(self) -> bool:
        """A copy of this process that was forked shares the socket, and must not talk on it."""
        return self._owner_pid == os.getpid()

    def order(self, order: dict[str, Any], fds: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(order).encode()], fds)

    def close(self) -> None:
        self._control.close()
        if self.is_ours():
            self._process.kill()
            self._process.wait()


class _Job:
    """One job: its input and its result. `reason` is empty when all its processes ended by themselves."""

    def __init__(
        self,
        kind: str,
        limits: Limits,
        request: bytes,
        *,
        takes_stdout: bool = False,
        judge: Limits | None = None,
    ) -> None:
        self._order = {"kind": kind, "limits": _as_told(limits), "judge": _as_told(judge) if judge else None}
        self._cpu_s = limits.cpu_s
        self._backstop_s = limits.backstop_s
        self._request = request
        self._takes_stdout = takes_stdout
        self.replied, self.stdout, self.reason, self.exit_code = b"", b"", "", None

    def run(self, zygote: _Zygote) -> None:
        """Raises ConnectionError when the zygote dies."""
        ours, theirs = socket.socketpair()
        status_read, status_write = os.pipe()
        stdout_read, stdout_write = os.pipe() if self._takes_stdout else (-1, -1)
        to_close = [ours.detach(), status_read, *([stdout_read] if self._takes_stdout else [])]
        data = to_close[0]
        try:
            given = [status_write, theirs.fileno(), *([stdout_write] if self._takes_stdout else [])]
            try:
                zygote.order(self._order, given)
            finally:
                theirs.close()
                for fd in (status_write, *([stdout_write] if self._takes_stdout else [])):
                    os.close(fd)
            self._talk(data, status_read, stdout_read)
        finally:
            for fd in to_close:
                os.close(fd)

    def _talk(self, data: int, status: int, stdout: int) -> None:
        os.set_blocking(data, False)
        to_send = memoryview(len(self._request).to_bytes(4, sys.byteorder) + self._request)
        replied, printed, ended = bytearray(), bytearray(), b""
        poll = select.poll()
        poll.register(data, select.POLLIN | select.POLLOUT)
        poll.register(status, select.POLLIN)
        if stdout >= 0:
            poll.register(stdout, select.POLLIN)
        until = time.monotonic() + self._backstop_s * 2 + 60  # the zygote keeps the time; this is if it does not
        while not ended:
            if time.monotonic() > until:
                raise ConnectionError("the jail's process keeps no time")
            for fd, event in poll.poll(1000):
                if fd == status:
                    ended = os.read(status, 2**16)
                    if not ended:
                        raise ConnectionError("the jail's process died")
                elif fd == stdout:
                    _read_into(printed, stdout, MAX_OUTPUT_BYTES, poll)
                elif event & select.POLLOUT and to_send:
                    try:
                        to_send = to_send[os.write(data, to_send) :]
                    except (BrokenPipeError, ConnectionResetError):
                        to_send = to_send[:0]
                    except BlockingIOError:
                        pass
                    if not to_send:
                        poll.modify(data, select.POLLIN)
                else:
                    _read_into(replied, data, wire.MAX_BYTES + 4, poll)
            if len(printed) > MAX_OUTPUT_BYTES or len(replied) > wire.MAX_BYTES + 4:
                self.reason = f"more than {MAX_OUTPUT_BYTES} bytes of output"
                return
        # All its processes have ended: what is left in the pipes is all there will be.
        for buffer, fd, limit in ((printed, stdout, MAX_OUTPUT_BYTES), (replied, data, wire.MAX_BYTES + 4)):
            while fd >= 0 and len(buffer) <= limit and _read_into(buffer, fd, limit, None):
                pass
        if len(printed) > MAX_OUTPUT_BYTES or len(replied) > wire.MAX_BYTES + 4:
            self.reason = f"more than {MAX_OUTPUT_BYTES} bytes of output"
            return
        self.stdout = bytes(printed)
        size = int.from_bytes(replied[:4], sys.byteorder)
        self.replied = bytes(replied[4 : 4 + size]) if len(replied) >= 4 + size else b""
        self._understand(json.loads(ended))

    def _understand(self, status: dict[str, Any]) -> None:
        # Of a pair, the program's end says more than the judge's.
        of = status["ended"].get("judged") or next(iter(status["ended"].values()))
        self.exit_code = of["exit"]
        if status["stopped"]:
            self.reason = f"stopped: {status['stopped']}"
        elif self.exit_code is not None and self.exit_code < 0:
            out_of_time = of["used_s"] > self._cpu_s - 0.5
            self.reason = f"killed: {'processor time' if out_of_time else 'memory, or a crash'}"
        elif self.exit_code:
            self.reason = f"exit code {self.exit_code}"


def _as_told(limits: Limits) -> dict[str, float]:
    return {**asdict(limits), "backstop_s": limits.backstop_s}


def _read_into(buffer: bytearray, fd: int, limit: int, poll: Any) -> int:
    """Read once, up to one byte above the limit; returns how many bytes came, 0 at the end."""
    try:
        part = os.read(fd, min(2**16, limit + 1 - len(buffer)))
    except (BlockingIOError, ConnectionResetError):
        part = b""
    if not part and poll is not None:
        poll.unregister(fd)
    buffer += part
    return len(part)


PLAIN = Jail()
"""The standard library only: for programs that a model wrote."""


@functools.cache
def why_not() -> str | None:
    """Why programs cannot be jailed on this system; None if they can."""
    try:
        done = PLAIN.run_script("import math")
    except NoJailError as error:
        return str(error)
    return None if done.finished else f"the jail does not run: {done.reason}"
