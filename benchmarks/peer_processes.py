"""The processes of a run that a benchmark has started: which they are, what they take, and their end."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

import psutil

MARK = "LEEWAY_PEERS_RUN"
"""The variable by which a run's processes are known: its value is the run's label."""
SEEN: dict[str, dict[int, float]] = {}
"""Of each run, when its processes began, by their numbers."""


def of_run(label: str) -> list[psutil.Process]:
    """All processes of the run: they inherit a variable, wherever their parents are. One that gives itself a title, as
    vLLM's do, may write it over its variables: it is its parent's, and stays the run's when that has ended.
    """
    seen = SEEN.setdefault(label, {})
    found, others = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            is_own = seen.get(process.pid) == process.create_time() or process.environ().get(MARK) == label
            found.append(process) if is_own else others.append((process, process.ppid()))
    known = {process.pid for process in found}
    while new := [process for process, parent in others if parent in known and process.pid not in known]:
        found += new
        known |= {process.pid for process in new}
    for process in found:
        with contextlib.suppress(psutil.Error):
            seen[process.pid] = process.create_time()
    return found


def cpu_seconds(label: str) -> float:
    total = 0.0
    for process in of_run(label):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def kill(label: str) -> None:
    until = time.monotonic() + 10  # what waits for a device ends when that has answered
    while (left := of_run(label)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    if left:
        print(
            f"{label}: {len(left)} processes are left after 10 s: {[p.pid for p in left]}", file=sys.stderr, flush=True
        )


class Memory:
    """Samples what the processes of a run hold, every three seconds; shared pages count for each by its part."""

    def __init__(self, label: str) -> None:
        self.peak = 0
        self.is_stopped = False  # a stopped run's memory stays as it is
        self._label, self._ended = label, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(3.0):
            if self.is_stopped:
                continue
            total = 0
            for process in of_run(self._label):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
                    total += int(rollup.split("Pss:")[1].split()[0]) * 1024
            self.peak = max(self.peak, total)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(10)
