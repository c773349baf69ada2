"""Ends processes that do not end by themselves: a thread of the driver that needs neither Ray nor the event loop.

It takes signals as they arrive, knows which processes of the run are dead or stopped, and holds the deadline of an
ending. When that passes, it writes the outcome, removes what belongs to the run, and exits with the right code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..failures import Kind, PartFailed

TICK_S = 0.5
STOPPED_S = 30.0
"""A process that is stopped for this long (SIGSTOP) fails the run."""
STOPPED_AT_THE_END_S = 5.0
"""The same during an ending: a checkpoint does not wait longer for it."""
DEAD_S = 10.0
"""A process that died this long ago fails the run, if no call to its part has failed until then: vLLM answers no call
that was under way when its engine's process died.
"""
FAIL_S = 60.0
"""How long the parts of a failed run may take to end."""
LEAVE_S = 60.0
"""How long leaving Ray and writing the summary may take."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: `status` and `cause` as in summary.json, and the exit code."""

    status: str
    cause: str
    code: int


@dataclass(eq=False)
class _Process:
    part: str
    pid: int
    what: str  # "process", "engine process", or of which kind Ray's is
    kind: Kind
    started: str | None
    instead: Callable[[PartFailed], Any] | None = None
    stopped_ticks: int = 0
    died_at: float | None = None


