"""What a process does and when, as spans: one JSON line each, in a file of the process's own.

    RUN/stages/STAGE/spans/generator-0.jsonl
    {"part": "generator-0", "pid": 4711, "host": "a", "clock_offset_s": 0.0, "opened": 1795312120.1}
    {"id": "generator-0:4711.17", "name": "generate", "start": 1795312127.052113, "end": 1795312127.9,
     "attrs": {"group": 12, "version": 3, "tokens": 35}}

A process has one writer, as it has one root logger: `open_writer` begins, and until then `span` costs nothing and
writes nothing. Recording appends to a list in memory; a thread formats and writes it twice a second, whole lines at a
time, so a killed process leaves a readable file. Times are seconds since the epoch on the driver's clock: from one look
at this machine's clock, and the monotonic clock from there.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

FLUSH_S = 0.5
CLOSE_S = 5.0
KEPT_BYTES = 64 << 20
"""A file that has grown to this takes the place of PART.old.jsonl, and another is begun: a run has no longest life."""
MAX_WAITING = 200_000
"""Spans in memory while the disk does not take them. Those beyond are counted, and the number is written."""
SHORTEST_S = 1e-3
"""What takes less is left out where it would be recorded for every answer or step: of waits, and of scoring."""
MAX_TEXT = 300
"""Characters of one text among the attributes: it may be what somebody else's code said."""

