"""What each process did when, from the stage's spans/: one file for each part, found by time without being loaded.

The format: `spans.py` of the package.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

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

    @property
    def name(self) -> str:
        return self.path.stem.removesuffix(".old")


class SpanIndex:
    """`advance` in one thread; `window` from any."""

    def __init__(self, stage_dir: Path) -> None:
        self._folder = stage_dir / "spans"
        self._files: dict[int, _Part] = {}  # by inode: a file that has grown large is renamed to PART.old.jsonl
        self.revision = 0

    def advance(self) -> bool:
        """Note what was appended; returns whether anything was."""
        before = self.revision
        there: dict[int, _Part] = {}
        for path in sorted(self._folder.glob("*.jsonl"))[:MAX_PARTS]:
            try:
                inode = path.stat().st_ino
            except OSError:
                continue
            there[inode] = self._files.get(inode) or _Part(path)
            there[inode].path = path
        self._files = there
        for part in there.values():
            self._follow(part)
        return self.revision != before

    def extent(self) -> tuple[float, float] | None:
        """When the first span began and the last one ended; None without spans."""
        parts = [p for p in self._files.values() if p.last]
        return (min(p.first for p in parts), max(p.last for p in parts)) if parts else None

    def window(self, start: float, stop: float) -> dict[str, Any]:
        """The spans of each part that overlap [start, stop], and how many were left out."""
        lanes = []
        for name in sorted({part.name for part in self._files.values()}):
            found = self.spans(name, start, stop)
            left_out = max(0, len(found) - MAX_SPANS)
            if left_out:
                kept = sorted(found, key=lambda s: s["start"] - s["end"])[:MAX_SPANS]
                found = sorted(kept, key=lambda s: s["start"])
            lanes.append({"part": name, "spans": found, "left_out": left_out})
        return {"lanes": lanes}

    def spans(self, part: str, start: float, stop: float) -> list[dict[str, Any]]:
        """Those of one part that overlap [start, stop], in order of their start."""
        spans: dict[str, dict[str, Any]] = {}
        for own in [p for p in self._files.values() if p.name == part]:
            long = [s for s in own.long if _overlaps(s, start, stop)]
            spans |= {s["id"]: s for s in (*long, *self._read(own, start, stop))}
        return sorted(spans.values(), key=lambda s: s["start"])

    def parts(self) -> list[str]:
        return sorted({part.name for part in self._files.values()})

    def last_spans(self, part: str) -> list[dict[str, Any]]:
        """What a part did in its last minute, the last to end first."""
        last = max((p.last for p in self._files.values() if p.name == part), default=0.0)
        return sorted(self.spans(part, last - 60, last + 1), key=lambda s: -s["end"]) if last else []

    def _follow(self, part: _Part) -> None:
        try:
            with part.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < part.offset:  # another file got the number of one that has gone
                    part.offset, part.num_lines, part.marks, part.long = 0, 0, [], []
                    part.first, part.last = math.inf, 0.0
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
        lines = chunk.split(b"\n")[:-1]
        for line, found in zip(lines, _parsed(lines), strict=True):
            if _is_span(found):
                start, end = found["start"], max(found["start"], found["end"])
                part.first, part.last = min(part.first, start), max(part.last, end)
                if part.num_lines % EVERY == 0:
                    part.marks.append((part.last, part.offset))
                if end - start > 10 and len(part.long) < MAX_LONG:
                    part.long.append(_span(found))
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
    return _span(found) if _is_span(found) else None


def _parsed(lines: list[bytes]) -> list[Any]:
    """All at once, which takes a third of the time, if each of them is one value of JSON."""
    try:
        found = json.loads(b"[%s]" % b",".join(lines))
    except (ValueError, RecursionError):
        found = []
    return found if len(found) == len(lines) else [as_object(line) for line in lines]


def _is_span(found: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(found, dict) and _is_time(found.get("start")) and _is_time(found.get("end"))


def _span(found: dict[str, Any]) -> dict[str, Any]:
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