class RunWatch:
    """`force(outcome)` is called in the watch's thread when an ending's deadline passes; it must end the process.

    `stop_s`: how long the step under way and saving may take after an interrupt. `blocked_s`: how long the driver's
    event loop may be busy with one thing. `on_ending(outcome, within_s)` is called for every deadline that is set, and
    `on_parts_ending()` is called before parts are ended on purpose.
    """

    def __init__(
        self,
        *,
        force: Callable[[Outcome], Any],
        stop_s: float,
        blocked_s: float = 3600.0,
        on_ending: Callable[[Outcome, float], Any] = lambda outcome, within_s: None,
        on_parts_ending: Callable[[], Any] = lambda: None,
    ) -> None:
        self._force, self._on_ending, self._on_parts_ending = force, on_ending, on_parts_ending
        self._stop_s, self._blocked_s = stop_s, blocked_s
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._deadline: float | None = None
        self._failure: PartFailed | None = None
        self._broken: list[asyncio.Future[PartFailed]] = []
        self._leaving = False
        self._closed = False
        self._beat_asked = self._beat_seen = time.monotonic()
        self.cluster_broken = False

    # -- beginning and ending -------------------------------------------------------------------------------------

    def begin(self, on_interrupt: Callable[[signal.Signals], Any]) -> None:
        """Start to watch; call it in the main thread's event loop. `on_interrupt` is called in the loop, once."""
        self._loop, self._on_interrupt = asyncio.get_running_loop(), on_interrupt
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self.take_signals()
        self._thread = threading.Thread(target=self._run, daemon=True, name="leeway-watch")
        self._thread.start()

    def take_signals(self) -> None:
        """Handle SIGINT and SIGTERM from now on, even while the main thread is inside a library call.

        Ray installs its own handler when it starts, so call this again after that.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def close(self) -> None:
        """The run is over; restore the earlier signal handlers."""
        self._closed = True
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.write(self._wake_write, b"\0")
        self._thread.join(5)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def failed(self, failure: PartFailed) -> None:
        """The run has failed with this; its parts have FAIL_S to end. An earlier interrupt stays the cause."""
        self._set(Outcome("failed", str(failure), failure.exit_code), FAIL_S, sooner=True)

    def leaving(self, outcome: Outcome) -> None:
        """All parts have ended, or were given up: the last part of every ending. Signals change nothing any more.

        What a run has come to is worth as much time as an interrupt: its weights, which may be many, are summed up.
        """
        self._leaving = True
        with self._lock:
            self._outcome = outcome
        self._set(outcome, LEAVE_S if outcome.code else max(LEAVE_S, self._stop_s), sooner=False)

    @property
    def outcome(self) -> Outcome | None:
        """What came first, an interrupt or a failure; None if there was neither."""
        return self._outcome

    def _set(self, outcome: Outcome, within_s: float, *, sooner: bool) -> None:
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
            deadline = time.monotonic() + within_s
            if sooner and self._deadline is not None:
                deadline = min(self._deadline, deadline)
            self._deadline = deadline
            outcome = self._outcome
        self._on_ending(outcome, deadline - time.monotonic())

    # -- processes ------------------------------------------------------------------------------------------------

    def add(
        self,
        part: str,
        pids: Iterable[int],
        *,
        what: str = "process",
        kind: Kind = Kind.DIED,
        instead: Callable[[PartFailed], Any] | None = None,
    ) -> None:
        """Processes on this machine that the run needs. Those of `kind` CLUSTER are Ray's own.

        `instead`: called in the loop, instead of ending the run, when one of them died or is stopped for `STOPPED_S`;
        it says how, and may be called again until the part is forgotten.
        """
        with self._lock:
            self._processes += [_Process(part, pid, what, kind, _start_time(pid), instead) for pid in pids]

    def kill(self, part: str) -> None:
        """Kill what is left of a part that is to be replaced, and forget it."""
        with self._lock:
            own = [p for p in self._processes if p.part == part]
            self._processes = [p for p in self._processes if p.part != part]
        for process in own:
            if _start_time(process.pid) == process.started is not None and not _cleans_up(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def forget_parts(self) -> None:
        """The parts are about to be ended on purpose; Ray's own processes are still needed."""
        self._on_parts_ending()
        with self._lock:
            self._processes = [p for p in self._processes if p.kind == Kind.CLUSTER]

    def forget_all(self) -> None:
        with self._lock:
            self._processes = []

    def process_ids(self) -> list[int]:
        """The added parts that are still the same process."""
        return [p.pid for p in self._processes if p.died_at is None and _start_time(p.pid) == p.started]

    def evidence(self) -> list[PartFailed]:
        """The current state of the processes: which died, in the order in which they did, and which are stopped."""
        self._look()
        with self._lock:
            needed = [p for p in self._processes if p.instead is None]
            dead = sorted((p.died_at, i, p) for i, p in enumerate(needed) if p.died_at is not None)
            stopped = [p for p in needed if p.stopped_ticks]
        return [_death(p) for _, _, p in dead] + [_standstill(p) for p in stopped]

    async def until_broken(self) -> None:
        """Raises `PartFailed` when the run cannot continue: a process is stopped, or died and nobody said so."""
        future: asyncio.Future[PartFailed] = asyncio.get_running_loop().create_future()
        self._broken.append(future)
        if self._failure is not None:
            raise self._failure
        raise await future

    def break_off(self, failure: PartFailed) -> None:
        """End the run with this failure, whatever it is doing."""
        if self._failure is not None or self._leaving:
            return
        self._failure = failure
        self.cluster_broken = self.cluster_broken or failure.kind == Kind.CLUSTER
        self.failed(failure)
        self._in_loop(self._tell_broken)

    def _tell_broken(self) -> None:
        assert self._failure is not None
        for future in self._broken:
            if not future.done():
                future.set_result(self._failure)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            ready, _, _ = select.select([self._wake_read], [], [], TICK_S)
            for number in os.read(self._wake_read, 4096) if ready else b"":
                if number in (signal.SIGINT, signal.SIGTERM):
                    self._interrupted(signal.Signals(number))
            if self._closed:
                return
            if not ready:  # a tick; while this process itself is stopped there are none, and nothing runs out
                self._tick()
            if self._deadline is not None and time.monotonic() > self._deadline:
                assert self._outcome is not None
                self._force(self._outcome)
                return

    def _interrupted(self, number: signal.Signals) -> None:
        if self._leaving or (self._outcome is not None and self._outcome.status == "interrupted"):
            return  # a second signal must not cut a checkpoint short
        outcome = Outcome("interrupted", f"interrupted by {number.name}", 128 + number)
        self._set(outcome, self._stop_s + LEAVE_S, sooner=True)
        if self._outcome is outcome:
            self._in_loop(lambda: None if self._leaving else self._on_interrupt(number))

    def _tick(self) -> None:
        self._look()
        for process in list(self._processes):
            if process.died_at is not None:
                unheard = self._outcome is None and time.monotonic() - process.died_at > DEAD_S
                if unheard or process.kind == Kind.CLUSTER or process.instead is not None:
                    self._end(process, _death(process))
            elif process.stopped_ticks * TICK_S >= (STOPPED_S if self._outcome is None else STOPPED_AT_THE_END_S):
                self._end(process, _standstill(process))
        now = time.monotonic()
        if self._beat_seen >= self._beat_asked:
            self._beat_asked = now
            self._in_loop(self._beat)
        elif now - self._beat_asked > self._blocked_s:
            self.break_off(PartFailed("driver", f"its event loop has been blocked for {self._blocked_s:g} s"))

    def _end(self, process: _Process, failure: PartFailed) -> None:
        instead = process.instead
        if instead is None:
            self.break_off(failure)
        else:
            self._in_loop(lambda: instead(failure))

    def _beat(self) -> None:
        self._beat_seen = time.monotonic()

    def _look(self) -> None:
        with self._lock:
            for process in self._processes:
                state = _state(process.pid) if _start_time(process.pid) == process.started else None
                if process.died_at is None and state in (None, "Z", "X"):
                    process.died_at = time.monotonic()
                process.stopped_ticks = process.stopped_ticks + 1 if state == "T" else 0

    def _in_loop(self, function: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: nobody is left to notify
            pass


def _death(process: _Process) -> PartFailed:
    return PartFailed(process.part, f"the {process.what} died (pid {process.pid})", kind=process.kind)


def _standstill(process: _Process) -> PartFailed:
    kind = process.kind if process.kind == Kind.CLUSTER else Kind.STOPPED
    cause = f"the {process.what} is stopped (pid {process.pid}, SIGSTOP); kill -CONT would continue it"
    return PartFailed(process.part, cause, kind=kind)


def _cleans_up(pid: int) -> bool:
    """Python's tracker of shared memory ends when those do whose memory it removes."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def _state(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[0] if fields else None


def _start_time(pid: int) -> str | None:
    """Distinguishes a process from a later one with the same id."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