logger = logging.getLogger(__name__)
now: Callable[[], float] = time.monotonic
_parent: ContextVar[int | None] = ContextVar("span", default=None)
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class SpanWriter:
    """Appends to `path`; `part` names the process, `clock_offset_s` is by how much its clock is ahead of the driver's.

    A file that cannot be written ends it with one warning: nothing of a run depends on its spans.
    """

    def __init__(self, path: Path, *, part: str, clock_offset_s: float = 0.0, kept_bytes: int = KEPT_BYTES) -> None:
        self._path, self._part, self._offset_s, self._kept_bytes = path, part, clock_offset_s, kept_bytes
        self._pid = os.getpid()
        self._to_epoch = time.time() - clock_offset_s - now()
        self._waiting: deque[tuple[str, int, float, float, int | None, dict[str, Any]]] = deque()
        self._num_lost = 0
        self._ids = itertools.count(1)
        self._wake, self._closed = threading.Event(), False
        self._writing = threading.Lock()
        self._descriptor: int | None = None
        self._thread: threading.Thread | None = None

    def new_id(self) -> int:
        return next(self._ids)

    def add(self, name: str, number: int, start: float, end: float, parent: int | None, attrs: dict[str, Any]) -> None:
        """`start`, `end`: by `now`."""
        if self._closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._num_lost += 1
            return
        self._waiting.append((name, number, start, end, parent, attrs))
        if self._thread is None:
            self._begin()

    def flush(self) -> None:
        """Write all that was recorded before this call."""
        with self._writing:
            self._write()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)
        if not self._writing.acquire(timeout=CLOSE_S):
            logger.warning("spans: %s: the disk does not answer; the last spans are lost", self._path)
            return
        try:
            self._write()  # what was recorded while the thread wrote for the last time
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        finally:
            self._writing.release()

    def _begin(self) -> None:
        with self._writing:
            if self._thread is not None or self._closed:
                return
            self._thread = threading.Thread(target=self._run, daemon=True, name="spans")
            self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(FLUSH_S)
            with self._writing:
                self._write()

    def _write(self) -> None:
        lines = []
        while self._waiting:
            name, number, start, end, parent, attrs = self._waiting.popleft()
            above = "" if parent is None else f',"parent":"{self._id(parent)}"'
            try:
                of = f',"attrs":{{{",".join([_pair(*item) for item in attrs.items()])}}}' if attrs else ""
            except Exception:  # whatever a value of somebody else's does when it is written: its span is lost
                self._num_lost += 1
                continue
            lines.append(
                f'{{"id":"{self._id(number)}","name":"{name}","start":{start + self._to_epoch:.6f},'
                f'"end":{end + self._to_epoch:.6f}{above}{of}}}\n'
            )
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            at = f"{now() + self._to_epoch:.6f}"
            lines.append(
                f'{{"id":"{self._id(self.new_id())}","name":"lost","start":{at},"end":{at},"attrs":{{"spans":{lost}}}}}\n'
            )
        if not lines:
            return
        try:
            self._append("".join(lines).encode())
        except OSError as error:
            self._closed = True
            logger.warning("spans: %s cannot be written, no more are recorded here: %s", self._path, error)

    def _append(self, data: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._opened()
        while data:
            data = data[os.write(self._descriptor, data) :]
        if os.fstat(self._descriptor).st_size >= self._kept_bytes:
            os.close(self._descriptor)
            self._descriptor = None
            self._path.replace(self._path.with_suffix(".old.jsonl"))

    def _opened(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if (size := os.fstat(descriptor).st_size) and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # the process before was killed in the middle of a line
        head = {
            "part": self._part,
            "pid": self._pid,
            "host": os.uname().nodename,
            "clock_offset_s": round(self._offset_s, 6),
            "opened": round(now() + self._to_epoch, 6),
        }
        os.write(descriptor, f"{json.dumps(head)}\n".encode())
        return descriptor

    def _id(self, number: int) -> str:
        return f"{self._part}:{self._pid}.{number}"


def _pair(key: str, value: Any) -> str:
    if type(value) is int:  # most are, and this takes half the time
        return f'"{key}":{value}'
    return f'"{key}":{_encode(value[:MAX_TEXT] if isinstance(value, str) else value)}'


_writer: SpanWriter | None = None


def open_writer(path: Path, *, part: str, clock_offset_s: float = 0.0) -> None:
    """This process records its spans into `path` from now on, see `SpanWriter`."""
    global _writer
    close_writer()
    _writer = SpanWriter(path, part=part, clock_offset_s=clock_offset_s)


def close_writer() -> None:
    """Write what there is, and record no more."""
    global _writer
    writer, _writer = _writer, None
    if writer is not None:
        writer.close()


def flush() -> None:
    """Write what was recorded before this call."""
    if _writer is not None:
        _writer.flush()


def _forget_writer() -> None:
    global _writer
    _writer = None


os.register_at_fork(after_in_child=_forget_writer)  # a child has neither the thread nor a file of its own


class _Span(AbstractContextManager[dict[str, Any]]):
    __slots__ = ("_attrs", "_before", "_id", "_name", "_start", "_writer")

    def __init__(self, writer: SpanWriter, name: str, attrs: dict[str, Any]) -> None:
        self._writer, self._name, self._attrs = writer, name, attrs

    def __enter__(self) -> dict[str, Any]:
        self._id = self._writer.new_id()
        self._before = _parent.get()
        _parent.set(self._id)
        self._start = now()
        return self._attrs

    def __exit__(self, *_: object) -> None:
        end = now()
        _parent.set(self._before)
        self._writer.add(self._name, self._id, self._start, end, self._before, self._attrs)


class _Nothing(AbstractContextManager[dict[str, Any]]):
    def __enter__(self) -> dict[str, Any]:
        return {}

    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


def span(name: str, **attrs: Any) -> AbstractContextManager[dict[str, Any]]:
    """A context whose time is recorded as a span; gives its attributes, which may still be added to.

    Spans inside of it, in the same thread and the tasks that it starts, name it as their parent.
    """
    return _NOTHING if _writer is None else _Span(_writer, name, attrs)


def record(name: str, start: float, end: float, **attrs: Any) -> None:
    """A span that is over; `start`, `end` by `now`."""
    if _writer is not None:
        _writer.add(name, _writer.new_id(), start, end, _parent.get(), attrs)


def instant(name: str, **attrs: Any) -> None:
    """Something that takes no time."""
    if _writer is not None:
        at = now()
        _writer.add(name, _writer.new_id(), at, at, _parent.get(), attrs)


def wait_for(what: str, why: str) -> AbstractContextManager[dict[str, Any]]:
    """A span in which this part waits for `what`: another part, or a resource."""
    return span("wait", **{"for": what, "why": why})
