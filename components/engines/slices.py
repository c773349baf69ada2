"""Long work cut into slices, which an engine does between two passes."""

from __future__ import annotations

import time
from collections.abc import Iterator

SLICE_S = 0.02
"""How long generation waits for one slice; one that cannot be cut further may take longer."""


def ends_within(seconds: float, work: Iterator[None]) -> bool:
    """Go on with `work` for so long; whether it ended."""
    until = time.monotonic() + seconds
    return all(time.monotonic() < until for _ in work)
