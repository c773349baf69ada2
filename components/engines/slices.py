"""Long work cut into slices, which an engine does between two passes."""

from __future__ import annotations

import time
from collections.abc import Iterable

SLICE_S = 0.02
"""How long generation waits for one slice; one that cannot be cut further may take longer."""
LONGEST_SLICE_S = 0.25
"""However long passes take."""


class Slices:
    """`work`, slice by slice. Where passes take long, so do slices: a quarter of the time between two of them.

    Else what waits for the end of a proof would wait for many passes: one over 135 million weights takes 0.3 s.
    """

    def __init__(self, work: Iterable[None] = ()) -> None:
        self._work = iter(work)
        self._last: float | None = None

    def go_on(self) -> bool:
        """Do one slice; whether the work ended."""
        started = time.monotonic()
        since_last = 0.0 if self._last is None else started - self._last
        until = started + min(max(SLICE_S, since_last / 4), LONGEST_SLICE_S)
        ended = all(time.monotonic() < until for _ in self._work)
        self._last = time.monotonic()
        return ended
