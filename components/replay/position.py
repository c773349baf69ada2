"""Where a run stands in its tasks, so that another one can go on from there.

Every group draws one task: draw k is the k-th task of the stream (`stream` knows its own part). Trained draws are over;
every other one from the first open group on is drawn again: those in flight, finished, taken and not yet trained, and
also those filtered or failed after it, so that group ids, and with them the seeds of lockstep, come out as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Position:
    """After `num_takes` trained takes with `num_taken` groups: what is drawn next, and the id of its group."""

    num_takes: int = 0
    num_taken: int = 0
    next_group_id: int = 0
    open_draws: list[int] = field(default_factory=list)
    next_draw: int = 0

    def draws(self) -> Iterator[int]:
        """Draw numbers from here on."""
        return itertools.chain(self.open_draws, itertools.count(self.next_draw))
