"""The outstanding groups in admission order, and which of them the next batch may and must hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .admission import AdmissionRule


@dataclass(slots=True, eq=False)
class _Outstanding:
    """A link of the list. `gap`: its queue index less that of the group before it (of the first: its queue index)."""

    group_id: int
    gap: int
    before: _Outstanding | None = None
    after: _Outstanding | None = None
    finished: bool = False
    priority: float = 0.0
    must: bool = False  # the next batch must hold it
    candidate: bool = False  # the next batch may hold it


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A batch holds all groups of `must`, and of `may`, best first, as many as make `size`."""

    must: list[int]
    may: list[int]
    size: int

    def allows(self, chosen: Sequence[int]) -> bool:
        own = set(chosen)
        return len(own) == len(chosen) == self.size and own.issuperset(self.must) and own.issubset(self.must + self.may)


class Window:
    """Queue indices, order and the choice of a batch; no waiting, no storage, no tasks.

    `next_queue_index` = groups taken so far + groups outstanding: that of the next group to be admitted. When a group
    leaves without being taken, those behind it move up by one: they can only be taken earlier than promised, so their
    bounds stay valid. Among the finished groups that a batch need not hold, it takes those with the largest `priority`,
    and the oldest among equals.

    Admitting, finishing or removing a group costs the same, however many are outstanding: queue indices are kept as
    differences, so a removal changes one number. They increase in admission order, so the groups that a batch must
    hold and those that it may hold are both at the front, and both ends only move backwards.

    `num_settled`: the groups that the next batch is sure to hold: finished ones that it must.
    """

    def __init__(self, rule: AdmissionRule, *, num_batches: int = 0, num_taken: int = 0) -> None:
        self._rule = rule
        self._groups: dict[int, _Outstanding] = {}
        self._first: _Outstanding | None = None
        self._last: _Outstanding | None = None
        self._last_index = 0  # that of `_last`
        self._optional: _Outstanding | None = None  # the first that the next batch need not hold
        self._optional_index = 0
        self._later: _Outstanding | None = None  # the first that the next batch cannot hold
        self._num_candidates = self._num_finished_candidates = self._num_must_unfinished = 0
        self.num_finished = self.num_settled = 0
        self.num_batches = num_batches
        self.num_taken = num_taken

    @property
    def next_queue_index(self) -> int:
        return self.num_taken + len(self._groups)

    @property
    def num_outstanding(self) -> int:
        return len(self._groups)

    def admit(self, group_id: int) -> int:
        """Admit a group after all others; returns its `min_policy_version`."""
        queue_index = self.next_queue_index
        self._append(group_id, queue_index)
        self._move_ends()
        return self._rule.min_policy_version(queue_index)

    def _append(self, group_id: int, queue_index: int) -> None:
        assert group_id not in self._groups
        group = _Outstanding(
            group_id, gap=queue_index - self._last_index if self._last else queue_index, before=self._last
        )
        if self._last is None:
            self._first = group
        else:
            self._last.after = group
        self._groups[group_id] = group
        self._last, self._last_index = group, queue_index
        if self._optional is None:
            self._optional, self._optional_index = group, queue_index
        if self._later is None:
            self._later = group

    def finish(self, group_id: int, *, priority: float = 0.0) -> None:
        group = self._find(group_id)
        assert not group.finished
        group.finished, group.priority = True, priority
        self.num_finished += 1
        self._num_finished_candidates += group.candidate
        self._num_must_unfinished -= group.must
        self.num_settled += group.must

    def drop(self, group_id: int) -> None:
        """The group was filtered or has failed permanently."""
        self._remove(self._find(group_id), moves_up=1)
        self._move_ends()

    def is_ready(self, *, last: bool) -> bool:
        """Whether the next batch can be served. `last`: no further group will ever be admitted."""
        return not self._num_must_unfinished and self._num_finished_candidates >= self._size(last)

    def missing_for_batch(self, *, last: bool) -> str | None:
        """None if the next batch can be served; else what it still waits for."""
        if self.is_ready(last=last):
            return None
        if waiting_for := self.must_finish():
            return f"group {waiting_for[0]} and {len(waiting_for) - 1} more that must be in batch {self.num_batches}"
        return (
            f"{self._size(last) - self._num_finished_candidates} more finished groups for batch {self.num_batches} "
            f"(of {self.num_outstanding} outstanding)"
        )

    def must_finish(self) -> list[int]:
        """The unfinished groups that the next batch must hold."""
        return [g.group_id for g in self._candidates() if g.must and not g.finished]

    def settled(self) -> list[int]:
        """See `num_settled`; in admission order."""
        return [g.group_id for g in self._candidates() if g.must and g.finished]

    def choice(self, *, last: bool) -> Choice:
        """What the next batch is chosen from; it must be ready."""
        missing = self.missing_for_batch(last=last)
        assert missing is None, f"batch {self.num_batches} is not complete: it waits for {missing}"
        candidates = list(self._candidates())
        may = sorted((g for g in candidates if g.finished and not g.must), key=lambda g: -g.priority)  # stable
        return Choice(
            must=[g.group_id for g in candidates if g.must], may=[g.group_id for g in may], size=self._size(last)
        )

    def take_batch(self, *, last: bool, chosen: Sequence[int] | None = None) -> list[int]:
        """The group ids of the next batch, in admission order; they are no longer outstanding.

        `chosen`: by somebody else, from `choice`; None: the best. Raises RuntimeError for a choice that is not allowed.
        """
        choice = self.choice(last=last)
        if chosen is None:
            chosen = [*choice.must, *choice.may][: choice.size]
        if not choice.allows(chosen):
            raise RuntimeError(f"batch {self.num_batches}: groups {sorted(chosen)} were chosen; expected {choice}")
        for group_id in chosen:
            self._remove(self._groups[group_id], moves_up=0)
        self.num_batches += 1
        self.num_taken += len(chosen)
        self._move_ends()
        return sorted(chosen)

    def state_dict(self) -> dict[str, Any]:
        """All of it as JSON-able data."""
        groups, group = [], self._first
        while group is not None:
            groups.append([group.group_id, group.gap, group.finished, group.priority])
            group = group.after
        return {"num_batches": self.num_batches, "num_taken": self.num_taken, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Window.__init__(self, self._rule, num_batches=state["num_batches"], num_taken=state["num_taken"])
        for group_id, gap, _, _ in state["groups"]:
            self._append(group_id, self._last_index + gap)
        self._move_ends()
        for group_id, _, finished, priority in state["groups"]:
            if finished:
                self.finish(group_id, priority=priority)

    def _find(self, group_id: int) -> _Outstanding:
        if group_id not in self._groups:
            raise KeyError(f"group {group_id} is not outstanding")
        return self._groups[group_id]

    def _size(self, last: bool) -> int:
        return min(self._rule.groups_per_batch, len(self._groups)) if last else self._rule.groups_per_batch

    def _candidates(self) -> Iterator[_Outstanding]:
        group = self._first
        while group is not None and group.candidate:
            yield group
            group = group.after

    def _remove(self, group: _Outstanding, *, moves_up: int) -> None:
        """Take a group out of the list; those behind it move up by `moves_up`."""
        del self._groups[group.group_id]
        before, after = group.before, group.after
        if before is None:
            self._first = after
        else:
            before.after = after
        if after is None:
            self._last, self._last_index = before, self._last_index - group.gap
        else:
            after.before, after.gap = before, after.gap + group.gap - moves_up
            self._last_index -= moves_up
        if self._optional is group:
            self._optional_index += (after.gap if after else 0) - group.gap
            self._optional = after
        elif group.must:  # it was before the first optional one
            self._optional_index -= moves_up
        if self._later is group:
            self._later = after
        self.num_finished -= group.finished
        self._num_candidates -= group.candidate
        self._num_finished_candidates -= group.candidate and group.finished
        self._num_must_unfinished -= group.must and not group.finished
        self.num_settled -= group.must and group.finished

    def _move_ends(self) -> None:
        """Mark the groups that the next batch must hold, and those that it may hold."""
        while (group := self._optional) is not None and self._rule.last_batch(self._optional_index) <= self.num_batches:
            group.must = True
            self._num_must_unfinished += not group.finished
            self.num_settled += group.finished
            self._optional = group.after
            self._optional_index += group.after.gap if group.after else 0
        reach = self._rule.groups_per_batch + self._rule.reorder_window - 1
        while (group := self._later) is not None and self._num_candidates < reach:
            group.candidate = True
            self._num_candidates += 1
            self._num_finished_candidates += group.finished
            self._later = group.after
