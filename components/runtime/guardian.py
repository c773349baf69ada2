"""A small process next to the driver, for endings that the driver does not survive.

It removes what a run has on this machine when the driver is done or dead, writes the summary if the driver could not,
and kills a driver that exceeds an ending's deadline. It reads one JSON object per line from its standard input, and
the end of that input means that the driver died. It needs neither Ray nor an event loop.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .footprint import Footprint

LOOK_S = 10.0
"""How often files in shared memory are noted; each look reads the memory map of every process of the run."""
GRACE_S = 15.0
"""After a deadline the driver's own watch acts first."""


class Guardian:
    """The driver's side of it."""

    def __init__(self, footprint: Footprint, run_dir: Path, *, detached: bool = False) -> None:
        """`detached`: no child of this process, with which its children may be killed."""
        settings = {"mark": footprint.mark, "scratch": str(footprint.scratch), "run_dir": str(run_dir)}
        settings |= {"driver": os.getpid(), "started": time.time()}
        self._footprint = footprint
        apart = ["setsid", "--fork"] if detached else []
        self._process = subprocess.Popen(
            # -P: no module in the working directory can shadow one of Python's own.
            [*apart, sys.executable, "-P", "-m", "leeway.runtime.guardian", json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": str(Path(sys.modules["leeway"].__file__ or "").absolute().parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver
            cwd="/",
        )

    def ending(self, status: str, cause: str, within_s: float) -> None:
        """The run is ending with this outcome; after `within_s` and a grace period, a remaining driver is killed."""
        self._tell({"status": status, "cause": cause, "within_s": within_s})

    def look(self) -> None:
        """Record now which files in shared memory are the run's: the processes that have them open are about to end."""
        self._tell({"look": True})

    def finish(self, timeout_s: float = 25.0) -> None:
        """Have everything removed, and wait for that. Without a guardian the driver removes it."""
        self._tell({"done": True})
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._footprint.scratch.exists():
            self._footprint.remove()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it was killed; `finish` does its work
            pass


def main() -> None:
    """Watch until the driver reports that it is done, or is gone."""
    settings = json.loads(sys.argv[1])
    footprint = Footprint(settings["mark"], Path(settings["scratch"]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seen: set[Path] = set()
    outcome: dict[str, Any] = {"status": "failed", "cause": "driver: the process died"}
    deadline: float | None = None
    done, text = False, b""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    # Beside the end of the input: a process that the driver forked may hold the other end of the pipe.
    driver = _pid_fd(settings["driver"])
    if driver is not None:
        selector.register(driver, selectors.EVENT_READ)
    while not done:
        wait_s = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
        ready = [key.fd for key, _ in selector.select(wait_s)]
        if ready == [driver]:  # and there is nothing left to read
            break
        if not ready:
            seen |= footprint.shared_memory()
            if deadline is not None and time.monotonic() >= deadline:
                _kill_driver(settings["driver"])
                deadline = None
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, text = (text + chunk).split(b"\n")
        for message in map(json.loads, lines):
            done = done or "done" in message
            seen |= footprint.shared_memory()
            if "status" in message:
                outcome = {"status": message["status"], "cause": message["cause"]}
                deadline = time.monotonic() + message["within_s"] + GRACE_S
    run_dir = Path(settings["run_dir"])
    if not done:
        footprint.keep_ray_logs(run_dir / "logs" / "ray")
    stuck = footprint.remove(seen)
    if stuck:
        print(f"leeway: processes {stuck} do not end: the kernel cannot kill them", file=sys.stderr)
    if not done and write_summary_for_the_dead(run_dir, outcome, settings["started"]):
        print(f"leeway: {outcome['status']}: {outcome['cause']}", file=sys.stderr, flush=True)


def write_summary_for_the_dead(run_dir: Path, outcome: dict[str, Any], started: float) -> bool:
    """Write a summary.json with the common keys, unless the run has written its own. Returns whether it did."""
    path = run_dir / "summary.json"
    if not run_dir.is_dir() or (path.exists() and path.stat().st_mtime >= started):
        return False
    summary = {**outcome, "wall_s": round(time.time() - started, 1), "weights_sha256": None, "versions": {}}
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps({**summary, "stages": {}}, indent=2) + "\n")
    partial.replace(path)
    return True


def _pid_fd(pid: int) -> int | None:
    """A descriptor that can be read from once the process is gone; None where the system has none, or it is gone."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _kill_driver(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    main()
