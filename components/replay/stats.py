"""What the buffer counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BufferStats:
    slots_in_use: int
    groups_ready: int
    groups_taken: int
    filtered: int
    failed: int
    returned: int
    retries: int
    admitted: int
    dropped_stale: int
