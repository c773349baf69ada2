"""A run started from Python, in a process of its own, with a handle."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import plan_run
from .opened import OpenedRun, open_run

INTERRUPTED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
"""Negative: it was stopped before it could say how it ends."""
TAIL_LINES = 30


class JobFailed(RuntimeError):
    """The run failed; the message is its last words."""


def run(recipe: str, config: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Job:
    """Start `leeway run RECIPE --config CONFIG KEY=VALUE...`; returns at once.

    `overrides`: as on the command line, or a mapping from dotted key to value. Settings are checked here, and a wrong
    one raises ConfigError before anything starts; what the machine lacks is in the job's `output`, and fails it.

    The run has its own process and its own session: it neither shares memory with this one nor ends with it. It runs in
    this working directory, where it finds modules of yours.
    """
    given = as_overrides(overrides)
    stages = plan_run(str(config), recipe, given)
    return Job(stages[0].config.run_dir, ["run", recipe, "--config", str(config), *given])


def as_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """{"train.steps": 10, "name": "x"} -> ["train.steps=10", "name=x"]."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]


class Job:
    """A run under way or over. `path` is its folder, `arguments` those of the command line."""

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        self.path, self.arguments = path.absolute(), list(arguments)
        self._said = Path(tempfile.mkdtemp(prefix="leeway-job-")) / "output.log"
        command = [sys.executable, "-c", "from leeway.cli.main import main; main()", *arguments]
        with self._said.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __repr__(self) -> str:
        return f"Job({str(self.path)!r}: {self.status}, pid {self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> str:
        """running, completed, interrupted, refused (nothing was started) or failed."""
        code = self._process.poll()
        if code is None:
            return "running"
        return {0: "completed", 2: "refused"}.get(code, "interrupted" if code in INTERRUPTED else "failed")

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    @property
    def run(self) -> OpenedRun:
        """What it has written so far; raises ConfigError before its first stage has begun."""
        return open_run(self.path)

    def wait(self, timeout_s: float | None = None) -> OpenedRun:
        """The finished run. Raises JobFailed if it fails or is refused, TimeoutError if it is not over in time.

        One that was stopped counts as finished: it can be resumed.
        """
        self._wait(timeout_s)
        if self.status in ("completed", "interrupted"):
            return self.run
        last = self.output.splitlines()[-TAIL_LINES:]
        raise JobFailed("\n".join([f"{self.status}: leeway {' '.join(self.arguments)}", *last]))

    def stop(self, timeout_s: float | None = None) -> None:
        """Finish the step under way, save a checkpoint, end; nothing if it is over. `leeway resume` continues it.

        Raises TimeoutError if that is not done in time; it goes on ending then (`cluster.stop_timeout_s`).
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> None:
        begun = time.monotonic()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            took = time.monotonic() - begun
            raise TimeoutError(f"{self.path} is not over after {took:.0f} s; its last line: {self._last()}") from None

    def _last(self) -> str:
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "none yet")
