"""Who waits, for how long, and for whom: deadlines, shares of slots, and what a wait costs. Time is virtual."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from leeway.replay.buffer import FIRST_SLOTS_S, NO_PROGRESS_BATCHES, NoProgressError, ReplayBuffer
from leeway.types import Admission

from ..fakes import Answer, Rig, admit, buffer_of, goes_on, group, waits
from . import test_staleness_property as property_test
from .test_staleness_property import PLAIN, Generator, Schedule, VirtualClock, check, play
from .test_window import steps_of

DEADLINE_S = 3600.0


def virtually(scenario: Coroutine[Any, Any, Any]) -> float:
    """Play it; returns how many seconds it took."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(scenario)
        return runner.get_loop().time()


# ------------------------------------------------------------------------------------------------------- deadlines

MINUTE_S = 60.0
SLOW = replace(PLAIN, P=8, group_s=30.0, publish_s=1.0, pull_s=1.0)
WELL = {
    "the last batches are trained for hours after their last group": replace(
        SLOW, T=8, L=8, num_batches=20, step_s=10 * MINUTE_S
    ),
    "versions are published once an hour": replace(SLOW, n=8, T=7, L=7, num_batches=24, step_s=8 * MINUTE_S),
    "a batch is trained for an hour": replace(SLOW, u=4, T=3, L=3, num_batches=5, step_s=15 * MINUTE_S),
    "most generators have nothing to do": replace(
        SLOW,
        W=8,
        num_batches=12,
        step_s=10 * MINUTE_S,
        generators=tuple(Generator(joins_s=0.0, lives_s=None, max_in_flight=1, lazy=True) for _ in range(100)),
    ),
}


@pytest.mark.parametrize("schedule", WELL.values(), ids=WELL.keys())
def test_nobody_ends_a_run_whose_parts_are_well(schedule: Schedule, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(property_test, "STUCK_S", DEADLINE_S)
    check(schedule, play(schedule, 0))


def test_a_standstill_ends_within_one_deadline_and_says_who_holds_what():
    async def scenario():
        buffer = buffer_of(P=2, T=1, num_collectors=2)
        await buffer.published(0)
        loop = asyncio.get_running_loop()
        idle = asyncio.create_task(buffer.admit(2, timeout_s=DEADLINE_S, collector="idle"))
        stuck = await buffer.admit(2, timeout_s=DEADLINE_S, collector="stuck")
        taking = asyncio.create_task(buffer.take_batch(timeout_s=DEADLINE_S))
        idle_groups = await idle
        await asyncio.sleep(3000)
        await buffer.put([group(a.group_id) for a in idle_groups])
        idle = asyncio.create_task(buffer.admit(2, timeout_s=DEADLINE_S, collector="idle"))
        moved = loop.time()
        assert stuck[0].group_id == 0
        with pytest.raises(
            TimeoutError, match=r"waited 3600 s for group 0 .* without progress: stuck holds 2 groups \(group 0"
        ):
            await taking
        assert loop.time() == moved + DEADLINE_S
        assert not idle.done(), "it is not the one to complain"
        with pytest.raises(TimeoutError, match="waited 3600 s for a slot"):  # but it does not wait for ever either
            await idle

    virtually(scenario())


def test_the_deadline_of_a_batch_begins_when_the_one_before_it_has_been_trained():
    async def scenario():
        buffer = buffer_of(P=2, T=1)
        await buffer.published(0)
        await admit(buffer)
        await buffer.put([group(0), group(1)])
        taken = await buffer.take_batch(timeout_s=DEADLINE_S)
        assert taken is not None
        taking = asyncio.create_task(buffer.take_batch(timeout_s=DEADLINE_S))
        await asyncio.sleep(10 * DEADLINE_S)  # the trainer's own deadlines are whoever waits for it's
        assert not taking.done()
        await buffer.trained(taken.group_ids)
        trained = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError, match="group 2 and 1 more that must be in batch 1"):
            await taking
        assert asyncio.get_running_loop().time() == trained + DEADLINE_S

    virtually(scenario())


