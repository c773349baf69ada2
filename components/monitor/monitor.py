"""Monitor: the one object the driver hands its measurements to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from ..failures import printable
from ..types import NO_VERSION
from .jsonl import as_line, write_text_atomically
from .sink import Record, Sink
from .suspects import SuspectList

_RESERVED = frozenset({"step", "time", "role", "nonfinite"})
TABLE_CHARS = 4000
_logger = logging.getLogger("leeway.monitor")


class Monitor:
    """Hands each record to every sink, writes rollouts, and decides what a broken sink means.

    A required sink (metrics.jsonl) and the rollouts are what a run leaves behind: their errors are raised and end the
    run. Any other sink only shows the same numbers elsewhere: its first error is logged as one warning, kept in
    `failed_sinks` for summary.json, and the sink gets nothing more; the run continues. Not thread-safe: one driver, one
    thread.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: dict[str, Any],
        sinks: Sequence[Sink],
        rollouts_per_step: int | None = None,
        table_every: int = 0,
        resumed_at: int | None = None,
    ) -> None:
        """`rollouts_per_step`: at most this many rows of a step are written, spread evenly; None writes all, 0 none.

        `table_every`: sinks are given those of every so many steps, and of the first (0: none).
        `resumed_at`: as for `JsonlSink`.
        """
        if rollouts_per_step is not None and rollouts_per_step < 0:
            raise ValueError(f"rollouts_per_step: got {rollouts_per_step}, expected 0 or more (0 writes none)")
        self.run_dir = Path(run_dir)
        self.config = config
        self.failed_sinks: dict[str, str] = {}
        self._sinks = list(sinks)
        self._rollouts_per_step = rollouts_per_step
        self._table_every, self._next_table = table_every, 0
        self._suspects = SuspectList(self.run_dir / "suspects.jsonl", resumed_at=resumed_at)
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float], role: str = "trainer") -> None:
        """Record what `role` measured at optimizer step `step`; a value is a number or a scalar that float() takes."""
        if self._closed:
            raise RuntimeError(f"monitor: log(step={step}) after close(); log everything before the run is closed")
        record = Record(
            step=int(step),
            time=time.time(),
            role=role,
            metrics={key: _number(key, value) for key, value in metrics.items()},
        )
        self._each_sink(lambda sink: sink.log(record))

    def rollouts(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write rollouts/step-000012.jsonl, one JSON object per trajectory; a second call replaces the file."""
        chosen = _spread(rows, self._rollouts_per_step)
        if not chosen:
            return
        text = "".join(as_line(row) + "\n" for row in chosen)
        write_text_atomically(self.run_dir / "rollouts" / f"step-{step:06d}.jsonl", text)
        if self._table_every and step >= self._next_table:
            self._next_table = step - step % self._table_every + self._table_every
            table = [table_row(step, row) for row in chosen]
            self._each_sink(lambda sink: sink.rollouts(step, table))

    def summary(self, numbers: Mapping[str, Any]) -> None:
        """What the stage came to."""
        self._each_sink(lambda sink: sink.summary(numbers))

    def suspects(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Append to suspects.jsonl, see `SuspectList`."""
        self._suspects.add(step, rows)

    def close(self, status: str) -> None:
        """Close every sink, also when one of them fails; `status` "done" means success. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._each_sink(lambda sink: sink.close(status))

    def _each_sink(self, call: Callable[[Sink], None]) -> None:
        """All sinks get their turn before a required one's error is raised: the views should show the last step too."""
        fatal: Exception | None = None
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                if sink.required:
                    fatal = fatal or error
                    continue
                self._sinks.remove(sink)
                self.failed_sinks[sink.name] = f"{type(error).__name__}: {error}"
                _logger.warning(
                    "monitor: %s failed and is switched off for the rest of the run (%s); metrics.jsonl has everything",
                    sink.name,
                    self.failed_sinks[sink.name],
                )
        if fatal is not None:
            raise fatal


def table_row(step: int, row: Mapping[str, Any]) -> dict[str, str | float]:
    """One answer for a table of a logger: what a person reads of it, as text and numbers."""
    versions = [v for v in row.get("policy_versions") or () if v != NO_VERSION]  # without those of an environment
    advantage = row.get("advantage", math.nan)
    return {
        "step": step,
        "task": printable(str(row.get("task_id", ""))),
        "text": printable(str(row.get("text", "")))[:TABLE_CHARS],
        "reward": float(row.get("reward", math.nan)),
        "advantage": float(advantage) if isinstance(advantage, int | float) else sum(advantage) / len(advantage),
        "tokens": len(row.get("response_tokens", ())),
        "finish_reason": printable(str(row.get("finish_reason", ""))),
        "oldest_version": min(versions, default=NO_VERSION),
    }


def _number(key: str, value: Any) -> int | float:
    if key in _RESERVED:
        raise ValueError(f"metric name {key!r} is taken by the record itself; use a path such as 'train/{key}'")
    if isinstance(value, Integral):
        return int(value)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {key!r}: got {value!r} ({type(value).__name__}), expected one number") from None


def _spread(rows: Sequence[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    """`limit` rows at equal distances, so that they come from many groups rather than from the first one."""
    if limit is None or len(rows) <= limit:
        return list(rows)
    return [rows[math.floor(i * len(rows) / limit)] for i in range(limit)]
