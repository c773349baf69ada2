"""The replay buffer: who may start, what was finished, what is trained next.

A torchrl `ReplayBuffer` that waits instead of losing:

collectors --admit()--> [slots] --put()--> [places] --take()--> trainer
                           ^                                       |
                           +------------- published(v) <----------+
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torchrl.data

from ..types import Admission, Group, Task
from .admission import AdmissionRule
from .assemble import Take
from .ledger import GroupState, Ledger
from .lengths import LengthMeter
from .operators import Operator
from .position import Position
from .reuse import Priority, ReusePool
from .stats import BufferStats
from .storage import ChosenSampler, FreeSlotWriter, make_storage
from .window import Window

logger = logging.getLogger(__name__)

NO_PROGRESS_TAKES = 20

Assemble = Callable[[int, Sequence[Group], Sequence[Group]], Take]
"""assemble(number of the take, its new groups, those used before) -> the take."""


class NoProgressError(RuntimeError):
    """So many groups in a row were filtered or failed that the run would go on without ever training."""


@dataclass(frozen=True)
class _Held:
    """A group in flight: its admission, and the name of the collector that works on it (None: waits for one)."""

    admission: Admission
    collector: str | None


class ReplayBuffer(torchrl.data.ReplayBuffer):
    """Blocking, back-pressured, consume-once, whole groups only. One asyncio loop; any number of waiters.

    `tasks` is drawn from here only, so no two collectors ever get the same one; `start`: where an earlier run left off,
    with `tasks` from there on. `num_takes` ends the run after so many takes (None: when the tasks end). `reuse`: takes
    also hold groups that were used before. `priority`: the window prefers the best of what it may choose from.
    """

    def __init__(
        self,
        *,
        tasks: Iterator[Task],
        rule: AdmissionRule,
        num_takes: int | None,
        capacity: int,
        assemble: Assemble,
        operators: Sequence[Operator] = (),
        start: Position | None = None,
        reuse: ReusePool | None = None,
        priority: Priority | None = None,
    ) -> None:
        start = start or Position()
        self._slot_writer = FreeSlotWriter(capacity)
        self._chosen_sampler = ChosenSampler()
        super().__init__(
            storage=make_storage(capacity),
            writer=self._slot_writer,
            sampler=self._chosen_sampler,
            collate_fn=lambda groups: groups,
        )
        self._tasks = tasks
        self._next_task = next(tasks, None)
        self._rule = rule
        self._num_takes = num_takes
        self._assemble = assemble
        self._operators = list(operators)
        self.lengths = LengthMeter()
        self._window = Window(
            rule, next_group_id=start.next_group_id, num_takes=start.num_takes, num_taken=start.num_taken
        )
        self._reuse, self._priority = reuse, priority
        self._ledger = Ledger(_last_admitted=start.next_group_id - 1)
        self._start = start
        self._draws, self._last_draw = start.draws(), -1
        self._draw_of: dict[int, int] = {}  # by group id, from the first one that is not over
        self._trained: set[int] = set()  # of those
        self._served: deque[list[int]] = deque()  # takes that are being trained on, new groups only
        self._used_again: deque[list[int]] = deque()  # the others of these takes
        self.num_trained_takes, self._num_trained = start.num_takes, start.num_taken
        self._place: dict[int, int] = {}
        self._in_flight: dict[int, _Held] = {}
        self._to_reissue: list[int] = []
        self._attempts: dict[int, int] = {}  # of groups that were ever issued again: few
        self._lost_collectors: set[str] = set()
        self._published = -1
        self._lost_in_a_row = 0
        self._last_reason = ""
        self._closed = False
        self._changed = asyncio.Condition()

    async def admit(self, limit: int, *, timeout_s: float, collector: str = "") -> list[Admission]:
        """Wait for at least one group, then start up to `limit`. An empty list: there will never be another one.

        Groups to issue again come first, in their order. `collector` is who asks, so that `lost` knows what it holds.
        Raises TimeoutError, naming what it waited for.
        """
        async with self._changed:
            await self._wait(
                lambda: self._no_more_admissions(collector) or bool(self._to_reissue) or self._num_free_slots() > 0,
                timeout_s,
                lambda: (
                    f"a slot (published version {self._published}, {self._window.num_outstanding} groups outstanding)"
                ),
            )
            if self._no_more_admissions(collector):
                return []
            issued: list[Admission] = []
            while len(issued) < limit and (self._to_reissue or self._num_free_slots() > 0):
                issued.append(self._issue_again() if self._to_reissue else self._admit_one())
            self._in_flight |= {a.group_id: _Held(a, collector) for a in issued}
            return issued

    async def put(self, groups: Sequence[Group]) -> None:
        """Deliver finished groups. Each is stored, or filtered with a reason. Delivering one twice raises.

        A group of an attempt that has been issued again since then is not taken: the newer attempt is the one.
        """
        async with self._changed:
            current = [group for group in groups if not self._superseded(group.group_id, group.attempt)]
            for group, result in [(group, self._operated(group)) for group in current]:
                self.lengths.generated(group)
                if isinstance(result, str):
                    self._lose(group.group_id, GroupState.FILTERED, result)
                    continue
                self._ledger.move(group.group_id, GroupState.GENERATED)
                del self._in_flight[group.group_id]
                self._place[group.group_id] = self.add(result)
                self._window.finish(group.group_id, worth=self._priority(result) if self._priority else 0.0)
            self._changed.notify_all()

    async def retried(self, group_id: int, *, attempt: int = 0) -> None:
        """The collector that holds this group starts it again: same rank, same floor."""
        if not self._superseded(group_id, attempt):
            self._ledger.retry(group_id)

    async def fail(self, group_id: int, reason: str, *, attempt: int = 0) -> None:
        """This group has failed for good."""
        async with self._changed:
            if not self._superseded(group_id, attempt):
                self._lose(group_id, GroupState.FAILED, reason)
                self._changed.notify_all()

    async def reissue(self, group_ids: Sequence[int], reason: str) -> None:
        """Take these groups in flight from whoever holds them; the next `admit` calls hand them out, before new ones.

        They keep their slot, rank and floor, so the bound and the order hold as if they had only taken longer. What
        the former holder still says of them is ignored from now on. Raises RuntimeError, and changes nothing, when one
        of them is not in flight.
        """
        async with self._changed:
            self._reissue(group_ids, reason)
            self._changed.notify_all()

    async def give_back(self, collector: str, reason: str) -> list[int]:
        """This collector cannot finish what it holds: issue it again to whoever asks; returns the groups' ids."""
        async with self._changed:
            held = [g for g, h in self._in_flight.items() if h.collector == collector]
            self._reissue(held, reason)
            self._changed.notify_all()
            return held

    async def lost(self, collector: str, reason: str) -> list[int]:
        """This collector is gone: as `give_back`, and never again a group for it.

        Its name is never admitted again, lest a call that it left waiting here is given groups that nobody receives: a
        collector that is started in its place asks under another name.
        """
        self._lost_collectors.add(collector)
        return await self.give_back(collector, reason)

    async def take(self, *, timeout_s: float) -> Take | None:
        """Wait for the next take; None when the tasks have ended or all takes were served.

        Raises TimeoutError naming what is missing, and `NoProgressError` when group after group is lost.
        """
        async with self._changed:
            await self._wait(
                lambda: (
                    self._no_progress()
                    or self._ended()
                    or self._window.missing_for_take(last=self._next_task is None) is None
                ),
                timeout_s,
                lambda: str(self._window.missing_for_take(last=self._next_task is None)),
            )
            if not self._ended() and self._no_progress():
                raise NoProgressError(
                    f"{self._lost_in_a_row} groups in a row left without being trained "
                    f"(last reason: {self._last_reason}); "
                    "the tasks are all too easy or too hard, or the environment fails: "
                    "check rollouts, rewards and replay.operators"
                )
            if self._ended():
                return None
            index = self._window.num_takes
            group_ids = self._window.take(last=self._next_task is None)
            groups = self._consume(group_ids)
            reused = self._reuse.serve(index, groups) if self._reuse is not None else []
            self._served.append(group_ids)
            self._used_again.append([g.group_id for g in reused])
            self._lost_in_a_row = 0
            self._changed.notify_all()
        return self._assemble(index, groups, reused)

    async def trained(self, group_ids: Sequence[int]) -> None:
        """The oldest take that was served has been through all its steps. (`ReusePool` counts uses after the first.)"""
        again = self._used_again[0] if self._used_again else []
        for group_id in group_ids[: len(group_ids) - len(again)]:
            self._ledger.move(group_id, GroupState.TRAINED)
        served, again = self._served.popleft(), self._used_again.popleft()
        assert [*served, *again] == list(group_ids), "takes are trained on in the order in which they were served"
        self._trained.update(served)
        self.num_trained_takes += 1
        self._num_trained += len(served)
        first = self._first_open(over=set())
        self._draw_of = {g: draw for g, draw in self._draw_of.items() if g >= first}
        self._trained = {g for g in self._trained if g >= first}

    def position(self, policy_version: int) -> Position | None:
        """Where a run that goes on from these weights has to begin; None in the middle of a take's steps.

        The weights may be one take ahead of what `trained` was told.
        """
        takes, rest = divmod(policy_version, self._rule.updates_per_take)
        ahead = takes - self.num_trained_takes
        if rest or not 0 <= ahead <= len(self._served):
            return None
        over = {g for take in itertools.islice(self._served, ahead) for g in take}
        first = self._first_open(over=over)
        open_draws = [
            d for g, d in sorted(self._draw_of.items()) if g >= first and g not in self._trained and g not in over
        ]
        open_draws += [d for d in self._start.open_draws if d > self._last_draw]  # not even drawn again yet
        return Position(
            num_takes=takes,
            num_taken=self._num_trained + len(over),
            next_group_id=first,
            open_draws=open_draws,
            next_draw=max(self._start.next_draw, self._last_draw + 1),
        )

    @property
    def first_draw(self) -> int:
        """Every draw before this one is over."""
        drawn = min(self._draw_of.values(), default=self._last_draw + 1)
        return min([drawn, *(d for d in self._start.open_draws if d > self._last_draw)])

    async def published(self, policy_version: int) -> None:
        """A newer version can be pulled: more groups may start."""
        async with self._changed:
            assert policy_version > self._published, f"version {policy_version} published after {self._published}"
            self._published = policy_version
            self._changed.notify_all()

    async def close(self) -> None:
        """Nobody is admitted any more; waiting collectors get an empty list."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stats(self) -> BufferStats:
        return BufferStats(
            slots_in_use=self._window.num_outstanding,
            groups_ready=self._window.num_finished,
            groups_taken=self._window.num_taken,
            filtered=self._ledger.count(GroupState.FILTERED),
            failed=self._ledger.count(GroupState.FAILED),
            retries=self._ledger.num_retries,
            admitted=self._ledger.num_admitted,
            # Nothing is dropped for being stale: whatever was admitted and is nowhere else would be counted here.
            dropped_stale=self._ledger.num_admitted
            - self._window.num_taken
            - self._window.num_outstanding
            - self._ledger.count(GroupState.FILTERED)
            - self._ledger.count(GroupState.FAILED)
            - (self._start.next_group_id - self._start.num_taken),
        )

    def _operated(self, group: Group) -> Group | str:
        """The group as it is to be trained on, or why it is left out."""
        for operator in self._operators:
            result = operator(group)
            if isinstance(result, str):
                return result
            group = group if result is None else result
        return group

    def _first_open(self, *, over: set[int]) -> int:
        """The first group that is neither trained, filtered, failed nor in `over`; else the next to be admitted."""
        alive = (g for g in self._draw_of if self._ledger.is_alive(g) and g not in over)
        return min(alive, default=self._ledger.num_admitted)

    def _num_free_slots(self) -> int:
        if self._next_task is None:
            return 0
        limit = self._rule.num_admissible(published=self._published)
        if self._num_takes is not None:
            limit = min(limit, self._num_takes * self._rule.groups_per_take)
        return max(0, limit - self._window.alive)

    def _admit_one(self) -> Admission:
        task, self._next_task = self._next_task, next(self._tasks, None)
        assert task is not None
        group_id, floor = self._window.admit()
        self._draw_of[group_id] = next(self._draws)
        self._last_draw = self._draw_of[group_id]
        self._ledger.admit(group_id)
        return Admission(group_id=group_id, task=task, floor=floor)

    def _issue_again(self) -> Admission:
        group_id = self._to_reissue.pop(0)
        return replace(self._in_flight[group_id].admission, attempt=self._attempts[group_id])

    def _reissue(self, group_ids: Sequence[int], reason: str) -> None:
        for group_id in group_ids:
            if group_id not in self._in_flight or group_id in self._to_reissue:
                was = "waiting for that already" if group_id in self._to_reissue else self._ledger.state(group_id)
                raise RuntimeError(f"group {group_id} cannot be issued again: it is {was}")
        for group_id in set(group_ids):
            self._ledger.retry(group_id, reason)
            self._attempts[group_id] = self._attempts.get(group_id, 0) + 1
            self._in_flight[group_id] = replace(self._in_flight[group_id], collector=None)
        self._to_reissue = sorted({*self._to_reissue, *group_ids})

    def _superseded(self, group_id: int, attempt: int) -> bool:
        """Whether a collector speaks of an attempt that was taken from it."""
        newest = self._attempts.get(group_id, 0)
        if attempt < newest:
            logger.info("group %d: attempt %d comes late, attempt %d was issued", group_id, attempt, newest)
        return attempt < newest

    def _consume(self, group_ids: list[int]) -> list[Group]:
        places = [self._place.pop(g) for g in group_ids]
        self._chosen_sampler.chosen = places
        groups: list[Group] = self.sample(len(places))
        self._slot_writer.release(places)
        self.lengths.trained(groups)
        for group_id in group_ids:
            self._ledger.move(group_id, GroupState.TAKEN)
        return groups

    def _lose(self, group_id: int, state: GroupState, reason: str) -> None:
        self._ledger.move(group_id, state, reason)
        del self._in_flight[group_id]
        self._window.drop(group_id)
        self._lost_in_a_row += 1
        self._last_reason = reason

    def _no_progress(self) -> bool:
        lost_too_many = self._lost_in_a_row >= NO_PROGRESS_TAKES * self._rule.groups_per_take
        return lost_too_many and self._window.missing_for_take(last=self._next_task is None) is not None

    def _all_taken(self) -> bool:
        return self._num_takes is not None and self._window.num_takes >= self._num_takes

    def _ended(self) -> bool:
        return self._all_taken() or (self._next_task is None and self._window.num_outstanding == 0)

    def _no_more_admissions(self, collector: str) -> bool:
        # Tasks may have ended while others work on the last ones: if one of them is lost, its groups need a taker.
        tasks_ended = self._next_task is None and not self._in_flight
        return self._closed or tasks_ended or self._all_taken() or collector in self._lost_collectors

    async def _wait(self, ready: Callable[[], bool], timeout_s: float, missing: Callable[[], str]) -> None:
        """`self._changed` is held by the caller."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(ready)
        except TimeoutError:
            raise TimeoutError(f"waited {timeout_s:g} s for {missing()}") from None

    def __reduce__(self) -> Any:
        raise TypeError("a ReplayBuffer lives in one process; hand out its actor instead")
