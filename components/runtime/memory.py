"""What each part of a run holds in main memory, as the kernel counts it: by looking at its processes, which do nothing.

A process's memory is its proportional share (PSS): of a page that several have mapped, each has a part. So the parts
add up to what the run takes, shared memory included. Of this host alone; GPUs are seen by who uses them.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict

from .footprint import MARK_ENV, marked

PARTS = {
    "ray::TrainerActor": "trainer",
    "ray::CollectorActor": "generator",
    "VLLM::": "generator",
    "ray::ReplayBufferActor": "replay",
    "ray::ParameterServerActor": "param_server",
    "ray::AuxiliaryActor": "auxiliary",
}
"""By what a process's title begins with. Ray's own processes hold the object store; the rest serve environments."""
_RAY = re.compile(r"raylet|gcs_server|/ray/|ray::|fork_client|fork_server")
_KIB = 2**20  # KiB in a GiB


class MemoryMeter:
    """Remembers the most that each part was seen to hold."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}

    def look(self) -> dict[str, float]:
        """`memory/PART/gib`, the sum over the part's processes now, and `memory/PART/peak_gib`; costs milliseconds.

        A process's peak is what it holds now, and as much more as was ever resident at once.
        """
        now: defaultdict[str, float] = defaultdict(float)
        peaks: defaultdict[str, float] = defaultdict(float)
        for pid, part in [(os.getpid(), "driver"), *self._others()]:
            held = _held_gib(pid)
            if held is not None:
                now[part] += held[0]
                peaks[part] += held[1]
        for part, peak in peaks.items():
            self._peaks[part] = max(peak, self._peaks.get(part, 0.0))
        held_now = {f"memory/{part}/gib": gib for part, gib in now.items()}
        return held_now | {f"memory/{part}/peak_gib": gib for part, gib in self._peaks.items()}

    def _others(self) -> list[tuple[int, str]]:
        mark = os.environ.get(MARK_ENV)
        return [] if mark is None else [(pid, part_of(_title(pid))) for pid in marked(mark)]


def part_of(title: str) -> str:
    """The part that a process with this title belongs to."""
    found = next((part for begin, part in PARTS.items() if title.startswith(begin)), None)
    return found or ("ray" if _RAY.search(title) else "environment")


def _title(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it has ended
        return ""


def _held_gib(pid: int) -> tuple[float, float] | None:
    """(GiB now, at the peak) of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            share = _kib(file.read(), "Pss")
        with open(f"/proc/{pid}/status") as file:
            status = file.read()
    except OSError:
        return None
    beyond = _kib(status, "VmHWM") - _kib(status, "VmRSS")
    return share / _KIB, (share + max(0, beyond)) / _KIB


def _kib(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) if found else 0
