"""The admission rule: when a group may start, the oldest weights it may use, and which groups a take must hold.

Letters as in the design: P groups per take, u optimizer steps per take, n steps between publications, W reorder window,
T target lag, L bound on the lag. All integers; the lag's unit is optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdmissionRule:
    """Pure arithmetic over ranks.

    `rank` r of a group = groups alive before it (taken, or admitted and not yet gone) at admission.
    """

    groups_per_take: int  # P
    updates_per_take: int  # u
    publish_every: int  # n
    reorder_window: int  # W
    target_lag: int  # T
    max_lag: int  # L

    def __post_init__(self) -> None:
        if self.min_target_lag > self.target_lag or self.target_lag > self.max_lag:
            raise ValueError(
                f"admission rule: reorder_window={self.reorder_window}, updates_per_batch={self.updates_per_take}, "
                f"publish_every={self.publish_every} need "
                f"{self.min_target_lag} <= target_policy_lag <= max_policy_lag, "
                f"got target {self.target_lag}, max {self.max_lag}"
            )

    @property
    def min_target_lag(self) -> int:
        """The smallest target lag with which the next take can always be filled before the next publication."""
        ceil_takes = -(-(self.reorder_window - 1) // self.groups_per_take)
        return self.updates_per_take * (ceil_takes + 1) + self.publish_every - 2

    def last_take(self, rank: int) -> int:
        """The latest take that a group of this rank can be in (takes count from 0)."""
        return (rank + self.reorder_window - 1) // self.groups_per_take

    def last_use(self, rank: int) -> int:
        """The newest trainer version that may still use a group of this rank."""
        return self.updates_per_take * (self.last_take(rank) + 1) - 1

    def min_policy_version(self, rank: int) -> int:
        """The oldest policy version that may generate a token of this group."""
        return max(0, self.last_use(rank) - self.max_lag)

    def may_admit(self, rank: int, *, published: int) -> bool:
        """Whether a group of this rank may start now; `published` is the newest published version."""
        return self.last_use(rank) - self.target_lag <= published

    def num_admissible(self, *, published: int) -> int:
        """The most groups that may be alive while `published` is the newest version: ranks below that may start."""
        takes = (published + self.target_lag + 1) // self.updates_per_take  # largest d + 1 that the rule lets start
        return max(0, takes * self.groups_per_take - (self.reorder_window - 1))
