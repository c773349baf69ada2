"""Which finished groups form the next batch: the system's `Window`, at a cost per group that does not grow with the
run.

The rule itself is `AdmissionRule`, the class that the replay buffer uses. Only the bookkeeping differs from `Window`:
it counts instead of searching, because a plan handles millions of groups. A simulated group is never filtered and
never fails, so its queue index is its number.
"""

from __future__ import annotations

from ..replay.admission import AdmissionRule


class BatchOrder:
    """Admission order and the choice of batches; groups are numbered from 0 in admission order."""

    def __init__(self, rule: AdmissionRule) -> None:
        self._rule = rule
        self._size = rule.groups_per_batch
        self._reach = rule.groups_per_batch + rule.reorder_window - 1
        self._candidates: list[int] = []  # the first `_reach` outstanding groups
        self._next = 0  # the first group that has not been a candidate yet
        self._finished: set[int] = set()
        self._num_ready = 0  # finished candidates
        self._num_missing = 0  # unfinished candidates that the next batch must hold
        self.num_admitted = 0
        self.num_batches = 0

    @property
    def num_outstanding(self) -> int:
        return self.num_admitted - self.num_batches * self._size

    def num_free_slots(self, *, published: int) -> int:
        return max(0, self._rule.num_admissible(published=published) - self.num_admitted)

    def admit(self) -> tuple[int, int]:
        """Admit one group; returns (group_id, min_policy_version)."""
        group_id = self.num_admitted
        self.num_admitted += 1
        if len(self._candidates) < self._reach:
            self._candidates.append(group_id)
            self._next = group_id + 1
            self._num_missing += self._is_due(group_id)
        return group_id, self._rule.min_policy_version(group_id)

    def finish(self, group_id: int) -> None:
        self._finished.add(group_id)
        if group_id < self._next:
            self._num_ready += 1
            self._num_missing -= self._is_due(group_id)

    def is_complete(self) -> bool:
        """Whether the next batch can be served."""
        return self._num_missing == 0 and self._num_ready >= self._size

    def take_batch(self) -> list[int]:
        """The groups of the next batch, in admission order; they are no longer outstanding."""
        assert self.is_complete(), f"batch {self.num_batches} is not complete"
        due = [g for g in self._candidates if self._is_due(g)]
        rest = [g for g in self._candidates if g in self._finished and not self._is_due(g)]
        chosen = due + rest[: self._size - len(due)]
        gone = set(chosen)
        self._candidates = [g for g in self._candidates if g not in gone]
        end = min(self._next + self._reach - len(self._candidates), self.num_admitted)
        self._candidates.extend(range(self._next, end))
        self._next = end
        self._finished -= gone
        self.num_batches += 1
        self._num_ready = sum(g in self._finished for g in self._candidates)
        self._num_missing = sum(self._is_due(g) and g not in self._finished for g in self._candidates)
        return chosen

    def _is_due(self, group_id: int) -> bool:
        return self._rule.last_batch(group_id) <= self.num_batches
