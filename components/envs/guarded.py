"""Evaluates formulas in a small pool of processes, from any thread; a process is killed if a formula takes too long.

math-verify's own time-outs use signal.alarm: they work in the main thread only, and not while C code runs (9**9**9**9).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("scorer_process.py")


class ScorerPool:
    """Up to `num_workers` scoring processes, started when needed; `values` works from any thread.

    The limit is processor time (`scorer_process.MAX_CPU_S`), so other work on the machine does not count. `deadline_s`
    of wall time only ends a process that has stopped computing.
    """

    def __init__(self, *, num_workers: int = 2, deadline_s: float = 120.0, start_timeout_s: float = 300.0) -> None:
        self.deadline_s = deadline_s
        self._start_timeout_s = start_timeout_s
        self._free = threading.Semaphore(num_workers)
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def values(self, formulas: Sequence[str]) -> list[list[str] | None]:
        """See `scorer_process.values`; None for each if they take too long, or kill their process twice.

        Raises RuntimeError when a process cannot be started at all.
        """
        request = json.dumps(formulas)
        with self._free:
            # A process that died may have been killed for reasons of its own, so it gets a second try; one that used up
            # its time does not.
            for _attempt in range(2):
                worker = self._take_worker()
                try:
                    found = worker.ask(request, self.deadline_s)
                except (TimeoutError, ConnectionError) as error:
                    out_of_time = isinstance(error, TimeoutError) or worker.is_out_of_cpu()
                    worker.kill()
                    reason = "out of processor time" if out_of_time else error
                    logger.warning("math_verify: no value: %s, of %.120r", reason, formulas)
                    if out_of_time:
                        break
                except BaseException:
                    worker.kill()
                    raise
                else:
                    with self._lock:
                        self._idle.append(worker)
                    return found
            return [None] * len(formulas)

    def close(self) -> None:
        """End the idle processes; a later `score` starts new ones."""
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.kill()

    def _take_worker(self) -> _Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return _Worker(self._start_timeout_s)
            if worker.is_alive():
                return worker
            worker.kill()


class _Worker:
    """One scoring process and its two pipes."""

    def __init__(self, start_timeout_s: float) -> None:
        self._owner_pid = os.getpid()
        self._pending = b""
        with tempfile.TemporaryFile() as errors:
            # -P: the folder of the script must not come first on sys.path, where its neighbours would hide other
            # packages.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
            try:
                self._read_line(time.monotonic() + start_timeout_s)
            except (TimeoutError, ConnectionError) as error:
                self.kill()
                errors.seek(0)
                last_line = (errors.read().decode(errors="replace").strip() or str(error)).splitlines()[-1]
                raise RuntimeError(
                    f"env.reward: the math_verify process did not start within {start_timeout_s:g} s: {last_line}; "
                    "is math-verify installed?"
                ) from None

    def ask(self, request: str, deadline_s: float) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(request.encode() + b"\n")
        return json.loads(self._read_line(time.monotonic() + deadline_s))

    def is_out_of_cpu(self) -> bool:
        """Whether the kernel killed the process, which has closed its pipes, for using too much processor time."""
        try:
            return self._process.wait(timeout=5) == -signal.SIGPROF
        except subprocess.TimeoutExpired:
            return False

    def is_alive(self) -> bool:
        # After a fork the pipes are shared with the parent: two askers would read each other's answers.
        return self._owner_pid == os.getpid() and self._process.poll() is None

    def kill(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if self._owner_pid == os.getpid():
            self._process.kill()
            self._process.wait()

    def _read_line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        poller = select.poll()  # not select.select: it fails on descriptors above 1023
        poller.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._pending:
            remaining_s = until - time.monotonic()
            if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
                raise TimeoutError("deadline passed")
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise ConnectionError("the scoring process died")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line
