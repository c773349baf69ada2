"""Names the code that blocks an event loop: environments share one loop, and one that does not await stops them all."""

from __future__ import annotations

import asyncio
import linecache
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from types import FrameType

logger = logging.getLogger(__name__)

WARN_S = 10.0
"""From there on the log says which code it is, once for each time."""

_NOT_THE_USERS = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
        os.path.join(os.path.dirname(__file__), ".."),
    )
)


class LoopWatch:
    """Watches the event loop that it is made in, from a thread of its own, for as long as the process lives."""

    def __init__(self, *, warn_s: float = WARN_S) -> None:
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._warn_s = warn_s
        self._turned_at = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="leeway-loop-watch").start()

    def _watch(self) -> None:
        nap_s, has_warned = min(1.0, self._warn_s / 4), False
        while not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._turned)
            except RuntimeError:  # closed meanwhile
                return
            asleep = time.monotonic()
            time.sleep(nap_s)
            now = time.monotonic()
            if now - asleep > nap_s + self._warn_s / 2:
                self._turned_at = now  # this whole process stood still
            blocked_s = now - self._turned_at
            if blocked_s < self._warn_s:
                has_warned = False
            elif not has_warned:
                has_warned = True
                frame = sys._current_frames().get(self._thread_id)
                logger.error(
                    "the event loop is blocked for %.0f s by %s; all rollouts here wait for it. Environments and "
                    "rewards must not block: await, or use asyncio.to_thread\n%s",
                    blocked_s,
                    self._place(),
                    "".join(traceback.format_stack(frame)),
                )

    def _turned(self) -> None:
        self._turned_at = time.monotonic()

    def _place(self) -> str:
        """The innermost line of the user's own code, or of any, where none of it is the user's."""
        frames = _frames(sys._current_frames().get(self._thread_id))
        if not frames:
            return "a thread that is gone"
        file, line, name = next((f for f in frames if not f[0].startswith(("<", *_NOT_THE_USERS))), frames[0])
        return f"{file}:{line} in {name}: {linecache.getline(file, line).strip()}"


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first."""
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        found.append((file if file.startswith("<") else os.path.realpath(file), frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found
