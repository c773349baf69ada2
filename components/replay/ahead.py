"""What the trainer has got of a batch before all of it was there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Ahead:
    """`group_ids`: of the next batch, in no order. `rollouts`: the readable rows of these, see `Batch.rollouts`."""

    group_ids: set[int] = field(default_factory=set)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
