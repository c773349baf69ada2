"""A run's folder over its whole life: which driver runs in it now, and how long each part of the run took.

run.json   the requested recipe, the files of the user's own recipes, and one entry per part: a run that was stopped
           and resumed has two
run.lock   present while a driver runs here: its process and host
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ..config import Recipe
from ..monitor import read_metrics
from ..monitor.jsonl import write_text_atomically

RECORD, LOCK = "run.json", "run.lock"


class RunIsRunning(ValueError):
    """Another driver runs in the folder. The message is one line for the user."""


class BadRecord(ValueError):
    """run.json is damaged. The message is one line for the user."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """While it is held, no other driver can run in `run_dir`. Raises `RunIsRunning`.

    The operating system holds the lock and releases it when this process ends, however it ends: a leftover lock file
    locks nothing. On file systems without locks, and between hosts, the file's content decides.
    """
    path = run_dir / LOCK
    descriptor = _take(path)
    os.ftruncate(descriptor, 0)
    started = psutil.Process().create_time()
    os.write(descriptor, json.dumps({"pid": os.getpid(), "started": started, "host": socket.gethostname()}).encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def check_not_running(run_dir: Path) -> None:
    """Raises `RunIsRunning` if a driver runs in `run_dir`."""
    if (run_dir / LOCK).exists():
        os.close(_take(run_dir / LOCK))


def _take(path: Path) -> int:
    """An open descriptor that holds the lock on `path`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _refuse_where_taken(path, descriptor)
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder ended, and removed the file, between the two lines above


def _refuse_where_taken(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except BlockingIOError:
        is_free = False
    except OSError:  # a file system without locks
        is_free = None
    try:
        holder = json.loads(path.read_text())
    except ValueError:  # empty: no driver, or one that is just starting
        holder = {}
    host, pid = holder.get("host"), holder.get("pid")
    elsewhere = host is not None and host != socket.gethostname()
    who = f"{path.parent} is running: process {pid} on {host}"
    if is_free is False or (is_free is None and not elsewhere and _is_alive(holder)):
        raise RunIsRunning(f"{who}; wait for it, or stop it: kill {pid}")
    if elsewhere:
        raise RunIsRunning(f"{who}, as far as can be seen from here; if it is not, remove {path}")


def _is_alive(holder: dict[str, Any]) -> bool:
    try:
        return abs(psutil.Process(holder["pid"]).create_time() - holder["started"]) < 1.0
    except (KeyError, psutil.NoSuchProcess):
        return False


class RunRecord:
    """run.json. `goes_on`: keep the earlier parts; else this is the first."""

    def __init__(self, run_dir: Path, *, recipes: Sequence[Recipe], argv: Sequence[str], goes_on: bool) -> None:
        self._file = run_dir / RECORD
        self._began = time.monotonic()
        earlier = _parts(run_dir) if goes_on else []
        self._part: dict[str, Any] = {
            "command": " ".join(["leeway", *argv[1:]]),
            "began": round(time.time(), 3),
            "status": "running",
            "wall_s": None,
            "stages": {},
        }
        self._recipe, self._earlier = recipes[-1].name, earlier
        self._files = {r.name: str(r.file) for r in recipes if r.is_a_file}
        self._write()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time spent inside as the stage's."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._part["stages"][name] = round(time.monotonic() - began, 1)

    def stage_s(self, name: str) -> float:
        """Seconds of the stage, over all parts."""
        return round(sum(part["stages"].get(name, 0.0) for part in [*self._earlier, self._part]), 1)

    def close(self, status: str) -> float:
        """End this part; returns the total seconds of all parts."""
        self._part |= {"status": status, "wall_s": round(time.monotonic() - self._began, 1)}
        self._write()
        return round(sum(part["wall_s"] for part in [*self._earlier, self._part]), 1)

    @property
    def num_parts(self) -> int:
        return len(self._earlier) + 1

    def _write(self) -> None:
        record = {"recipe": self._recipe, "recipe_files": self._files, "parts": [*self._earlier, self._part]}
        write_text_atomically(self._file, json.dumps(record, indent=2) + "\n")


def saved_recipe(run_dir: Path) -> str | None:
    """The recipe that the run in `run_dir` was started with; None if unknown."""
    return _read(run_dir)["recipe"]


def saved_recipe_files(run_dir: Path) -> dict[str, str]:
    """Where the files of the run's own recipes were: as the user referred to them -> absolute path."""
    return _read(run_dir)["recipe_files"]


def _parts(run_dir: Path) -> list[dict[str, Any]]:
    """The parts so far. A killed part recorded no duration: it counts until the last row that it logged."""
    parts = _read(run_dir)["parts"]
    for part in parts:
        if part["wall_s"] is None:
            logged = [
                (stage, row["time"])
                for stage, path in _metrics_files(run_dir)
                for row in read_metrics(path)
                if row["time"] >= part["began"]
            ]
            part["wall_s"] = round(max((at for _, at in logged), default=part["began"]) - part["began"], 1)
            for stage in {stage for stage, _ in logged}:
                times = [at for of, at in logged if of == stage]
                part["stages"].setdefault(stage, round(max(times) - min(times), 1))
            part["status"] = "killed"
    return parts


def _read(run_dir: Path) -> dict[str, Any]:
    """run.json; an empty one if it does not exist. Raises `BadRecord`."""
    file = run_dir / RECORD
    if not file.exists():
        return {"recipe": None, "recipe_files": {}, "parts": []}
    try:
        record = json.loads(file.read_text())
        parts = [
            part
            | {"began": float(part["began"]), "stages": {str(name): float(s) for name, s in part["stages"].items()}}
            | {"wall_s": None if part["wall_s"] is None else float(part["wall_s"])}
            for part in record["parts"]
        ]
        files = {str(name): str(file) for name, file in record.get("recipe_files", {}).items()}
        return {"recipe": str(record["recipe"]), "recipe_files": files, "parts": parts}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadRecord(f"{file}: its content was not written by leeway, expected a run's record; remove it") from None


def _metrics_files(run_dir: Path) -> list[tuple[str, Path]]:
    files = [(path.parent.name, path) for path in sorted(run_dir.glob("stages/*/metrics.jsonl"))]
    return files or [("", path) for path in run_dir.glob("metrics.jsonl")]