def test_groups_are_read_ahead_once_they_are_sure_to_be_in_the_batch_and_the_batch_holds_them_all():
    async def scenario():
        buffer = buffer_of(P=4, T=1)
        await buffer.published(0)
        await admit(buffer)
        ahead = await waits(buffer.groups_ahead(set(), at_least=2, timeout_s=DEADLINE_S))
        await buffer.put([group(6), group(2)])  # the first of them is for the next batch
        assert not ahead.done()
        await buffer.put([group(1)])
        assert [g.group_id for g in await goes_on(ahead)] == [1, 2]
        assert buffer.stats().groups_ready == 3, "nothing was taken"
        ahead = await waits(buffer.groups_ahead({1, 2}, at_least=2, timeout_s=DEADLINE_S))
        await buffer.put([group(0)])
        assert not ahead.done()
        await buffer.put([group(3)])
        assert await goes_on(ahead) == [], "the rest is the batch's"
        taken = await buffer.take_batch(timeout_s=DEADLINE_S)
        assert taken is not None
        assert taken.group_ids == [0, 1, 2, 3]

    virtually(scenario())


def test_no_group_is_read_ahead_that_a_better_one_may_overtake():
    async def scenario():
        buffer = buffer_of(P=4, W=4, T=2)
        await buffer.published(0)
        await admit(buffer)
        ahead = await waits(buffer.groups_ahead(set(), at_least=1, timeout_s=DEADLINE_S))
        await buffer.put([group(1), group(2)])  # only group 0 has to be in batch 0
        assert not ahead.done()
        await buffer.put([group(0)])
        assert [g.group_id for g in await goes_on(ahead)] == [0]

    virtually(scenario())


def test_while_the_trainer_works_ahead_nobody_s_deadline_runs():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        await buffer.published(0)
        await admit(buffer)
        idle = asyncio.create_task(buffer.admit(2, timeout_s=DEADLINE_S, collector="idle"))
        await buffer.put([group(0)])
        assert await buffer.groups_ahead(set(), at_least=1, timeout_s=DEADLINE_S)
        await asyncio.sleep(10 * DEADLINE_S)
        assert not idle.done()
        since = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError, match="group 1 and 0 more that must be in batch 0"):
            await buffer.groups_ahead({0}, at_least=1, timeout_s=DEADLINE_S)
        assert asyncio.get_running_loop().time() == since + DEADLINE_S
        idle.cancel()

    virtually(scenario())


@pytest.mark.parametrize("progress", ["retried", "fail", "put", "reissue", "published"])
def test_whatever_moves_begins_the_deadline_again(progress: str):
    async def scenario():
        buffer = buffer_of(P=2, T=1)
        await buffer.published(0)
        await admit(buffer)
        taking = asyncio.create_task(buffer.take_batch(timeout_s=DEADLINE_S))
        await asyncio.sleep(DEADLINE_S - 1)
        match progress:
            case "retried":
                await buffer.retried(0)
            case "fail":
                await buffer.fail(1, "unlucky")
            case "put":
                await buffer.put([group(1)])
            case "reissue":
                await buffer.reissue([0], "engine lost")
            case "published":
                await buffer.published(1)
        await asyncio.sleep(DEADLINE_S - 1)
        assert not taking.done()
        with pytest.raises(TimeoutError):
            await taking

    virtually(scenario())


# ----------------------------------------------------------------------------------------------------- shares of slots


class Engine:
    """A collector: it holds up to `room` groups, works on them one after the other, and asks for more at once."""

    def __init__(self, buffer: ReplayBuffer, name: str, *, room: int, group_s: float) -> None:
        self.buffer, self.name, self.room, self.group_s = buffer, name, room, group_s
        self.held: list[Admission] = []
        self.woken = asyncio.Event()

    async def run(self) -> None:
        generating = asyncio.create_task(self._generate())
        while admissions := await self.buffer.admit(
            self.room - len(self.held), timeout_s=DEADLINE_S, collector=self.name
        ):
            self.held += admissions
            self.woken.set()
            while len(self.held) == self.room:
                await asyncio.sleep(self.group_s / 2)
        generating.cancel()

    async def _generate(self) -> None:
        while True:
            while not self.held:
                await self.woken.wait()
                self.woken.clear()
            await asyncio.sleep(self.group_s)
            admission = self.held.pop(0)
            await self.buffer.put([replace(group(admission.group_id), task_id=self.name)])


