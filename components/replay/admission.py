"""The admission rule: when a group may start, the oldest weights it may use, and which groups a batch must hold.

Letters as in the design: P groups per batch, u optimizer steps per batch, n steps between publications, W reorder
window, T target lag, L bound on the lag. All integers; the lag's unit is optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.derived import least_target_policy_lag


@dataclass(frozen=True, kw_only=True)
class AdmissionRule:
    """Pure arithmetic over queue indices.

    `queue_index` q of a group = groups before it at admission: taken, or admitted and not yet gone.
    """

    groups_per_batch: int  # P
    updates_per_batch: int  # u
    publish_every: int  # n
    reorder_window: int  # W
    target_lag: int  # T
    max_lag: int  # L

    def __post_init__(self) -> None:
        if self.min_target_lag > self.target_lag or self.target_lag > self.max_lag:
            raise ValueError(
                f"admission rule: reorder_window={self.reorder_window}, updates_per_batch={self.updates_per_batch}, "
                f"publish_every={self.publish_every} need "
                f"{self.min_target_lag} <= target_policy_lag <= max_policy_lag, "
                f"got target {self.target_lag}, max {self.max_lag}"
            )

    @property
    def min_target_lag(self) -> int:
        """The smallest target lag with which the next batch can always be filled before the next publication."""
        return least_target_policy_lag(
            self.groups_per_batch, self.updates_per_batch, self.publish_every, self.reorder_window
        )

    def last_batch(self, queue_index: int) -> int:
        """The latest batch that a group of this queue index can be in (batches count from 0)."""
        return (queue_index + self.reorder_window - 1) // self.groups_per_batch

    def last_use(self, queue_index: int) -> int:
        """The newest trainer version that may still use a group of this queue index."""
        return self.updates_per_batch * (self.last_batch(queue_index) + 1) - 1

    def min_policy_version(self, queue_index: int) -> int:
        """The oldest policy version that may generate a token of this group."""
        return max(0, self.last_use(queue_index) - self.max_lag)

    def may_admit(self, queue_index: int, *, published: int) -> bool:
        """Whether a group of this queue index may start now; `published` is the newest published version."""
        return self.last_use(queue_index) - self.target_lag <= published

    def num_admissible(self, *, published: int) -> int:
        """While `published` is the newest version, groups of a queue index below this may start."""
        batches = (published + self.target_lag + 1) // self.updates_per_batch  # largest d + 1 that the rule lets start
        return max(0, batches * self.groups_per_batch - (self.reorder_window - 1))
