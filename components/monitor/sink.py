"""A sink: one place metrics go to (a file, the terminal, a tracking service)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class MonitorError(ValueError):
    """A monitor setting that cannot be carried out; one line that says what, got, expected and how to fix it."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one part (`role`) measured at one optimizer step.

    `time` is seconds since the epoch. Values are plain int or float; nan and inf are allowed, each sink writes them
    as its format can.
    """

    step: int
    time: float
    role: str
    metrics: Mapping[str, float]


class Sink(ABC):
    """Receives every record in order, then `close` once.

    Your own is named in `monitor.sinks` as "pkg.mod:Class" and made as
    `Class(run_dir, title=..., config=..., resumed_at=...)`: the run's folder, what to call the run, its settings
    without secrets, and the step that it resumes from, or None. All of its calls come from one thread, in order; one
    that raises is tried again a few times.

    `required` decides what an exception means. True: the sink is the run's record, so its failure ends the run.
    False: it is a view of that record, so the monitor reports the failure once, switches it off and continues.
    """

    name: ClassVar[str]
    required: bool = False

    @abstractmethod
    def log(self, record: Record) -> None:
        """Write one record; raise if it cannot be written."""

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027  # most show numbers only
        """A table of readable answers, see `build.table_of`."""

    def summary(self, numbers: Mapping[str, Any]) -> None:  # noqa: B027
        """What the run or stage came to, as in summary.json; before `close`, if it got that far."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Flush and let go; `status` is how the run ended ("done" is success, anything else is not)."""


def by_dotted_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"steps": 5}} -> {"train.steps": 5}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= by_dotted_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