@pytest.mark.parametrize("num_engines", [2, 4])
@pytest.mark.parametrize("room", [1.0, 2.0], ids=["its share", "everything"])
def test_balanced_engines_share_every_batch(num_engines: int, room: float):
    """A batch that one engine generates alone, while the others have groups of the next, takes that much longer."""
    P, num_batches, group_s = 16, 8, 1.0
    shares: list[Counter[str]] = []

    async def scenario():
        buffer = buffer_of(P=P, T=1, num_batches=num_batches, num_collectors=num_engines)
        await buffer.published(0)  # slots are free before anybody asks
        places = round(2 * P / num_engines * room)
        engines = [Engine(buffer, f"generator-{i}", room=places, group_s=group_s) for i in range(num_engines)]
        running = [asyncio.create_task(e.run()) for e in engines]
        for version in itertools.count(1):
            batch = await buffer.take_batch(timeout_s=DEADLINE_S)
            if batch is None:
                break
            shares.append(Counter(g.task_id for g in batch.groups))
            await asyncio.sleep(0.5 * P / num_engines * group_s)
            await buffer.trained(batch.group_ids)
            await buffer.published(version)
        await asyncio.gather(*running)

    seconds = virtually(scenario())
    assert all(max(s.values()) <= P / num_engines + 1 for s in shares), shares
    assert seconds <= (num_batches + 1) * P / num_engines * group_s


class AtTheBuffer:
    """What a collector is handed, of a real buffer."""

    def __init__(self, buffer: ReplayBuffer, name: str) -> None:
        self.admit = partial(buffer.admit, timeout_s=DEADLINE_S, collector=name)
        self.give_back = partial(buffer.give_back, name)
        self._buffer = buffer

    async def retried(self, admission: Admission) -> None:
        await self._buffer.retried(admission.group_id, attempt=admission.attempt)

    async def fail(self, admission: Admission, reason: str) -> None:
        await self._buffer.fail(admission.group_id, reason, attempt=admission.attempt)


