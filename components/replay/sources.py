"""Tasks that explorers bring along: which draws of each source are over, and which are to be drawn again.

The trainer's own tasks are drawn by the buffer (`stream`). A source is somebody else's stream: the explorer offers
draws, numbered from 0 in an order that is the same whenever it starts again, and the buffer alone says what became of
each. What clients of a served address commit is a source too: groups that are finished when they come, in the order in
which they were first sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Source:
    next: int = 0
    open: set[int] = field(default_factory=set)  # before `next`, and neither over nor in a group


class Sources:
    """`start`: what `position` returned in an earlier life of the run."""

    def __init__(self, start: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._sources = {
            name: _Source(next=int(own["next"]), open={*map(int, own["open"])}) for name, own in (start or {}).items()
        }
        self._groups: dict[int, tuple[str, int]] = {}

    def of(self, group_id: int) -> tuple[str, int] | None:
        """(source, draw) of a group that is not over; None: its task is the trainer's own."""
        return self._groups.get(group_id)

    def where(self, source: str) -> tuple[int, list[int]]:
        """(the first draw that was never seen, those before it that are to be drawn again)."""
        own = self._sources.get(source, _Source())
        return own.next, sorted(own.open)

    def is_wanted(self, source: str, draw: int) -> bool:
        """Whether the draw is neither over nor in a group."""
        own = self._sources.get(source, _Source())
        return draw >= own.next or draw in own.open

    def admitted(self, group_id: int, source: str, draw: int) -> None:
        assert self.is_wanted(source, draw), f"draw {draw} of {source} is in a group already, or over"
        own = self._sources.setdefault(source, _Source())
        if draw >= own.next:
            own.open.update(range(own.next, draw))  # offered elsewhere, and not used yet
            own.next = draw + 1
        own.open.discard(draw)
        self._groups[group_id] = (source, draw)

    def over(self, group_id: int) -> None:
        """It was trained on, filtered, or has failed for good."""
        self._groups.pop(group_id, None)

    def returned(self, group_id: int) -> None:
        """Its draw is to be drawn again."""
        source, draw = self._groups.pop(group_id)
        self._sources[source].open.add(draw)

    def position(self, *, over: set[int]) -> dict[str, dict[str, Any]]:
        """As JSON-able data. `over`: groups that are counted as trained on, though they are still known here."""
        again: dict[str, set[int]] = {name: set(own.open) for name, own in self._sources.items()}
        for group_id, (source, draw) in self._groups.items():
            if group_id not in over:
                again[source].add(draw)
        return {name: {"next": own.next, "open": sorted(again[name])} for name, own in self._sources.items()}

    def state_dict(self) -> dict[str, Any]:
        """All of it as JSON-able data."""
        groups = [[group_id, *of] for group_id, of in self._groups.items()]
        sources = {name: {"next": own.next, "open": sorted(own.open)} for name, own in self._sources.items()}
        return {"sources": sources, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        Sources.__init__(self, state["sources"])
        self._groups = {group_id: (source, draw) for group_id, source, draw in state["groups"]}
