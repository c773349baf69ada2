"""Groups of a lost collector are issued again: same slot, queue index and version, once each, before anything new."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.types import Admission, Group, Task, Trajectory

SOON_S = 120.0


def buffer_of(*, P: int = 2, T: int = 2, num_tasks: int | None = None, num_batches: int | None = None) -> ReplayBuffer:
    ids = itertools.count() if num_tasks is None else range(num_tasks)
    return ReplayBuffer(
        tasks=(Task(task_id=f"task-{i}", prompt="") for i in ids),
        rule=AdmissionRule(
            groups_per_batch=P, updates_per_batch=1, publish_every=1, reorder_window=1, target_lag=T, max_lag=T
        ),
        num_batches=num_batches,
        capacity=64,
    )


def finished(admission: Admission) -> Group:
    trajectory = Trajectory(
        prompt_tokens=[1],
        response_tokens=[2],
        loss_mask=[True],
        behavior_logprobs=[-1.0],
        policy_versions=[admission.min_policy_version],
        reward=float(admission.attempt),
        finish_reason="stop",
        text="",
    )
    return Group.of(
        group_id=admission.group_id,
        task_id=admission.task.task_id,
        trajectories=[trajectory],
        attempt=admission.attempt,
    )


async def admit(buffer: ReplayBuffer, limit: int, collector: str = "a") -> list[Admission]:
    return await buffer.admit(limit, timeout_s=SOON_S, collector=collector)


async def take_batch(buffer: ReplayBuffer) -> Any:
    return await buffer.take_batch(timeout_s=SOON_S)


async def waits(call: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(call)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done(), f"expected to wait, but got {task.result()!r}"
    return task


def test_groups_come_back_first_in_admission_order_and_as_they_were():
    async def scenario():
        buffer = buffer_of()
        await buffer.published(0)
        before = await admit(buffer, 5)  # a sixth could start
        await buffer.reissue([3, 1], "engine lost")
        again = await admit(buffer, 3)
        assert [(a.group_id, a.attempt) for a in again] == [(1, 1), (3, 1), (5, 0)]
        assert [(a.task, a.min_policy_version) for a in again[:2]] == [
            (before[i].task, before[i].min_policy_version) for i in (1, 3)
        ]

    asyncio.run(scenario())


def test_they_need_no_slot_because_they_hold_one():
    async def scenario():
        buffer = buffer_of()
        await buffer.published(0)
        await admit(buffer, 100)
        waiter = await waits(admit(buffer, 100))  # no slot is free
        await buffer.reissue([4], "engine lost")
        assert [a.group_id for a in await waiter] == [4]
        assert buffer.stats().slots_in_use == 6
        await waits(admit(buffer, 100))

    asyncio.run(scenario())


def test_a_group_can_be_lost_again_and_is_taken_once_in_its_old_place():
    async def scenario():
        buffer = buffer_of()
        await buffer.published(0)
        held = await admit(buffer, 100)
        for expected in (1, 2, 3):
            await buffer.reissue([0], "engine lost")
            [again] = await admit(buffer, 1)
            assert (again.group_id, again.attempt) == (0, expected)
        await buffer.put([finished(a) for a in held[1:]])
        waiter = await waits(take_batch(buffer))  # batch 0 must hold group 0
        await buffer.put([finished(again)])
        assert (await waiter).group_ids == [0, 1]
        stats = buffer.stats()
        assert (stats.admitted, stats.retries, stats.slots_in_use, stats.dropped_stale) == (6, 3, 4, 0)

    asyncio.run(scenario())


def test_what_the_former_holder_still_says_is_ignored():
    async def scenario():
        buffer = buffer_of(P=1, T=0)
        await buffer.published(0)
        [old] = await admit(buffer, 1)
        await buffer.reissue([0], "engine lost")
        await buffer.put([finished(old)])  # before the group has a new holder
        assert buffer.stats().groups_ready == 0
        [new] = await admit(buffer, 1)
        await buffer.fail(0, "too late", attempt=old.attempt)
        await buffer.retried(0, attempt=old.attempt)
        await buffer.put([finished(new)])
        await buffer.put([finished(old)])  # after the new one has delivered
        stats = buffer.stats()
        assert (stats.groups_ready, stats.failed, stats.retries) == (1, 0, 1)
        with pytest.raises(RuntimeError, match="group 0 cannot become generated: it is generated"):
            await buffer.put([finished(new)])  # the holder itself may not deliver twice

    asyncio.run(scenario())


def test_only_groups_in_flight_can_be_issued_again_and_a_mistake_changes_nothing():
    async def scenario():
        buffer = buffer_of()
        await buffer.published(0)
        held = await admit(buffer, 100)
        await buffer.put([finished(held[1])])
        await buffer.fail(2, "gone")
        await buffer.reissue([3], "engine lost")
        for group_id, was in ((1, "generated"), (2, "ended"), (3, "waiting for that already"), (9, "never admitted")):
            with pytest.raises(RuntimeError, match=f"group {group_id} cannot be issued again: it is {was}"):
                await buffer.reissue([0, group_id], "engine lost")
        assert [a.group_id for a in await admit(buffer, 1)] == [3]
        assert buffer.stats().retries == 1

    asyncio.run(scenario())


def test_a_lost_collector_gives_back_what_it_holds_and_is_given_nothing_more():
    async def scenario():
        buffer = buffer_of()
        await buffer.published(0)
        mine = await admit(buffer, 2, "a")
        theirs = await admit(buffer, 2, "b")
        mine += await admit(buffer, 2, "a")
        await buffer.put([finished(mine[0])])
        left_behind = await waits(admit(buffer, 100, "a"))
        assert await buffer.mark_dead("a", "killed") == [1, 4, 5]
        assert await left_behind == []  # nobody is there to receive more
        assert [a.group_id for a in await admit(buffer, 2, "b")] == [1, 4]
        assert await buffer.mark_dead("b", "killed") == [1, 2, 3, 4]  # what came from a dead collector too
        again = await admit(buffer, 100, "a, started again")
        assert [(a.group_id, a.attempt) for a in again] == [(1, 2), (2, 1), (3, 1), (4, 2), (5, 1)]
        assert [a.min_policy_version for a in again[1:3]] == [a.min_policy_version for a in theirs]

    asyncio.run(scenario())


def test_when_tasks_have_ended_collectors_stay_until_the_last_group_is_safe():
    """Else the groups of the last collector to die would have no taker, and the last batch would wait for ever."""

    async def scenario():
        buffer = buffer_of(num_tasks=2)
        await buffer.published(0)
        await admit(buffer, 2, "a")
        idle = await waits(admit(buffer, 100, "b"))
        assert await buffer.mark_dead("a", "killed") == [0, 1]
        held = await idle
        assert [a.group_id for a in held] == [0, 1]
        idle = await waits(admit(buffer, 100, "b"))
        await buffer.put([finished(a) for a in held])
        assert await idle == []
        assert (await take_batch(buffer)).group_ids == [0, 1]
        assert await take_batch(buffer) is None

    asyncio.run(scenario())


def test_groups_issued_again_are_counted_once_and_the_log_says_why(caplog):
    async def scenario():
        buffer = buffer_of()
        await buffer.published(0)
        await admit(buffer, 3)
        await buffer.mark_dead("a", "killed")
        await admit(buffer, 1, "b")
        await buffer.reissue([0, 0], "canary")  # named twice, issued once
        assert buffer.stats().retries == 4
        assert [r.getMessage() for r in caplog.records] == [
            "issued again, killed: groups 0, 1, 2",
            "issued again, canary: groups 0",
        ]

    asyncio.run(scenario())
