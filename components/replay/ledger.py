"""The life of every group: admitted -> generated -> taken -> trained, or filtered, or failed, or
returned: nobody is left who could generate it, and its task is drawn again, as another group. Where operators run in
other processes, it is delivered, which means with them, before it is generated or filtered.

Each group goes through exactly one such life, and each transition is checked: a group that is delivered twice, or
trained without being taken, is a bug in Leeway and raises.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class GroupState(StrEnum):
    ADMITTED = "admitted"
    DELIVERED = "delivered"
    GENERATED = "generated"
    TAKEN = "taken"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    RETURNED = "returned"


_NEXT = {
    GroupState.ADMITTED: {
        GroupState.DELIVERED,
        GroupState.GENERATED,
        GroupState.FILTERED,
        GroupState.FAILED,
        GroupState.RETURNED,
    },
    GroupState.DELIVERED: {GroupState.GENERATED, GroupState.FILTERED},
    GroupState.GENERATED: {GroupState.TAKEN},
    GroupState.TAKEN: {GroupState.TRAINED},
    GroupState.TRAINED: set(),
    GroupState.FILTERED: set(),
    GroupState.FAILED: set(),
    GroupState.RETURNED: set(),
}


@dataclass(slots=True)
class _Entry:
    state: GroupState
    retries: int = 0


@dataclass
class Ledger:
    """In-memory ledger. Finished lives are only counted, so memory stays bounded by the open groups."""

    _open: dict[int, _Entry] = field(default_factory=dict)
    _ended: Counter[GroupState] = field(default_factory=Counter)
    _last_admitted: int = -1
    num_admitted: int = 0
    num_retries: int = 0

    def admit(self, group_id: int) -> None:
        """Ids increase; in a resumed run there are gaps for the groups that finished before."""
        assert group_id > self._last_admitted, f"group {group_id} admitted after {self._last_admitted}"
        self._last_admitted = group_id
        self.num_admitted += 1
        self._open[group_id] = _Entry(GroupState.ADMITTED)

    def move(self, group_id: int, state: GroupState) -> None:
        """Raises RuntimeError if the group is unknown, has ended, or cannot move to `state` from its current state."""
        entry = self._open.get(group_id)
        if entry is None or state not in _NEXT[entry.state]:
            raise RuntimeError(f"ledger: group {group_id} cannot become {state}: it is {self.state(group_id)}")
        entry.state = state
        if not _NEXT[state]:
            self._ended[state] += 1
            del self._open[group_id]

    def state_dict(self) -> dict[str, Any]:
        """All of it as JSON-able data."""
        return {
            "open": [[group_id, entry.state, entry.retries] for group_id, entry in self._open.items()],
            "ended": dict(self._ended),
            "last_admitted": self._last_admitted,
            "num_admitted": self.num_admitted,
            "num_retries": self.num_retries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._open = {group_id: _Entry(_again(GroupState(name)), retries) for group_id, name, retries in state["open"]}
        self._ended = Counter({GroupState(name): count for name, count in state["ended"].items()})
        self._last_admitted, self.num_admitted = state["last_admitted"], state["num_admitted"]
        self.num_retries = state["num_retries"]

    def retry(self, group_id: int) -> int:
        """Count one more attempt of a group in flight; returns the number of retries so far."""
        entry = self._open[group_id]
        assert entry.state is GroupState.ADMITTED, (
            f"group {group_id} is {entry.state}; only a group in flight is retried"
        )
        entry.retries += 1
        self.num_retries += 1
        return entry.retries

    def state(self, group_id: int) -> str:
        """The state in words. Finished groups are only counted, so "ended" is all that is known about them."""
        if entry := self._open.get(group_id):
            return entry.state
        return "ended" if group_id <= self._last_admitted else "never admitted"

    def count(self, state: GroupState) -> int:
        return self._ended[state] + sum(e.state is state for e in self._open.values())

    def is_open(self, group_id: int) -> bool:
        """Admitted, and not yet trained, filtered or failed."""
        return group_id in self._open


def _again(state: GroupState) -> GroupState:
    """What becomes of a group whose state was saved: operators of another process know nothing of it."""
    return GroupState.ADMITTED if state is GroupState.DELIVERED else state
