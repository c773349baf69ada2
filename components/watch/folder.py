"""A run's folder: whether it lives, what it is set to, and what it died of. Read-only, and no lock is ever taken."""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from ..config.errors import ConfigError
from ..config.load import read_tree
from ..config.tree import settings_in
from .lines import last_lines

MAX_JSON = 16 << 20
LOG_LINES = 40
ELSEWHERE_S = 120.0
"""A run on another host lives if it has written within this time."""
Kind = Literal["waiting", "live", "finished", "stopped", "dead"]

WAITED_FOR = {
    "generator": "the trainer waited for the groups that it held, and the replay buffer kept their slots",
    "trainer": "the generators waited for slots and for its next version",
    "replay": "the generators could not deliver, and the trainer got no batch",
    "param_server": "the generators got no new weights, and the trainer could not announce its version",
    "ray": "every part: all calls between them go through it",
    "driver": "every part: the driver starts them and hands batches and versions on",
}


@dataclass(frozen=True, kw_only=True)
class State:
    """`kind`: waiting (nothing written yet), live, finished, stopped (on purpose), dead."""

    kind: Kind
    text: str
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Death:
    """`part` is empty if the cause names none. `log`: the last lines of its log, `log_file` relative to the run."""

    cause: str
    part: str
    waited: str
    log_file: str = ""
    log: list[str] = field(default_factory=list)
    advice: str = ""


class RunFolder:
    """`path` as it was given is what the page shows; `name` is what the page calls it."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path, self.shown_path = path.absolute(), path
        self.name = name or self.path.name
        self._settings: dict[str, Any] = {}
        self._of_stage: dict[str, Mapping[str, Any]] = {}
        self._settings_read: tuple[float, int] | None = None

    def stage_dirs(self) -> dict[str, Path]:
        """Folders of stages that have begun, in order of beginning; of a run without stages, itself."""
        found = {}
        try:
            candidates = [p for p in (self.path / "stages").iterdir() if p.is_dir()]
        except OSError:
            candidates = []
        candidates = [p for p in candidates if _mtime(p / "metrics.jsonl") or (p / "logs").is_dir()]
        for folder in sorted(candidates, key=_began):
            found[folder.name] = folder
        if not found and ((self.path / "metrics.jsonl").exists() or (self.path / "rollouts").is_dir()):
            found["run"] = self.path
        return found

    def state(self, last_metric: float) -> State:
        """`last_metric`: when a metric was last written, in seconds since the epoch; 0: never."""
        summary = read_object(self.path / "summary.json")
        if self._is_running(last_metric):
            return State(kind="live", text="live")
        if summary is None:
            if not (self.path / "run.json").exists() and not self.stage_dirs():
                return State(kind="waiting", text="not started")
            cause = "driver: it ended without a word; no summary.json was written"
            return State(kind="dead", text="died", cause=cause)
        status, cause = str(summary.get("status", "")), str(summary.get("cause", ""))
        if status == "completed":
            return State(kind="finished", text="finished", cause=cause)
        if status == "interrupted":
            return State(kind="stopped", text="stopped", cause=cause)
        return State(kind="dead", text=status or "failed", cause=cause)

    def summary(self) -> dict[str, Any]:
        return read_object(self.path / "summary.json") or {}

    def record(self) -> dict[str, Any]:
        return read_object(self.path / "run.json") or {}

    def settings(self, stage: str) -> Mapping[str, Any]:
        """Values by dotted key, those of the stage over those of the run; {} where config.yaml cannot be read."""
        file = self.path / "config.yaml"
        try:
            stat = file.stat()
        except OSError:
            return {}
        if self._settings_read != (seen := (stat.st_mtime, stat.st_size)):
            try:
                self._settings = read_tree(file)
            except ConfigError:
                self._settings = {}
            self._of_stage, self._settings_read = {}, seen
        if stage not in self._of_stage:
            self._of_stage[stage] = self._settings_of(stage)
        return self._of_stage[stage]

    def _settings_of(self, stage: str) -> dict[str, Any]:
        own = {key: value for key, value in settings_in(self._settings) if not key.startswith("stages.")}
        stages = self._settings.get("stages")
        if isinstance(stages, dict) and isinstance(stages.get(stage), dict):
            own |= dict(settings_in(stages[stage]))
        return own

    def death(self, state: State, stage_dir: Path | None) -> Death | None:
        """Why it died, from what it left; None if it did not."""
        if state.kind != "dead":
            return None
        part, _, rest = state.cause.partition(": ")
        if not rest or " " in part or len(part) > 60:
            part = ""
        kind = part.rstrip("0123456789-") if part else ""
        log = self._log_of(part, stage_dir)
        return Death(
            cause=state.cause,
            part=part,
            waited=WAITED_FOR.get(kind, ""),
            log_file=str(log.relative_to(self.path)) if log else "",
            log=_tail(log) if log else [],
            advice=f"leeway resume {shlex.quote(str(self.shown_path))}"
            if stage_dir and (stage_dir / "checkpoints").is_dir()
            else "",
        )

    def _log_of(self, part: str, stage_dir: Path | None) -> Path | None:
        """The newest log of the part, or else of the driver; part names are compared with file names, never joined."""
        logs: list[Path] = []
        for folder in (stage_dir / "logs" if stage_dir else None, self.path / "logs"):
            try:
                logs += [p for p in folder.rglob("*.log") if p.is_file()] if folder else []
            except OSError:
                continue
        for name in (part, part.rstrip("0123456789").rstrip("-") if part else "", "driver"):
            own = [p for p in logs if name and (p.stem == name or p.stem.startswith(f"{name}-"))]
            own = [p for p in own if _mtime(p)]
            if own:
                return max(own, key=_mtime)
        return None

    def _is_running(self, last_metric: float) -> bool:
        """Whether the holder of run.lock lives. The lock itself is left alone: a driver that starts must get it."""
        holder = read_object(self.path / "run.lock")
        if holder is None:
            return False
        if holder.get("host") != socket.gethostname():
            return time.time() - last_metric < ELSEWHERE_S
        try:
            return abs(psutil.Process(int(holder["pid"])).create_time() - float(holder["started"])) < 1.0
        except (KeyError, TypeError, ValueError, OverflowError, psutil.Error):
            return False


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a small file; None if there is none that can be read."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_JSON))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _tail(path: Path) -> list[str]:
    lines = last_lines(path, 64 << 10)
    return [line.decode("utf-8", "replace")[:500] for line in lines[-LOG_LINES:]]


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _began(folder: Path) -> float:
    """When the stage wrote its first line; a folder's own time changes with its files."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            return float(json.loads(file.readline(1 << 20))["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _mtime(folder)
