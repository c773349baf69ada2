"""Metrics as columns on disk: for each name a file of (step, value) pairs, 16 bytes each."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAX_NAMES = 4_000
"""Names in a run's own metrics are some hundreds; a file of endless new names must not fill the disk with files."""
MAX_NAME_CHARS = 200
FLUSH_AT = 200_000
"""Numbers that wait in memory, at most."""
TIME = "time"
_NOT_METRICS = frozenset({"step", "role", "nonfinite"})


class Columns:
    """One writer; readers may read at the same time. What was not committed is gone after a crash, and is read again.

    `folder` is this object's alone. `names` are those that have values, the column of times `TIME` included.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._waiting: dict[str, array[float]] = {}
        self._num_waiting = 0
        self._numbers: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self.num_refused = 0

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def append(self, row: Mapping[str, Any]) -> None:
        """All finite numbers of a line of metrics.jsonl."""
        step: Any = row.get("step")
        if not _is_number(step):
            return
        for name, value in row.items():
            if name in _NOT_METRICS or not _is_number(value):
                continue
            if name not in self._numbers:
                if len(self._numbers) >= MAX_NAMES or len(name) > MAX_NAME_CHARS:
                    self.num_refused += 1
                    continue
                self._numbers[name] = len(self._numbers)
            self._waiting.setdefault(name, array("d")).extend((float(step), float(value)))
            self._num_waiting += 1
        if self._num_waiting >= FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        """Hand what waits to the files, where readers see it."""
        for name, numbers in self._waiting.items():
            with self._path(name).open("ab") as file:
                numbers.tofile(file)
            self._lengths[name] = self._lengths.get(name, 0) + len(numbers) // 2
        self._waiting, self._num_waiting = {}, 0

    def state(self) -> dict[str, Any]:
        """What `restore` needs. Call after `flush`."""
        return {"numbers": dict(self._numbers), "lengths": dict(self._lengths)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`: what was written after it is cut off. Raises OSError or KeyError if files are gone."""
        numbers, lengths = state["numbers"], state["lengths"]
        for name, number in numbers.items():
            path = self._folder / f"{number}.f64"
            if (length := lengths.get(name, 0)) == 0:
                path.unlink(missing_ok=True)
                continue
            with path.open("r+b") as file:
                if file.seek(0, 2) < 16 * length:
                    raise OSError(f"{path} is too short")
                file.truncate(16 * length)
        self._numbers, self._lengths = dict(numbers), dict(lengths)

    def clear(self) -> None:
        for path in self._folder.glob("*.f64"):
            path.unlink()
        self._waiting, self._num_waiting, self._numbers, self._lengths = {}, 0, {}, {}

    def read(self, name: str, start: float = -math.inf, stop: float = math.inf) -> tuple[np.ndarray, np.ndarray]:
        """Steps, ascending, and values within [start, stop], float64 [n]; several at one step become their mean."""
        pairs = self._pairs(name)
        steps, values = pairs[:, 0], pairs[:, 1]
        if np.any(np.diff(steps) < 0):
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        if start > -math.inf or stop < math.inf:
            low, high = np.searchsorted(steps, start, "left"), np.searchsorted(steps, stop, "right")
            steps, values = steps[low:high], values[low:high]
        new = np.concatenate([[True], np.diff(steps) > 0]) if len(steps) else np.empty(0, dtype=bool)
        if new.all():
            return steps, values
        first = np.flatnonzero(new)
        counts = np.diff(np.append(first, len(steps)))
        return steps[first], np.add.reduceat(values, first) / counts

    def last(self, name: str, num: int) -> np.ndarray:
        """The newest `num` values, fewer if there are fewer."""
        return self._pairs(name, num)[:, 1]

    def _pairs(self, name: str, num: int | None = None) -> np.ndarray:
        """The last `num` (None: all) pairs of (step, value), [n, 2]; none where they are cleared at this moment."""
        length = self._lengths.get(name, 0)
        first = 0 if num is None else max(0, length - num)
        try:
            found = np.fromfile(self._path(name), dtype=np.float64, count=2 * (length - first), offset=16 * first)
        except (KeyError, FileNotFoundError):
            return np.empty((0, 2))
        return found[: len(found) // 2 * 2].reshape(-1, 2)

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._numbers[name]}.f64"


def thinned(steps: np.ndarray, values: np.ndarray, points: int) -> dict[str, list[float]]:
    """At most `points` of these: for equal ranges of steps the mean, and the lowest and highest value in them.

    Few enough points are given as they are, without `low` and `high`.
    """
    if len(steps) <= points:
        return {"steps": steps.tolist(), "values": values.tolist()}
    width = (steps[-1] - steps[0] + 1) / points
    bins = ((steps - steps[0]) // width).astype(np.int64)
    first = np.flatnonzero(np.concatenate([[True], np.diff(bins) > 0]))
    counts = np.diff(np.append(first, len(steps)))
    return {
        "steps": np.floor(np.add.reduceat(steps, first) / counts).tolist(),
        "values": (np.add.reduceat(values, first) / counts).tolist(),
        "low": np.minimum.reduceat(values, first).tolist(),
        "high": np.maximum.reduceat(values, first).tolist(),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def load_state(path: Path) -> dict[str, Any] | None:
    """The JSON object of `path`; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
