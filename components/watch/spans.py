"""What each process did when, from the stage's spans/: one file for each part, found by time without being loaded.

The format: `monitor/spans.py`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .lines import as_object

EVERY = 200
"""Lines from one note of (time, offset) to the next."""
MAX_SPANS = 3_000
"""Of a part in one answer. Of more, the longest are shown, and their number is said."""
MAX_LONG = 500
MAX_PARTS = 300
CHUNK = 4 << 20


@dataclass
class _Part:
    """`marks`: (end of a span, offset of its line), ascending as lines are written when spans end.

    `long`: spans that lasted longer than a note covers, which a look at a window would miss.
    """

    path: Path
    offset: int = 0
    num_lines: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)
    long: list[dict[str, Any]] = field(default_factory=list)
    first: float = math.inf
    last: float = 0.0


class SpanIndex:
    """`advance` in one thread; `window` from any."""

    def __init__(self, stage_dir: Path) -> None:
        self._folder = stage_dir / "spans"
        self._parts: dict[str, _Part] = {}
        self.revision = 0

    def advance(self) -> bool:
        """Note what was appended; returns whether anything was."""
        before = self.revision
        try:
            files = sorted(self._folder.glob("*.jsonl"))[:MAX_PARTS]
        except OSError:
            return False
        for file in files:
            part = self._parts.setdefault(file.stem, _Part(file))
            self._follow(part)
        return self.revision != before

    def extent(self) -> tuple[float, float] | None:
        """When the first span began and the last one ended; None without spans."""
        parts = [p for p in self._parts.values() if p.last]
        return (min(p.first for p in parts), max(p.last for p in parts)) if parts else None

    def window(self, start: float, stop: float) -> dict[str, Any]:
        """The spans of each part that overlap [start, stop], and how many were left out."""
        lanes = []
        for name, part in list(self._parts.items()):
            spans = {
                s["id"]: s
                for s in [*(own for own in part.long if _overlaps(own, start, stop)), *self._read(part, start, stop)]
            }
            found = sorted(spans.values(), key=lambda s: s["start"])
            left_out = max(0, len(found) - MAX_SPANS)
            if left_out:
                kept = sorted(found, key=lambda s: s["start"] - s["end"])[:MAX_SPANS]
                found = sorted(kept, key=lambda s: s["start"])
            lanes.append({"part": name, "spans": found, "left_out": left_out})
        return {"lanes": lanes}

    def last_wait(self, part: str) -> dict[str, Any] | None:
        """The last span of a part that is a wait."""
        own = self._parts.get(part)
        if own is None:
            return None
        waits = [s for s in self._read(own, own.last - 60, own.last + 1) if s["name"] == "wait" or s["name"] == "batch"]
        return waits[-1] if waits else None

    def _follow(self, part: _Part) -> None:
        try:
            with part.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < part.offset:  # another run writes here now
                    part.offset, part.num_lines, part.marks, part.long = 0, 0, [], []
                file.seek(part.offset)
                while chunk := file.read(CHUNK):
                    end = chunk.rfind(b"\n") + 1
                    if not end:
                        break
                    self._note(part, chunk[:end])
                    file.seek(part.offset)
        except OSError:
            return

    def _note(self, part: _Part, chunk: bytes) -> None:
        for line in chunk.split(b"\n")[:-1]:
            span = span_of(line)
            if span is not None:
                part.first, part.last = min(part.first, span["start"]), max(part.last, span["end"])
                if part.num_lines % EVERY == 0:
                    part.marks.append((part.last, part.offset))
                if span["end"] - span["start"] > 10 and len(part.long) < MAX_LONG:
                    part.long.append(span)
                part.num_lines += 1
            part.offset += len(line) + 1
        self.revision += 1

    def _read(self, part: _Part, start: float, stop: float) -> Iterator[dict[str, Any]]:
        marks = part.marks
        low = max(0, bisect.bisect_left(marks, (start, 0)) - 1)
        high = bisect.bisect_right(marks, (stop, 1 << 62)) + 1  # spans that end soon after the window began in it
        first = marks[low][1] if marks else 0
        last = marks[high][1] if high < len(marks) else part.offset
        try:
            with part.path.open("rb") as file:
                file.seek(first)
                while first < last:
                    chunk = file.read(min(CHUNK, last - first))
                    end = chunk.rfind(b"\n") + 1
                    if not end:
                        return
                    for line in chunk[:end].split(b"\n"):
                        span = span_of(line)
                        if span is not None and _overlaps(span, start, stop):
                            yield span
                    first += end
                    file.seek(first)
        except OSError:
            return


def span_of(line: bytes) -> dict[str, Any] | None:
    """A line as a span: id, name, start, end (s), attrs; None for anything else. Anything may stand in the file."""
    found = as_object(line) if line else None
    if found is None or not all(_is_time(found.get(key)) for key in ("start", "end")):
        return None
    attrs = found.get("attrs")
    return {
        "id": str(found.get("id", ""))[:80],
        "name": str(found.get("name", ""))[:80],
        "start": float(found["start"]),
        "end": max(float(found["start"]), float(found["end"])),
        "parent": str(found["parent"])[:80] if found.get("parent") is not None else None,
        "attrs": dict(list(attrs.items())[:20]) if isinstance(attrs, Mapping) else {},
    }


def _overlaps(span: Mapping[str, Any], start: float, stop: float) -> bool:
    return span["end"] >= start and span["start"] <= stop


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
