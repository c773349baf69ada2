"""Complete lines of a file that somebody else appends to, from where the last look ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 4 << 20
MAX_LINE = 64 << 20
"""A longer line is skipped, and counted."""
_TAIL = 256


class FollowedFile:
    """`offset`: how many bytes were read. What stands before it is compared, so a file that was replaced is noticed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_skipped = 0
        self._offset, self._tail = 0, b""

    def state(self) -> dict[str, Any]:
        return {"offset": self._offset, "tail": self._tail.hex()}

    def restore(self, state: dict[str, Any]) -> None:
        self._offset, self._tail = int(state["offset"]), bytes.fromhex(state["tail"])

    @property
    def offset(self) -> int:
        return self._offset

    def rewind(self) -> None:
        self._offset, self._tail = 0, b""

    def was_replaced(self) -> bool:
        """Whether what was read is not what the file begins with."""
        if not self._offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                return file.read(len(self._tail)) != self._tail
        except OSError:
            return True

    def end(self) -> int:
        """Where the last complete line ends now; 0 if there is none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                start = max(0, size - MAX_LINE)
                while size > start:
                    begin = max(start, size - (64 << 10))
                    file.seek(begin)
                    if (found := file.read(size - begin).rfind(b"\n")) >= 0:
                        return begin + found + 1
                    size = begin
        except OSError:
            pass
        return 0

    def progress(self) -> float:
        """Share of the file that was read."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 1.0
        return min(1.0, self._offset / size) if size else 1.0

    def read(self, max_bytes: int = CHUNK) -> list[bytes]:
        """The next complete lines, about `max_bytes` of them; none if there is nothing new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(max_bytes)
                while chunk and b"\n" not in chunk:
                    if len(chunk) > MAX_LINE:
                        self._skip_line(file, len(chunk))
                        return []
                    if not (more := file.read(CHUNK)):
                        return []
                    chunk += more
        except OSError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        if not whole:
            return []
        self._offset += len(whole)
        self._tail = whole[-_TAIL:]
        return whole.split(b"\n")[:-1]

    def _skip_line(self, file: Any, size: int) -> None:
        """Go behind a line that is too long, if it has ended."""
        while more := file.read(CHUNK):
            if (end := more.find(b"\n")) >= 0:
                self._offset += size + end + 1
                self._tail = b""
                self.num_skipped += 1
                return
            size += len(more)


def objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Those lines that are JSON objects. A line cut by a kill is none."""
    for line in lines:
        if (found := as_object(line)) is not None:
            yield found


def as_object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def last_lines(path: Path, num_bytes: int = 1 << 20, *, stop: int | None = None) -> list[bytes]:
    """The complete lines within the last bytes of a file, or those before `stop`; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2) if stop is None else stop
            start = max(0, end - num_bytes)
            num_bytes = end - start
            file.seek(start)
            text = file.read(num_bytes)
    except OSError:
        return []
    lines = text.split(b"\n")
    return lines[1 if start else 0 : -1]
