"""The outstanding groups in admission order, and which of them the next take may and must hold."""

from __future__ import annotations

from dataclasses import dataclass

from .admission import AdmissionRule


@dataclass(slots=True)
class _Outstanding:
    group_id: int
    rank: int
    finished: bool = False
    worth: float = 0.0


class Window:
    """Ranks, order and the choice of a take; no waiting, no storage, no tasks.

    `alive` = groups taken so far + groups outstanding, which is the rank of the next group to be admitted. When a group
    leaves without being taken, those behind it move up one rank: they can only be taken earlier than promised, so their
    floors stay valid. Of the finished groups that a take need not hold it takes those of the largest `worth`, and of
    equals the oldest.
    """

    def __init__(self, rule: AdmissionRule, *, next_group_id: int = 0, num_takes: int = 0, num_taken: int = 0) -> None:
        self._rule = rule
        self._outstanding: list[_Outstanding] = []
        self._next_group_id = next_group_id
        self.num_takes = num_takes
        self.num_taken = num_taken

    @property
    def alive(self) -> int:
        return self.num_taken + len(self._outstanding)

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def num_finished(self) -> int:
        return sum(g.finished for g in self._outstanding)

    def admit(self) -> tuple[int, int]:
        """Admit one group; returns (group_id, floor)."""
        group = _Outstanding(self._next_group_id, self.alive)
        self._next_group_id += 1
        self._outstanding.append(group)
        return group.group_id, self._rule.floor(group.rank)

    def finish(self, group_id: int, *, worth: float = 0.0) -> None:
        group = self._find(group_id)[1]
        group.finished, group.worth = True, worth

    def drop(self, group_id: int) -> None:
        """The group was filtered or has failed for good."""
        index, _ = self._find(group_id)
        del self._outstanding[index]
        for group in self._outstanding[index:]:
            group.rank -= 1

    def missing_for_take(self, *, last: bool) -> str | None:
        """None when the next take can be served; else what it still waits for.

        `last`: no further group will ever be admitted.
        """
        chosen, waiting_for, size = self._plan(last=last)
        if waiting_for:
            return f"group {waiting_for[0]} and {len(waiting_for) - 1} more that must be in take {self.num_takes}"
        if len(chosen) < size:
            return (
                f"{size - len(chosen)} more finished groups for take {self.num_takes} "
                f"(of {self.num_outstanding} outstanding)"
            )
        return None

    def take(self, *, last: bool) -> list[int]:
        """The group ids of the next take, in admission order; they are outstanding no more."""
        missing = self.missing_for_take(last=last)
        assert missing is None, f"take {self.num_takes} is not complete: it waits for {missing}"
        chosen, _, _ = self._plan(last=last)
        ids = {g.group_id for g in chosen}
        self._outstanding = [g for g in self._outstanding if g.group_id not in ids]
        self.num_takes += 1
        self.num_taken += len(ids)
        return sorted(ids)

    def _plan(self, *, last: bool) -> tuple[list[_Outstanding], list[int], int]:
        """(finished groups for the next take, ids of groups that it must wait for, its size)."""
        rule, take = self._rule, self.num_takes
        size = rule.groups_per_take
        if last:
            size = min(size, len(self._outstanding))
        candidates = self._outstanding[: rule.groups_per_take + rule.reorder_window - 1]
        must = [g for g in candidates if rule.last_take(g.rank) <= take]
        waiting_for = [g.group_id for g in must if not g.finished]
        rest = [g for g in candidates if g.finished and rule.last_take(g.rank) > take]
        rest.sort(key=lambda g: -g.worth)  # stable
        chosen = [g for g in must if g.finished] + rest[: size - len(must)]
        return chosen, waiting_for, size

    def _find(self, group_id: int) -> tuple[int, _Outstanding]:
        for index, group in enumerate(self._outstanding):
            if group.group_id == group_id:
                return index, group
        raise KeyError(f"group {group_id} is not outstanding")
