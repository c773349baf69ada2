"""Groups that are trained on more than once: which used groups a batch holds in addition to its new ones.

A batch of P groups has F = P / K new ones, K = `max_uses`, chosen by the window as usual; the other P - F come from
here. A new group must meet the bound L - u (cooldown + 1) (K - 1), so that it can be used K times, cooldown + 1 batches
apart, with no token beyond L. Every use is checked against L again, by the group's own oldest token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..config.names import PRIORITIES
from ..group import Group
from ..importing import check_call, import_named

Priority = Callable[[Group], float]
"""How valuable a group is to train on; larger values come first."""


def spread(group: Group) -> float:
    """The standard deviation of its rewards: groups that are all right or all wrong teach nothing."""
    return statistics.pstdev(group.rewards)


def reward(group: Group) -> float:
    return statistics.fmean(group.rewards)


def newest(group: Group) -> float:
    """The version of its oldest token: the least stale first."""
    return float(group.policy_versions()[0])


def priority_of(name: str) -> Priority:
    """The function called `name`, or a user's own. Raises a one-line ValueError."""
    key, expected = "replay.priority", "a function (group) -> number"
    function = import_named(name, PRIORITIES, key=key, expected=expected)
    check_call(function, name, "group", options={}, key=key, expected=expected)

    def checked(group: Group) -> float:
        value = function(group)
        if not isinstance(value, int | float) or value != value:
            raise TypeError(f"priority {name} returned {value!r:.80}; expected a number")
        return float(value)

    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A group that was trained on: how often, and last in batch `last_batch`. `score`: its priority then."""

    group: Group
    score: float
    oldest_version: int
    num_uses: int
    last_batch: int


class ReusePool:
    """The groups that were used, and may be used again. Batches are named by their number, 0, 1, ...

    `max_reused`: the most used groups in a batch. `decay` is subtracted from a group's priority for each use. Without a
    `priority`, groups are reused in admission order, each as soon as its cooldown is over: then every group is used
    exactly `max_uses` times, unless the run ends first. A priority may leave some out until they are too old for L.

    Batches are served ahead of training, so a checkpoint asks for the state some batches ago: `after`. `start` is the
    state that it returned in the run that this one resumes, after `num_batches` batches.
    """

    def __init__(
        self,
        *,
        max_uses: int,
        max_reused: int,
        updates_per_batch: int,
        max_lag: int,
        cooldown: int = 0,
        priority: Priority | None = None,
        decay: float = 0.0,
        start: Sequence[Used] = (),
        num_batches: int = 0,
    ) -> None:
        self._max_uses = max_uses
        self._max_reused = max_reused
        self._updates = updates_per_batch
        self._max_lag = max_lag
        self._cooldown = cooldown
        self._priority = priority
        self._decay = decay
        self._used = {used.group.group_id: used for used in start}
        self._after = {num_batches: self._used}  # by number of batches served
        self.num_reused = 0
        self._most_uses = 0

    def serve(self, batch: int, fresh: Sequence[Group]) -> list[Group]:
        """The groups that batch number `batch` reuses, in addition to its `fresh` ones. Both are counted as used."""
        ready = [u for u in self._used.values() if batch - u.last_batch > self._cooldown and self._in_bound(u, batch)]
        chosen = [
            replace(u, num_uses=u.num_uses + 1, last_batch=batch)
            for u in sorted(ready, key=self._order)[: self._max_reused]
        ]
        new = [self._first_used(group, batch) for group in (fresh if self._max_uses > 1 else ())]
        self.num_reused += len(chosen)
        self._most_uses = max([self._most_uses, bool(fresh), *(u.num_uses for u in chosen)])
        self._used = {
            g: u
            for g, u in (self._used | {u.group.group_id: u for u in [*chosen, *new]}).items()
            if u.num_uses < self._max_uses and self._in_bound(u, max(batch, u.last_batch + self._cooldown) + 1)
        }
        self._after[batch + 1] = self._used
        return [u.group for u in chosen]

    def after(self, num_batches: int) -> list[Used]:
        """The groups that could be reused once this many batches had been served, in admission order."""
        return [used for _, used in sorted(self._after[num_batches].items())]

    def __contains__(self, group_id: int) -> bool:
        """Whether the group of this id may be used again."""
        return group_id in self._used

    def forget_before(self, num_batches: int) -> None:
        """This many batches have been trained on: no checkpoint will need an earlier state."""
        self._after = {n: used for n, used in self._after.items() if n >= num_batches}

    def state_dict(self) -> dict[int, list[Used]]:
        """What `after` may be asked for, by number of batches served."""
        return {num_batches: self.after(num_batches) for num_batches in self._after}

    def load_state_dict(self, state: dict[int, list[Used]]) -> None:
        self._after = {n: {u.group.group_id: u for u in used} for n, used in state.items()}
        self._used = self._after[max(self._after)]

    def metrics(self) -> dict[str, float]:
        """{"replay/..."} so far: the number of repeated uses, the most uses of one group, groups kept."""
        return {
            "replay/reused": float(self.num_reused),
            "replay/uses/max": float(self._most_uses),
            "replay/reusable": float(len(self._used)),
        }

    def _first_used(self, group: Group, batch: int) -> Used:
        score = self._priority(group) if self._priority is not None else 0.0
        return Used(group=group, score=score, oldest_version=group.policy_versions()[0], num_uses=1, last_batch=batch)

    def _in_bound(self, used: Used, batch: int) -> bool:
        """Whether the last optimizer step of this batch may still use it."""
        return self._updates * (batch + 1) - 1 - used.oldest_version <= self._max_lag

    def _order(self, used: Used) -> tuple[float, int]:
        cost = self._decay * (used.num_uses - 1) if self._priority is not None else 0.0
        return cost - used.score, used.group.group_id
