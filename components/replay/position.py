"""A run's position in its tasks, so that another run can resume from there.

Every group of the run's own tasks draws one: draw k is the k-th task of the stream (`stream` has its own position), and
stays that for the whole life of a run, however often it is stopped and resumed. Trained draws are done. Every other one
from the first open group on is repeated: groups in flight, finished, taken and not yet trained, and also those filtered
or failed after it, so that a lockstep run gives the same result as without the stop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Position:
    """The state after `num_batches` trained batches with `num_taken` groups: what is drawn next."""

    num_batches: int = 0
    num_taken: int = 0
    open_draws: list[int] = field(default_factory=list)
    next_draw: int = 0
    sources: dict[str, Any] = field(default_factory=dict)  # of explorers' own tasks, see `Sources.position`

    def __contains__(self, draw: int) -> bool:
        """Whether this draw is drawn from here on."""
        return draw >= self.next_draw or draw in self.open_draws

    def draws(self) -> Iterator[int]:
        """Draw numbers from here on."""
        return itertools.chain(self.open_draws, itertools.count(self.next_draw))
