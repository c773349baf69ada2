"""The replay buffer: which groups may start, which are finished, which are trained next.

A torchrl `ReplayBuffer` that waits instead of dropping data:

collectors --admit()--> [slots] --put()--> [storage] --take_batch()--> trainer
                           ^                                       |
                           +------------- published(v) <----------+

Every call that changes the state (`put`, `published`, ...) immediately serves the waiters that it unblocks: free slots
go to the waiting collectors, and a complete batch wakes the trainer. No other waiter is woken.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import torchrl.data
from tensordict import TensorDictBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from .. import spans
from ..group import Group
from ..tasks.queue_tasks import NoTaskYet
from ..types import Admission, Offer, Task, is_given
from .admission import AdmissionRule
from .ledger import GroupState, Ledger
from .length_bias import LengthBiasMeter
from .operators import Operator
from .position import Position
from .reuse import Priority, ReusePool
from .saved_groups import groups_as_text, groups_from_text
from .sources import Sources
from .stats import BufferStats
from .storage import FreeSlotWriter, SafetensorsCheckpointer, WindowSampler, stacked
from .window import Window

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_PROGRESS_BATCHES = 20
REASONS_KEPT = 100
_PARTS = ("storage", "sampler", "writer")
_PLAIN = (
    "published",
    "last_draw",
    "last_id",
    "to_reissue",
    "awaited_task",
    "num_trained",
    "dropped_in_a_row",
    "closed",
)
"""What a copy of a buffer takes over as it is."""
OPERATORS = "operators"
"""Who holds a group that was delivered, while its operators run in other processes."""
FIRST_SLOTS_S = 5.0
"""How long the first slots are held back for every collector to ask."""


class NoProgressError(RuntimeError):
    """Too many groups in a row were filtered or failed, and none became ready: the run would never train."""


@dataclass(frozen=True, kw_only=True)
class ServedBatch:
    """The groups of batch number `index`: new ones in admission order, and reused ones."""

    index: int
    groups: list[Group]
    reused: list[Group]

    @property
    def group_ids(self) -> list[int]:
        return [g.group_id for g in [*self.groups, *self.reused]]


@dataclass(frozen=True)
class _InFlight:
    """A group in flight: its admission, and the name of the collector that works on it (None: waiting for one)."""

    admission: Admission
    collector: str | None


@dataclass(slots=True, eq=False)
class _SlotRequest:
    """A collector that waits for slots. `capacity`: how many groups it can hold in total.

    `goes_last`: it gave back its groups, so others come first. `offer`: the tasks that it works on, where these are its
    explorer's own.
    """

    collector: str
    capacity: int
    answer: asyncio.Future[list[Admission]]
    issued: list[Admission] = field(default_factory=list)
    goes_last: bool = False
    offer: Offer | None = None

    @property
    def source(self) -> str:
        return "" if self.offer is None else self.offer.source


@dataclass(frozen=True, eq=False)
class _BatchWaiter:
    """Somebody who waits for a batch, or for groups of one."""

    is_due: Callable[[], bool]
    turn: asyncio.Future[None]


class ReplayBuffer(torchrl.data.ReplayBuffer):
    """Blocking, back-pressured, consume-once, whole groups only. One asyncio loop; any number of waiters.

    `tasks` is only drawn from here, so no two collectors ever get the same task. It may raise `NoTaskYet`;
    `tasks_arrived` then draws again. `start`: where an earlier run left off; `tasks` continues from there.
    `num_batches` ends the run after this many batches (None: when the tasks end). `reuse`: batches also hold groups
    that were used before. `priority`: among the groups that it may choose, the window prefers the best. `delivered` is
    called with every delivered group and its task, before operators, and never for one that was issued again.
    `num_collectors`: the first slots are handed out once this many have asked, or after `FIRST_SLOTS_S`. `anybody`:
    whether there is any now who generates; else no wait has a deadline. `drawn` is told the draw of the group that gets
    the next of `tasks`, `returned` that this group is no more and its task is to come again.

    `operators` are applied to each delivered group, here and now. `operated_elsewhere` does so in its own time instead:
    until it answers, the group is outstanding, as if it were still being generated, and nobody can deliver or take it.
    What it raises is raised by all that wait and by every later call; `failed` is told first.

    `storage`, `writer`, `sampler`, `transform` and `collate_fn` are torchrl's and do here what they do there: a group
    is stored as one flat TensorDict (`Group.packed`), and a batch is sampled as a lazy stack of these. A sampler
    chooses among the groups that the window leaves to choose. `dumps` and `loads` (and `state_dict`) also hold what is
    in flight, which is then issued again: a copy continues exactly, with `tasks` from the next draw on.

    A deadline (`timeout_s`) limits a wait without progress: it restarts with every group that is admitted, delivered,
    retried, lost or issued again, every batch, and every publication. It does not run while the trainer works on a
    batch, which has its own deadlines. So no part ends a run in which the others are making progress.
    """

    def __init__(
        self,
        *,
        tasks: Iterator[Task],
        rule: AdmissionRule,
        num_batches: int | None,
        capacity: int,
        operators: Sequence[Operator] = (),
        operated_elsewhere: Callable[[Group], Awaitable[Group | str]] | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
        start: Position | None = None,
        reuse: ReusePool | None = None,
        priority: Priority | None = None,
        delivered: Callable[[Task, Group], None] | None = None,
        num_collectors: int = 1,
        anybody: Callable[[], bool] = lambda: True,
        drawn: Callable[[int], None] = lambda draw: None,
        returned: Callable[[int, Task], None] = lambda draw, task: None,
        storage: Storage | None = None,
        writer: FreeSlotWriter | None = None,
        sampler: Sampler | None = None,
        transform: Any = None,
        collate_fn: Callable[[Any], TensorDictBase] = stacked,
    ) -> None:
        start = start or Position()
        # Queue indices count whole batches, though the last one before the resumption may have been short.
        start = replace(start, num_taken=start.num_batches * rule.groups_per_batch)
        self._slot_writer = FreeSlotWriter(capacity) if writer is None else writer
        self._window_sampler = WindowSampler(sampler)
        super().__init__(
            # A list of TensorDicts: torchrl's other storages of tensors reject ragged ones.
            storage=torchrl.data.LazyStackStorage(capacity) if storage is None else storage,
            checkpointer=SafetensorsCheckpointer(),
            writer=self._slot_writer,
            sampler=self._window_sampler,
            transform=transform,
            collate_fn=collate_fn,
        )
        self._tasks = tasks
        self._next_task: Task | None = None
        self._awaited_task = ""  # what the source is waiting for, if it has no task now
        self._rule = rule
        self._num_batches = num_batches
        self._operators = list(operators)
        self._operated_elsewhere, self._on_failed = operated_elsewhere, failed
        self._operating: dict[int, asyncio.Task[None]] = {}
        self._outcomes: dict[int, asyncio.Future[bool]] = {}  # of those: whether they are kept
        self._failure: Exception | None = None
        self._delivered = delivered
        self.length_bias = LengthBiasMeter()
        self._window = Window(rule, num_batches=start.num_batches, num_taken=start.num_taken)
        self._reuse, self._priority = reuse, priority
        self._ledger = Ledger()
        self._start = start
        self._draws, self._last_draw = start.draws(), -1
        self._last_id = min([start.next_draw, *start.open_draws]) - 1
        self._draw_of: dict[int, int] = {}  # of groups of `tasks`, from the first one that is not over
        self._trained: set[int] = set()  # of those
        self._served: deque[list[int]] = deque()  # batches that are being trained on, new groups only
        self._used_again: deque[list[int]] = deque()  # the others of these batches
        self.num_trained_batches, self._num_trained = start.num_batches, start.num_taken
        self._storage_index: dict[int, int] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._num_held: Counter[str] = Counter()  # groups in flight, by collector
        self._to_reissue: list[int] = []
        self._attempts: dict[int, int] = {}  # of groups that were ever issued again: few
        self._retired: set[str] = set()
        self._published = -1
        self._dropped_in_a_row = 0
        self._last_reasons: deque[str] = deque(maxlen=REASONS_KEPT)  # of these
        self._closed = False
        self._slot_requests: dict[_SlotRequest, None] = {}  # in the order in which they asked
        self._batch_waiters: deque[_BatchWaiter] = deque()
        self._works_ahead = False
        self._num_expected: int = num_collectors
        self._anybody = anybody
        self._on_drawn, self._on_returned = drawn, returned
        self._sources = Sources(start.sources)
        self._kept: dict[int, Group] = {}
        self._kept_of: dict[tuple[str, int], Group] = {}
        self._given: deque[tuple[tuple[str, int], Group]] = deque()  # in an earlier life of the run
        self._draw_ahead: int | None = None
        self._have_asked: set[str] = set()  # collectors that have asked, until all have
        self._held_back: asyncio.TimerHandle | None = None
        self._progress_at = float("-inf")
        self.last_delivered = ("", -1)
        """The collector that delivered last, and its group."""
        self._draw()

    async def admit(
        self, limit: int, *, timeout_s: float, collector: str = "", offer: Offer | None = None
    ) -> list[Admission]:
        """Wait for at least one group, then start up to `limit`. An empty list: there will never be another group.

        Groups to issue again come first, in order. `collector` is the caller, so that `mark_dead` knows what it holds.
        Groups that it delivers while it waits free room, so it may get more than `limit`.

        If several collectors wait, slots go one by one to the one with the smallest share of its room in use: each
        batch is then made by all of them. No slot is kept free while any collector asks. Raises TimeoutError, naming
        what it waited for.

        `offer`: an explorer's own tasks, of which groups are made instead of `tasks`. Groups of a source are issued
        again to those who offer that source.
        """
        self._raise_failure()
        if self._is_over() or collector in self._retired:
            return []
        answer = asyncio.get_running_loop().create_future()
        request = _SlotRequest(collector, self._num_held[collector] + limit, answer, offer=offer)
        self._slot_requests[request] = None
        self._hold_back(collector)
        try:
            self._hand_out_slots()
            return await self._until(
                answer,
                timeout_s,
                self._what_admits,
                counts=lambda: not self._batch_waiters,  # else the batch says what is missing
            )
        except asyncio.CancelledError:
            self._reclaim(request)
            raise
        finally:
            self._slot_requests.pop(request, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # what ended the run is raised here already

    async def put(self, groups: Sequence[Group]) -> None:
        """Deliver finished groups. Each is stored, or filtered with a reason. Delivering one twice raises.

        A group from an old attempt that has since been issued again is ignored: only the newest attempt counts.
        """
        self._raise_failure()
        current = [group for group in groups if not self._superseded(group.group_id, group.attempt)]
        self._accept(current)
        if current:
            self._progressed()

    def admission_of(self, group_id: int, collector: str) -> Admission | None:
        """Of a group in flight that this collector holds."""
        held = self._in_flight.get(group_id)
        if held is None or held.collector != collector:
            return None
        return replace(held.admission, attempt=self._attempts.get(group_id, 0))

    def next_min_version(self) -> int | None:
        """The oldest policy version that a group may be of that is given now; None: no more groups are wanted. Above
        the newest version, there is room for none.
        """
        queue_index = self._window.next_queue_index
        if self._closed or self._all_taken():
            return None
        if self._num_batches is not None and queue_index >= self._num_batches * self._rule.groups_per_batch:
            return None
        return self._rule.min_policy_version(queue_index)

    def is_known(self, of: tuple[str, int]) -> bool:
        """Whether this draw is over, in a group, or kept."""
        return not self._sources.is_wanted(*of) or of in self._kept_of or any(given == of for given, _ in self._given)

    def give(self, group: Group, *, of: tuple[str, int], prompt: str = "") -> int:
        """A finished group that nobody was asked for: admitted, and delivered, in one. Returns its id.

        It may be of any version from `next_min_version` on: it never waits for anything, so the bound alone limits how
        many there are, not `target_lag`. Whether it is filtered says nothing of the run's progress.
        """
        oldest, newest = group.policy_versions()
        needed = self.next_min_version()
        if needed is None or not needed <= oldest <= newest <= self._published or not self._sources.is_wanted(*of):
            raise RuntimeError(f"a group of versions {oldest} to {newest} was given, expected from {needed} on")
        group_id = self._take(group, of, prompt)
        self._progressed()
        return group_id

    def num_held(self, collector: str) -> int:
        """How many groups in flight this collector holds."""
        return self._num_held.get(collector, 0)

    def has(self, group_id: int) -> bool:
        """Whether the group is stored, and not yet in a batch."""
        return group_id in self._storage_index

    def keep(self, group: Group, *, of: tuple[str, int]) -> bool:
        """A group that an earlier life of the run has admitted, and that was finished since: it takes the place of its
        draw when that comes, if its tokens are then of versions that it may have. Returns whether that can still be.
        """
        source, draw = of
        if source:
            wanted = not self.is_known(of)
            if wanted and is_given(source):
                self._given.append((of, group))
            elif wanted:
                self._kept_of[of] = group
            return wanted
        if draw <= self._last_draw or draw in self._kept or draw not in self._start:
            return False
        self._kept[draw] = group
        return True

    def _accept(self, current: Sequence[Group], *, is_given: bool = False) -> None:
        if self._delivered is not None:
            for group in current:
                if (held := self._in_flight.get(group.group_id)) is not None:  # else the ledger refuses it below
                    with self._ending_the_run():
                        self._delivered(held.admission.task, group)
        if self._operated_elsewhere is None:
            with self._ending_the_run():
                results = [self._apply_operators(group) for group in current]
            for group, result in zip(current, results, strict=True):
                self._decide(group, result, is_given=is_given)
            self._wake_batch_waiter()
            return
        loop = asyncio.get_running_loop()
        for group in current:
            self._ledger.move(group.group_id, GroupState.DELIVERED)
            held = self._release(group.group_id)
            self._hold(group.group_id, replace(held, collector=OPERATORS))
            self._outcomes[group.group_id] = loop.create_future()
            self._operating[group.group_id] = loop.create_task(self._operate(group, is_given=is_given))

    async def _operate(self, group: Group, *, is_given: bool) -> None:
        assert self._operated_elsewhere is not None
        try:
            result = await self._operated_elsewhere(group)
            self._decide(group, result, is_given=is_given)
            del self._operating[group.group_id]
            self._outcomes.pop(group.group_id).set_result(not isinstance(result, str))
            self._progressed()  # which draws tasks, whose source may raise
        except Exception as error:
            self._fail_run(error)

    def left_out(self, group_ids: Sequence[int]) -> Awaitable[list[int]]:
        """Those of these groups, which were delivered in this moment, that operators leave out; awaited, it waits for
        the operators. A failure of these ends it without an answer: that is told to everybody else.
        """
        outcomes = {g: self._outcomes[g] for g in group_ids if g in self._outcomes}
        known = [g for g in group_ids if g not in outcomes and g not in self._storage_index]

        async def answer() -> list[int]:
            return [*known, *[g for g, kept in outcomes.items() if not await kept]]

        return answer()

    def stop(self) -> None:
        """Operators are waited for no more: another run takes the place of this one."""
        for task in self._operating.values():
            task.cancel()
        for outcome in self._outcomes.values():
            outcome.cancel()

    def _fail_run(self, error: Exception) -> None:
        """All that wait raise it, so that no wait ends in a time-out that explains nothing."""
        if self._failure is not None:
            return
        self._failure = error
        self._on_failed(error)
        self.stop()
        asking = [request.answer for request in self._slot_requests]
        for waiter in [*asking, *(waiter.turn for waiter in self._batch_waiters)]:
            if not waiter.done():
                waiter.set_exception(error)

    @contextmanager
    def _ending_the_run(self) -> Iterator[None]:
        """Around what is the run's own: its tasks, operators, priorities. Who calls may be told of an error, and live
        on, as an explorer does that delivers what is no group: then nobody else would hear of it.
        """
        try:
            yield
        except Exception as error:
            self._fail_run(error)
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _decide(self, group: Group, result: Group | str, *, is_given: bool) -> None:
        """Store the group in the form that operators gave it, or leave it out for their reason."""
        self.length_bias.generated(group)
        if isinstance(result, str):
            self._drop(group.group_id, GroupState.FILTERED, result, counts=not is_given)
            spans.instant("filtered", group=group.group_id, why=result)
            return
        with self._ending_the_run():
            priority = self._priority(result) if self._priority else None
        self._ledger.move(group.group_id, GroupState.GENERATED)
        spans.instant("stored", group=group.group_id)
        self.last_delivered = self._release(group.group_id).collector or "", group.group_id
        # A copy: what came through Ray is a view of its object store, and would hold a part of that.
        with self._ending_the_run():  # the storage may be a user's
            index = self._storage_index[group.group_id] = self.add(result.packed())
        self._window.finish(group.group_id, priority=priority or 0.0)
        if self._window_sampler.is_prioritized:
            with self._ending_the_run():  # and so may the sampler
                priority = self._window_sampler.default_priority if priority is None else priority
                self.update_priority(index, torch.tensor(float(priority)))
        self._dropped_in_a_row = 0
        self._last_reasons.clear()

    async def retried(self, group_id: int, *, attempt: int = 0) -> None:
        """The collector that holds this group retries it: same queue index, same `min_policy_version`."""
        if not self._superseded(group_id, attempt):
            self._ledger.retry(group_id)
            self._progressed()

    async def fail(self, group_id: int, reason: str, *, attempt: int = 0, counts: bool = True) -> None:
        """This group has failed permanently. `counts`: many such in a row are this run's own failure."""
        if not self._superseded(group_id, attempt):
            self._drop(group_id, GroupState.FAILED, reason, counts=counts)
            spans.instant("failed", group=group_id, why=reason)
            self._progressed()

    async def reissue(self, group_ids: Sequence[int], reason: str) -> None:
        """Take these groups in flight from their collectors; the next `admit` calls hand them out, before new ones.

        They keep slot, queue index and `min_policy_version`: bound and order hold as if they had only taken longer.
        Later reports from the former holder are ignored. Raises RuntimeError, and changes nothing, if one of them is
        not in flight.
        """
        self._reissue(group_ids, reason)
        self._progressed()

    async def give_back(self, collector: str, reason: str) -> list[int]:
        """This collector cannot finish its groups: issue them again to any collector; returns the groups' ids."""
        held = sorted(g for g, h in self._in_flight.items() if h.collector == collector)
        self._reissue(held, reason)
        for request in self._slot_requests:
            request.goes_last |= request.collector == collector
        self._progressed()
        return held

    async def mark_dead(self, collector: str, reason: str) -> list[int]:
        """This collector is gone: as `give_back`, and it never gets a group again.

        Its name is never admitted again, because a call that it left pending here could be given groups that nobody
        receives. A replacement collector asks under another name.
        """
        await self.retire(collector)
        return await self.give_back(collector, reason)

    def restart_deadlines(self) -> None:
        """Whoever generates has only now come."""
        self._progress_at = asyncio.get_running_loop().time()

    async def withdraw(self, source: str) -> list[int]:
        """Nobody is left who could generate groups of this source ("": the trainer's own tasks). What is in flight of
        it ends, and its tasks will be drawn again. Returns the groups' ids.
        """
        gone = sorted(g for g in self._in_flight if self.of(g)[0] == source and g not in self._operating)
        for group_id in reversed(gone):
            task = self._in_flight[group_id].admission.task
            self._ledger.move(group_id, GroupState.RETURNED)
            self._release(group_id)
            self._window.drop(group_id)
            if source:
                self._sources.returned(group_id)
            else:
                self._on_returned(self._draw_of.pop(group_id), task)
        self._to_reissue = sorted(set(self._to_reissue).difference(gone))
        if gone and not source and self._next_task is None:
            self._draw()
        self._progressed()
        return gone

    def of(self, group_id: int) -> tuple[str, int]:
        """(source, draw) of a group that is not over; the trainer's own tasks are source ""."""
        return self._sources.of(group_id) or ("", self._draw_of.get(group_id, -1))

    def where(self, source: str) -> tuple[int, list[int]]:
        """See `Sources.where`."""
        return self._sources.where(source)

    async def retire(self, collector: str) -> None:
        """This collector never gets a group again: its next `admit` is answered with none. What it holds it finishes.

        An `admit` that waits is answered now.
        """
        self._retired.add(collector)
        for request in [r for r in self._slot_requests if r.collector == collector]:
            self._answer(request)

    async def take_batch(self, *, timeout_s: float) -> ServedBatch | None:
        """Wait for the next batch; None if the tasks have ended or all batches were served.

        Raises TimeoutError naming what is missing, and `NoProgressError` if too many groups in a row are lost.
        """
        await self._wait_until(self._batch_is_due, timeout_s)
        if not self._ended() and self._no_progress():
            raise NoProgressError(
                f"{self._dropped_in_a_row} groups in a row were dropped without being trained on "
                f"({_most_common(self._last_reasons)}); "
                "the tasks are all too easy or too hard, or the environment fails: "
                "check rollouts, rewards and replay.operators"
            )
        if self._ended():
            self._wake_batch_waiter()
            return None
        index = self._window.num_batches
        groups = self._consume()
        group_ids = [g.group_id for g in groups]
        reused = self._reuse.serve(index, groups) if self._reuse is not None else []
        self._served.append(group_ids)
        self._used_again.append([g.group_id for g in reused])
        self._dropped_in_a_row = 0
        self._last_reasons.clear()
        self._progressed()
        return ServedBatch(index=index, groups=groups, reused=reused)

    async def groups_ahead(self, known: Collection[int], *, at_least: int, timeout_s: float) -> list[Group]:
        """Wait for `at_least` groups beside those of `known` that the next batch is sure to hold, and read them; no
        groups once the batch itself is due.

        `known`: what was read of this batch so far. Nothing is taken: `take_batch` hands out the whole batch, these
        included. Until the next call here or there, the trainer works on them. Raises as `take_batch` does.
        """

        def are_there() -> bool:
            return self._batch_is_due() or self._window.num_settled - len(known) >= at_least

        await self._wait_until(are_there, timeout_s)
        if self._batch_is_due():
            return []
        new = [group_id for group_id in self._window.settled() if group_id not in known]
        self._works_ahead = True
        return [Group.unpacked(self[self._storage_index[group_id]]) for group_id in new]

    async def _wait_until(self, is_due: Callable[[], bool], timeout_s: float) -> None:
        """`is_due` is asked again whenever a group came or went."""
        self._raise_failure()
        self._works_ahead = False
        while not is_due():
            waiter = _BatchWaiter(is_due, asyncio.get_running_loop().create_future())
            self._batch_waiters.append(waiter)
            try:
                await self._until(waiter.turn, timeout_s, self._missing)
            finally:
                if waiter in self._batch_waiters:
                    self._batch_waiters.remove(waiter)
            self._raise_failure()

    async def trained(self, group_ids: Sequence[int]) -> None:
        """The oldest served batch has finished all its steps. (`ReusePool` counts uses after the first.)"""
        again = self._used_again[0] if self._used_again else []
        for group_id in group_ids[: len(group_ids) - len(again)]:
            self._ledger.move(group_id, GroupState.TRAINED)
        served, again = self._served.popleft(), self._used_again.popleft()
        assert [*served, *again] == list(group_ids), "batches are trained on in the order in which they were served"
        self._trained.update(served)
        self.num_trained_batches += 1
        self._num_trained += len(served)
        first = self._first_open(over=set())
        for group_id in served:
            self._sources.over(group_id)
        self._draw_of = {g: draw for g, draw in self._draw_of.items() if g >= first}
        self._trained = {g for g in self._trained if g >= first}
        self._progressed()

    def position(self, policy_version: int) -> Position | None:
        """Where a run resumed from these weights has to begin; None in the middle of a batch's steps.

        The weights may be one batch ahead of the last call of `trained`.
        """
        batches, rest = divmod(policy_version, self._rule.updates_per_batch)
        ahead = batches - self.num_trained_batches
        if rest or not 0 <= ahead <= len(self._served):
            return None
        over = {g for batch in itertools.islice(self._served, ahead) for g in batch}
        first = self._first_open(over=over)
        counted = {*self._trained, *over}
        open_draws = [draw for g, draw in self._draw_of.items() if g >= first and g not in counted]
        open_draws += [d for d in self._start.open_draws if d > self._last_draw]  # not drawn again yet
        return Position(
            num_batches=batches,
            num_taken=self._num_trained + len(over),
            open_draws=open_draws,
            next_draw=max(self._start.next_draw, self._last_draw + 1),
            sources=self._sources.position(over=over),
        )

    @property
    def first_draw(self) -> int:
        """Every draw before this one is over."""
        drawn = next(iter(self._draw_of.values()), self._last_draw + 1)
        return min([drawn, *(d for d in self._start.open_draws if d > self._last_draw)])

    async def published(self, policy_version: int) -> None:
        """A newer version can be pulled: more groups may start."""
        assert policy_version > self._published, f"version {policy_version} published after {self._published}"
        self._published = policy_version
        self._progressed()

    @property
    def awaits_a_task(self) -> bool:
        """Whether the source had no task when it was last asked."""
        return bool(self._awaited_task)

    async def tasks_arrived(self) -> None:
        """The source may now have a task, or may have ended."""
        self._draw()
        if not self._awaited_task:
            self._progressed()

    async def close(self) -> None:
        """Admit no more groups; waiting collectors get an empty list."""
        self._closed = True
        self._progressed()

    def stats(self) -> BufferStats:
        return BufferStats(
            slots_in_use=self._window.num_outstanding,
            groups_ready=self._window.num_finished,
            groups_taken=self._window.num_taken,
            filtered=self._ledger.count(GroupState.FILTERED),
            failed=self._ledger.count(GroupState.FAILED),
            returned=self._ledger.count(GroupState.RETURNED),
            retries=self._ledger.num_retries,
            admitted=self._start.num_taken + self._ledger.num_admitted,
            # Nothing is dropped for being stale: a group that was admitted and is nowhere else would be counted here.
            dropped_stale=self._ledger.num_admitted
            - (self._window.num_taken - self._start.num_taken)
            - self._window.num_outstanding
            - self._ledger.count(GroupState.FILTERED)
            - self._ledger.count(GroupState.FAILED)
            - self._ledger.count(GroupState.RETURNED),
        )

    def _apply_operators(self, group: Group) -> Group | str:
        """The group in the form to train on, or the reason why it is left out."""
        for operator in self._operators:
            result = operator(group)
            if isinstance(result, str):
                return result
            group = group if result is None else result
        return group

    def _first_open(self, *, over: set[int]) -> int:
        """The first group that is neither trained, filtered, failed nor in `over`; else the next to be admitted."""
        still_open = (g for g in self._draw_of if self._ledger.is_open(g) and g not in over)
        return next(still_open, self._last_id + 1)

    def _num_free_slots(self) -> int:
        return self._num_places() if self._next_task is not None else 0

    def _num_places(self) -> int:
        """How many more groups may start now, if there are tasks for them."""
        limit = self._rule.num_admissible(published=self._published)
        if self._num_batches is not None:
            limit = min(limit, self._num_batches * self._rule.groups_per_batch)
        return max(0, limit - self._window.next_queue_index)

    def _progressed(self) -> None:
        """Restart the deadlines, and wake every waiter that can continue."""
        self._progress_at = asyncio.get_running_loop().time()
        self._hand_out_slots()
        self._wake_batch_waiter()

    def _hold_back(self, collector: str) -> None:
        """The first slots wait for all collectors; otherwise the first to ask would get whole batches."""
        if len(self._have_asked) >= self._num_expected:
            return
        self._have_asked.add(collector)
        if self._held_back is None and len(self._have_asked) < self._num_expected:
            self._held_back = asyncio.get_running_loop().call_later(FIRST_SLOTS_S, self._stop_holding_back)
        elif self._held_back is not None and len(self._have_asked) >= self._num_expected:
            self._held_back.cancel()

    def _stop_holding_back(self) -> None:
        self._num_expected = 0
        try:
            self._hand_out_slots()
        except Exception as error:  # of the source of tasks: nobody awaits this
            self._fail_run(error)

    def _hand_out_slots(self) -> None:
        """Answer the collectors for which there is a group, or for which there will never be one again."""
        if self._published < 0 and (self._kept or self._kept_of or self._given):
            return  # of which version they may be is known with the first publication
        self._admit_given()
        self._admit_kept()
        if not self._slot_requests:
            return
        if self._is_over():
            for request in list(self._slot_requests):
                self._answer(request)
            return
        if len(self._have_asked) < self._num_expected or not (self._to_reissue or self._num_places()):
            return
        emptiest = [(*self._fullness(r), i, r) for i, r in enumerate(self._slot_requests) if self._has_room(r)]
        heapq.heapify(emptiest)
        given: dict[_SlotRequest, None] = {}
        try:
            while emptiest and (self._to_reissue or self._num_places()):
                *_, number, request = emptiest[0]
                admission = self._next_for(request) if self._has_room(request) else None  # several calls of one
                if admission is None:
                    heapq.heappop(emptiest)
                    if request.offer is not None and request.offer.used and not request.offer.tasks:
                        given[request] = None  # none of what it offered was wanted: it has others
                    continue
                self._hold(admission.group_id, _InFlight(admission, request.collector))
                request.issued.append(admission)
                given[request] = None
                heapq.heapreplace(emptiest, (*self._fullness(request), number, request))
        finally:  # also if drawing a task fails: groups that were already assigned must be delivered
            for request in given:
                self._answer(request)
            if given:
                self._progress_at = asyncio.get_running_loop().time()

    def _next_for(self, request: _SlotRequest) -> Admission | None:
        """A group that this collector can generate."""
        source, offer = request.source, request.offer
        for group_id in self._to_reissue:
            if self.of(group_id)[0] == source:
                return self._issue_again(group_id)
        if offer is None:
            self._admit_kept()
            return self._admit_one() if self._num_free_slots() else None
        while offer.tasks and self._num_places():
            draw, task = offer.tasks.popleft()
            offer.used.append(draw)
            if not self._sources.is_wanted(source, draw):
                continue
            admission = self._admitted(task)
            self._sources.admitted(admission.group_id, source, draw)
            kept = self._kept_of.pop((source, draw), None)
            if kept is None or not self._may_be(kept, admission):
                return admission
            self._in_flight[admission.group_id] = _InFlight(admission, None)
            self._accept([replace(kept, group_id=admission.group_id, attempt=0)])
        return None

    def _has_room(self, request: _SlotRequest) -> bool:
        return self._num_held[request.collector] < request.capacity

    def _fullness(self, request: _SlotRequest) -> tuple[bool, float]:
        return request.goes_last, self._num_held[request.collector] / request.capacity

    def _answer(self, request: _SlotRequest) -> None:
        del self._slot_requests[request]
        if not request.answer.done():
            request.answer.set_result(request.issued)

    def _reclaim(self, request: _SlotRequest) -> None:
        """The call was cancelled before it received its groups."""
        not_received = [a.group_id for a in request.issued if self._is_held(a, request.collector)]
        if not_received:
            self._reissue(not_received, "the call that asked for it was cancelled")
            self._progressed()

    def _is_held(self, admission: Admission, collector: str) -> bool:
        held = self._in_flight.get(admission.group_id)
        current = not self._superseded(admission.group_id, admission.attempt)
        return held is not None and held.collector == collector and current

    def _batch_is_due(self) -> bool:
        return self._no_progress() or self._ended() or self._window.is_ready(last=self._tasks_ended)

    def _wake_batch_waiter(self) -> None:
        due = next((waiter for waiter in self._batch_waiters if waiter.is_due()), None)
        if due is not None:
            self._batch_waiters.remove(due)
            if not due.turn.done():
                due.turn.set_result(None)

    def _admit_one(self) -> Admission:
        """A new group. Its id is its draw number, so it is the same in every run resumed from this one; only groups of
        explorers' own tasks, which take ids and no draws, push it back, and those that may be used again.
        """
        task = self._next_task
        assert task is not None
        self._draw()
        draw = self._last_draw = self._upcoming_draw()
        self._draw_ahead = None
        admission = self._admitted(task, at_least=draw)
        self._draw_of[admission.group_id] = draw
        self._on_drawn(draw)
        return admission

    def _admitted(self, task: Task, *, at_least: int = 0) -> Admission:
        group_id = max(self._last_id + 1, at_least)
        while self._reuse is not None and group_id in self._reuse:  # of an earlier life of the run
            group_id += 1
        self._last_id = group_id
        min_policy_version = self._window.admit(group_id)
        self._ledger.admit(group_id)
        spans.instant("admitted", group=group_id, version=min_policy_version)
        return Admission(group_id=group_id, task=task, min_policy_version=min_policy_version)

    def _upcoming_draw(self) -> int:
        if self._draw_ahead is None:
            self._draw_ahead = next(self._draws)
        return self._draw_ahead

    def _take(self, group: Group, of: tuple[str, int], prompt: str) -> int:
        admission = self._admitted(Task(task_id=group.task_id, prompt=prompt))
        self._sources.admitted(admission.group_id, *of)
        self._in_flight[admission.group_id] = _InFlight(admission, None)
        self._accept([replace(group, group_id=admission.group_id, attempt=0)], is_given=True)
        return admission.group_id

    def _admit_given(self) -> None:
        """First, and in their order: so each has at most the queue index that it had before."""
        while self._given and (needed := self.next_min_version()) is not None and needed <= self._published:
            of, group = self._given.popleft()
            if needed <= group.policy_versions()[0]:
                self._take(group, of, "")
            else:
                logger.warning("group %d of %s cannot be trained on: it needs version %d", of[1], of[0], needed)

    def _admit_kept(self) -> None:
        """Groups that were finished before they were drawn again: nobody need make them."""
        while self._kept and self._num_free_slots():
            group = self._kept.pop(self._upcoming_draw(), None)
            if group is None or not self._is_kept_for(group):
                return
            admission = self._admit_one()
            self._in_flight[admission.group_id] = _InFlight(admission, None)
            self._accept([replace(group, group_id=admission.group_id, attempt=0)])

    def _is_kept_for(self, group: Group) -> bool:
        """Whether it is of the task that comes next, and new enough for the place that it would get."""
        assert self._next_task is not None, "there is a free slot"
        min_policy_version = self._rule.min_policy_version(self._window.next_queue_index)
        admission = Admission(group_id=group.group_id, task=self._next_task, min_policy_version=min_policy_version)
        return self._may_be(group, admission)

    def _may_be(self, kept: Group, admission: Admission) -> bool:
        oldest, newest = kept.policy_versions()
        fits = kept.task_id == admission.task.task_id and admission.min_policy_version <= oldest
        if not (fits and newest <= self._published):
            logger.info("group %d is made again: what was kept of it cannot be trained on", admission.group_id)
            return False
        return True

    @property
    def _tasks_ended(self) -> bool:
        return self._next_task is None and not self._awaited_task

    def _draw(self) -> None:
        """One task is drawn ahead, to know whether a batch is the last one."""
        with self._ending_the_run():
            try:
                self._next_task, self._awaited_task = next(self._tasks, None), ""
            except NoTaskYet as error:
                self._next_task, self._awaited_task = None, str(error)

    def _issue_again(self, group_id: int) -> Admission:
        self._to_reissue.remove(group_id)
        return replace(self._in_flight[group_id].admission, attempt=self._attempts[group_id])

    def _reissue(self, group_ids: Sequence[int], reason: str) -> None:
        for group_id in group_ids:
            if group_id not in self._in_flight or group_id in self._to_reissue or group_id in self._operating:
                was = "waiting for that already" if group_id in self._to_reissue else self._ledger.state(group_id)
                raise RuntimeError(f"group {group_id} cannot be issued again: it is {was}")
        for group_id in set(group_ids):
            self._ledger.retry(group_id)
            self._attempts[group_id] = self._attempts.get(group_id, 0) + 1
            spans.instant("reissued", group=group_id, why=reason)
            held = self._release(group_id)
            self._in_flight[group_id] = replace(held, collector=None)
        if group_ids:
            logger.warning("issued again, %s: groups %s", reason, ", ".join(map(str, sorted(set(group_ids)))))
        self._to_reissue = sorted({*self._to_reissue, *group_ids})

    def _superseded(self, group_id: int, attempt: int) -> bool:
        """Whether a collector's report is about an attempt that was taken away from it."""
        newest = self._attempts.get(group_id, 0)
        if attempt < newest:
            logger.info("group %d: late attempt %d ignored, attempt %d was issued", group_id, attempt, newest)
        return attempt < newest

    def _consume(self) -> list[Group]:
        """The groups of the next batch, in admission order: what the sampler chooses from what the window allows."""
        last = self._tasks_ended
        choice = self._window.choice(last=last)
        allowed = {self._storage_index[group_id]: group_id for group_id in [*choice.must, *choice.may]}
        self._window_sampler.allow(
            [self._storage_index[g] for g in choice.must], [self._storage_index[g] for g in choice.may]
        )
        tensors, info = self.sample(choice.size, return_info=True)
        indices = info["index"].tolist()
        group_ids = self._window.take_batch(last=last, chosen=[allowed[index] for index in indices])
        groups = sorted((Group.unpacked(own) for own in tensors.unbind(0)), key=lambda g: g.group_id)
        if [g.group_id for g in groups] != group_ids:
            raise RuntimeError(f"a transform of the buffer made other groups; expected groups {group_ids}")
        self._slot_writer.release(indices)
        if self._window_sampler.is_prioritized:
            self.update_priority(info["index"], torch.zeros(len(indices)))
        self.length_bias.trained(groups)
        for group_id in group_ids:
            del self._storage_index[group_id]
            self._ledger.move(group_id, GroupState.TAKEN)
        return groups

    def _drop(self, group_id: int, state: GroupState, reason: str, *, counts: bool = True) -> None:
        """`counts`: too many such in a row end the run."""
        self._ledger.move(group_id, state)
        self._release(group_id)
        self._window.drop(group_id)
        self._sources.over(group_id)
        if counts:
            self._dropped_in_a_row += 1
            self._last_reasons.append(reason)

    def _hold(self, group_id: int, held: _InFlight) -> None:
        self._in_flight[group_id] = held
        if held.collector is not None:
            self._num_held[held.collector] += 1

    def _release(self, group_id: int) -> _InFlight:
        """No collector holds it any more."""
        held = self._in_flight.pop(group_id)
        if held.collector is not None:
            self._num_held[held.collector] -= 1
            if not self._num_held[held.collector]:
                del self._num_held[held.collector]
        return held

    def _no_progress(self) -> bool:
        dropped_too_many = self._dropped_in_a_row >= NO_PROGRESS_BATCHES * self._rule.groups_per_batch
        return dropped_too_many and not self._window.is_ready(last=self._tasks_ended)

    def _all_taken(self) -> bool:
        return self._num_batches is not None and self._window.num_batches >= self._num_batches

    def _ended(self) -> bool:
        return self._all_taken() or (self._tasks_ended and self._window.num_outstanding == 0)

    def _all_admitted(self) -> bool:
        """The tasks have ended, or every group that the run will ever take has been admitted."""
        return self._tasks_ended or (
            self._num_batches is not None
            and self._window.next_queue_index >= self._num_batches * self._rule.groups_per_batch
        )

    def _is_over(self) -> bool:
        """No further group will be admitted."""
        # While a collector works on the last groups, one of them may be lost and then needs another collector.
        return self._closed or (self._all_admitted() and not self._in_flight)

    async def _until(
        self,
        answer: asyncio.Future[T],
        timeout_s: float,
        missing: Callable[[], str],
        *,
        counts: Callable[[], bool] = lambda: True,
    ) -> T:
        """The result of `answer`. Raises TimeoutError if there was no progress for `timeout_s`.

        That time counts only while `counts()` is true, somebody generates, and the trainer is not working on a batch.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not answer.done():
            left_s = max(since, self._progress_at) + timeout_s - loop.time()
            if left_s > 0:
                await asyncio.wait({answer}, timeout=left_s)
            elif self._served or self._works_ahead or not self._anybody() or not counts():
                since = loop.time()
            else:
                raise TimeoutError(f"waited {timeout_s:g} s for {missing()} without progress: {self._who_has_what()}")
        return answer.result()

    def _what_admits(self) -> str:
        state = f"published version {self._published}, {self._window.num_outstanding} groups outstanding"
        return f"{self._awaited_task or 'a slot'} ({state})"

    def _missing(self) -> str:
        missing = str(self._window.missing_for_batch(last=self._tasks_ended))
        return f"{self._awaited_task} ({missing})" if self._awaited_task else missing

    def _who_has_what(self) -> str:
        """Which part could be expected to act."""
        must = set(self._window.must_finish())
        holders: dict[str, list[int]] = {}
        for group_id, held in self._in_flight.items():
            holders.setdefault(held.collector or "nobody", []).append(group_id)
        said = [
            f"{holder or 'a collector'} holds {len(ids)} groups"
            + (f" (group {waited[0]} among them)" if (waited := sorted(must.intersection(ids))) else "")
            for holder, ids in holders.items()
        ]
        said.append(f"{len(self._slot_requests)} wait for a slot")
        return ", ".join([*said[:10], f"published version {self._published}"])

    # ------------------------------------------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """torchrl's own, and under "run" the life of every group, as JSON-able data."""
        return {**super().state_dict(), "run": self._run_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of a buffer with the same rule, before anybody asks it for anything. What was in flight is issued again."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "run"})
        self._load_run_state(state_dict["run"])

    def dumps(self, path: str | Path) -> None:
        """Into a folder, tensors as safetensors. Not torchrl's own, which writes and reads a pickle."""
        path = Path(path)
        for name in _PARTS:
            getattr(self, name).dumps(path / name)
        safetensors.torch.save_file(dict(self.transform.state_dict()), path / "transform.safetensors")
        (path / "run.json").write_text(json.dumps(self._run_state()))

    def loads(self, path: str | Path) -> None:
        path = Path(path)
        for name in _PARTS:
            getattr(self, name).loads(path / name)
        self.transform.load_state_dict(safetensors.torch.load_file(path / "transform.safetensors"))
        self._load_run_state(json.loads((path / "run.json").read_text()))

    def _run_state(self) -> dict[str, Any]:
        reusable = self._reuse.state_dict() if self._reuse is not None else {}
        return {
            **{name: getattr(self, f"_{name}") for name in _PLAIN},
            "window": self._window.state_dict(),
            "ledger": self._ledger.state_dict(),
            "sources": self._sources.state_dict(),
            "length_bias": self.length_bias.state_dict(),
            "start": asdict(self._start),
            "next_task": None if self._next_task is None else asdict(self._next_task),
            "served": [list(ids) for ids in self._served],
            "used_again": [list(ids) for ids in self._used_again],
            "reusable": [[num_batches, groups_as_text(used)] for num_batches, used in reusable.items()],
            "trained": sorted(self._trained),
            "draw_of": list(self._draw_of.items()),
            "num_trained_batches": self.num_trained_batches,
            "storage_indices": list(self._storage_index.items()),
            "attempts": list(self._attempts.items()),
            "in_flight": [asdict(held.admission) for held in self._in_flight.values()],
        }

    def _load_run_state(self, state: dict[str, Any]) -> None:
        if self._draw_of or self._slot_requests:
            raise RuntimeError("a ReplayBuffer can be loaded only before it has admitted a group")
        if (self._reuse is None) is bool(state["reusable"]):
            raise ValueError("the saved ReplayBuffer reuses groups and this one does not, or the other way round")
        for name in _PLAIN:
            setattr(self, f"_{name}", state[name])
        self._window.load_state_dict(state["window"])
        self._ledger.load_state_dict(state["ledger"])
        self._sources.load_state_dict(state["sources"])
        self.length_bias.load_state_dict(state["length_bias"])
        self._start = Position(**state["start"])
        later = [d for d in self._start.open_draws if d > self._last_draw]
        self._draws = Position(open_draws=later, next_draw=max(self._start.next_draw, self._last_draw + 1)).draws()
        if self._next_task is not None:  # drawn when this buffer was made: it comes after the saved one
            self._tasks = itertools.chain([self._next_task], self._tasks)
        self._next_task = None if state["next_task"] is None else Task(**state["next_task"])
        self._served, self._used_again = deque(state["served"]), deque(state["used_again"])
        if self._reuse is not None:
            self._reuse.load_state_dict({n: groups_from_text(used) for n, used in state["reusable"]})
        self._trained, self._draw_of = set(state["trained"]), dict(state["draw_of"])
        self.num_trained_batches = state["num_trained_batches"]
        self._storage_index, self._attempts = dict(state["storage_indices"]), dict(state["attempts"])
        self._in_flight = {
            row["group_id"]: _InFlight(Admission(**{**row, "task": Task(**row["task"])}), None)
            for row in state["in_flight"]
        }
        unissued = set(self._to_reissue)
        self._reissue([group_id for group_id in self._in_flight if group_id not in unissued], "the buffer was loaded")

    def __reduce__(self) -> Any:
        raise TypeError("a ReplayBuffer lives in one process; hand out its actor instead")


def _most_common(reasons: Sequence[str]) -> str:
    counts = Counter(reasons).most_common(3)
    return f"of the last {len(reasons)}: " + ", ".join(f"{count} x {reason}" for reason, count in counts)