class OneAfterTheOther(Answer):
    """An engine that is busy with one group at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def rollout(self, task: Any, policy: Any) -> Any:
        async with self._turn:
            await asyncio.sleep(1.0)
            return await super().rollout(replace(task, prompt="2 + 2"), policy)


@pytest.mark.slow
def test_collectors_that_ask_when_they_have_room_share_every_batch():
    """The real ones: each asks once its first group has finished, and holds half of all groups at most."""
    P, num_batches, names = 16, 8, ("generator-0", "generator-1")
    shares: list[Counter[str]] = []

    async def scenario():
        buffer = buffer_of(P=P, T=1, num_batches=num_batches, num_collectors=2)
        settings: dict[str, Any] = {"max_in_flight": P, "timeout_s": 1e6, "deadline_s": DEADLINE_S, "seeded": False}
        rigs = [Rig(OneAfterTheOther(), slots=AtTheBuffer(buffer, name), **settings) for name in names]
        holders: dict[int, str] = {}

        async def collect(rig: Rig, name: str) -> None:
            async for finished in rig.collector.groups():
                holders.update({g.group_id: name for g in finished})
                await buffer.put(finished)

        pulling = [asyncio.create_task(rig.weight_sync.run()) for rig in rigs]
        for rig in rigs:
            await rig.publish(0)
        await buffer.published(0)
        collecting = [asyncio.create_task(collect(rig, name)) for rig, name in zip(rigs, names, strict=True)]
        for version in itertools.count(1):
            batch = await buffer.take_batch(timeout_s=DEADLINE_S)
            if batch is None:
                break
            shares.append(Counter(holders[g] for g in batch.group_ids))
            await asyncio.sleep(P / 4)
            await buffer.trained(batch.group_ids)
            for rig in rigs:
                await rig.publish(version)
            await buffer.published(version)
        await asyncio.gather(*collecting)
        for rig in rigs:
            rig.weight_sync.close()
        await asyncio.gather(*pulling)

    virtually(scenario())
    assert all(max(s.values()) <= P / 2 + 1 for s in shares), shares


def test_an_engine_that_is_alone_takes_everything_at_once():
    """One of two that were to come never asks; or is full; or is gone."""

    async def scenario():
        buffer = buffer_of(P=8, T=1, num_collectors=2)
        await buffer.published(0)
        asked = asyncio.get_running_loop().time()
        held = await admit(buffer, 12, "a")
        assert held == list(range(12))
        assert asyncio.get_running_loop().time() == asked + FIRST_SLOTS_S
        full = asyncio.create_task(admit(buffer, 4, "b"))
        assert await full == [12, 13, 14, 15]
        await buffer.put([group(g) for g in range(8)])
        assert (await buffer.take_batch(timeout_s=DEADLINE_S)) is not None
        await buffer.published(1)
        assert await admit(buffer, 8, "a") == list(range(16, 24))  # b waits for nothing
        assert await buffer.mark_dead("b", "killed") == [12, 13, 14, 15]
        await buffer.published(2)
        assert await admit(buffer, 12, "a") == [12, 13, 14, 15, *range(24, 32)]

    virtually(scenario())


def test_a_waiting_collector_has_room_again_for_what_it_delivers():
    """It asked when one of its groups had finished; by the publication all of them have."""

    async def scenario():
        buffer = buffer_of(P=4, T=0)
        await buffer.published(0)
        held = await admit(buffer, 4, "a")
        await buffer.put([group(held[0])])
        waiter = await waits(admit(buffer, 1, "a"))
        await buffer.put([group(g) for g in held[1:]])
        assert await buffer.take_batch(timeout_s=DEADLINE_S) is not None
        await buffer.published(1)
        assert await goes_on(waiter) == [4, 5, 6, 7]

    virtually(scenario())


def test_what_a_collector_gives_back_goes_to_the_others_first():
    async def scenario():
        buffer = buffer_of(P=4, T=0, num_collectors=2)
        await buffer.published(0)
        held = await asyncio.gather(admit(buffer, 4, "a"), admit(buffer, 4, "b"))
        assert held == [[0, 2], [1, 3]]
        a, b = await waits(admit(buffer, 2, "a")), await waits(admit(buffer, 2, "b"))
        assert await buffer.give_back("a", "in quarantine") == [0, 2]
        assert await goes_on(b) == [0, 2]
        assert not a.done()
        await buffer.mark_dead("b", "killed")
        assert await goes_on(a) == [0, 1, 2, 3]  # nobody else is there

    virtually(scenario())


def test_slots_of_a_call_that_was_cancelled_are_given_to_the_next():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        waiter = await waits(admit(buffer, 2, "a"))
        await buffer.published(0)
        waiter.cancel()  # dealt to it, and not heard
        await asyncio.gather(waiter, return_exceptions=True)
        again = await buffer.admit(2, timeout_s=DEADLINE_S, collector="a")
        assert [(a.group_id, a.attempt) for a in again] == [(0, 1), (1, 1)]

    virtually(scenario())


# ------------------------------------------------------------------------------------------------------------- losses


def test_a_run_in_which_few_groups_are_left_over_goes_on():
    """24 of 25 groups are filtered: slow, but every batch is filled."""

    async def scenario():
        buffer = buffer_of(P=4, T=0, capacity=8)
        for version in range(3):
            await buffer.published(version)
            taking = asyncio.create_task(buffer.take_batch(timeout_s=DEADLINE_S))
            for _ in range(4):
                for _ in range(24):
                    [group_id] = await admit(buffer, 1)
                    await buffer.fail(group_id, "equal rewards")
                [group_id] = await admit(buffer, 1)
                await buffer.put([group(group_id)])
            taken = await taking
            assert taken is not None
            await buffer.trained(taken.group_ids)

    virtually(scenario())


def test_losses_in_a_row_end_a_run_even_with_groups_that_are_ready():
    async def scenario():
        buffer = buffer_of(P=4, T=0, capacity=8)
        await buffer.published(0)
        taking = asyncio.create_task(buffer.take_batch(timeout_s=DEADLINE_S))
        held = await admit(buffer, 3)
        await buffer.put([group(g) for g in held])
        for _ in range(NO_PROGRESS_BATCHES * 4):
            [group_id] = await admit(buffer, 1)
            await buffer.fail(group_id, "broken")
        with pytest.raises(NoProgressError, match=r"80 groups in a row .*\(of the last 80: 80 x broken\)"):
            await taking

    virtually(scenario())


# -------------------------------------------------------------------------------------------------------- what it costs


def test_a_delivered_group_costs_the_same_however_many_collectors_wait():
    def cost(num_waiting: int) -> int:
        loop = asyncio.new_event_loop()

        async def prepare() -> tuple[ReplayBuffer, list[asyncio.Task[Any]]]:
            buffer = buffer_of(P=4, T=0)
            await buffer.published(0)
            await admit(buffer, 4)
            return buffer, [await waits(admit(buffer, 1, f"generator-{i}")) for i in range(num_waiting)]

        async def deliver(buffer: ReplayBuffer) -> None:
            await buffer.put([group(0)])
            for _ in range(20):
                await asyncio.sleep(0)

        buffer, waiting = loop.run_until_complete(prepare())
        steps = steps_of(lambda: loop.run_until_complete(deliver(buffer)))
        for task in waiting:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
        loop.close()
        return steps

    assert cost(60) <= cost(3) + 20
