"""The replay buffer: it waits instead of losing, and hands out every group once."""

from __future__ import annotations

import asyncio
import pickle
import random
from types import SimpleNamespace

import pytest
import torchrl.data

from leeway.replay.buffer import NO_PROGRESS_BATCHES, NoProgressError, ReplayBuffer
from leeway.replay.ledger import GroupState, Ledger
from leeway.replay.operators import filter_zero_variance
from leeway.replay.position import Position
from leeway.replay.storage import FreeSlotWriter
from leeway.types import Task

from ..fakes import SOON_S, admit, buffer_of, goes_on, group, still_waits, take_batch, waits


def test_it_is_a_torchrl_replay_buffer():
    assert isinstance(buffer_of(), torchrl.data.ReplayBuffer)


def test_admit_waits_for_a_slot_and_goes_on_when_a_version_is_published():
    async def scenario():
        buffer = buffer_of(P=2, T=1)
        await buffer.published(0)
        assert await admit(buffer) == [0, 1, 2, 3]  # batches 0 and 1 may be under way at version 0
        waiter = await waits(admit(buffer))
        await buffer.published(1)
        assert await goes_on(waiter) == [4, 5]

    asyncio.run(scenario())


def test_back_pressure_finished_groups_that_nobody_takes_stop_admission():
    async def scenario():
        buffer = buffer_of(P=2, T=1)
        await buffer.published(0)
        await buffer.put([group(g) for g in await admit(buffer)])
        waiter = await waits(admit(buffer))
        await take_batch(buffer)  # taking does not make room by itself: the next groups would be too old at their use
        await still_waits(waiter)
        await buffer.published(1)
        assert await goes_on(waiter) == [4, 5]

    asyncio.run(scenario())


def test_admit_gives_what_was_asked_for_at_most_and_the_tasks_in_order():
    async def scenario():
        buffer = buffer_of(P=4, T=0)
        await buffer.published(0)
        first = await buffer.admit(3, timeout_s=SOON_S)
        second = await buffer.admit(3, timeout_s=SOON_S)
        assert [(a.group_id, a.task.task_id) for a in first + second] == [(i, f"task-{i}") for i in range(4)]

    asyncio.run(scenario())


def test_every_waiting_collector_is_served_and_no_task_twice():
    async def scenario():
        buffer = buffer_of(P=6, T=0)
        waiters = [await waits(admit(buffer, 2, f"generator-{i}")) for i in range(3)]
        await buffer.published(0)
        assert sorted([group_id for w in waiters for group_id in await goes_on(w)]) == [0, 1, 2, 3, 4, 5]

    asyncio.run(scenario())


def test_min_policy_versions_come_from_the_rank():
    async def scenario():
        buffer = buffer_of(P=2, T=1)
        for version in range(4):
            await buffer.published(version)
        admissions = await buffer.admit(100, timeout_s=SOON_S)
        assert [a.min_policy_version for a in admissions] == [
            0,
            0,
            0,
            0,
            1,
            1,
            2,
            2,
            3,
            3,
        ]

    asyncio.run(scenario())


def test_take_waits_for_a_whole_batch_in_admission_order():
    async def scenario():
        buffer = buffer_of(P=2, T=1)
        await buffer.published(0)
        await admit(buffer)
        waiter = await waits(take_batch(buffer))
        await buffer.put([group(3), group(1)])
        await still_waits(waiter)
        await buffer.put([group(0)])
        first = await goes_on(waiter)
        assert (first.index, first.group_ids) == (0, [0, 1])
        waiter = await waits(take_batch(buffer))
        await buffer.put([group(2)])
        second = await goes_on(waiter)
        assert (second.index, second.group_ids) == (1, [2, 3])

    asyncio.run(scenario())


def test_a_batch_holds_the_very_groups_that_were_put():
    async def scenario():
        buffer = buffer_of(P=3, T=2, W=3)
        await buffer.published(0)
        await admit(buffer)
        groups = [group(g, (float(g), -1.0)) for g in range(7)]
        await buffer.put([groups[6], groups[2], groups[4], groups[0]])
        assert (await take_batch(buffer)).groups == [groups[0], groups[2], groups[4]]
        await buffer.put([groups[5], groups[3], groups[1]])
        assert (await take_batch(buffer)).groups == [groups[1], groups[3], groups[5]]

    asyncio.run(scenario())


def test_consume_once_a_second_delivery_raises_in_every_state():
    async def scenario():
        buffer = buffer_of(P=2, T=1, operators=[filter_zero_variance])
        await buffer.published(0)
        await admit(buffer)
        await buffer.put([group(0), group(1), group(2, (1.0, 1.0))])
        with pytest.raises(RuntimeError, match="group 0 cannot become generated: it is generated"):
            await buffer.put([group(0)])
        with pytest.raises(RuntimeError, match=r"group 2 .* it is ended"):
            await buffer.put([group(2)])
        taken = await take_batch(buffer)
        with pytest.raises(RuntimeError, match="group 0 cannot become generated: it is taken"):
            await buffer.put([group(0)])
        await buffer.trained(taken.group_ids)
        with pytest.raises(RuntimeError, match=r"group 0 .* it is ended"):
            await buffer.put([group(0)])
        with pytest.raises(RuntimeError, match=r"group 99 .* never admitted"):
            await buffer.put([group(99)])
        with pytest.raises(RuntimeError, match="group 0 cannot become trained"):
            await buffer.trained([0])

    asyncio.run(scenario())


def test_a_group_is_trained_only_after_it_was_taken():
    async def scenario():
        buffer = buffer_of(P=2, T=1)
        await buffer.published(0)
        await admit(buffer)
        await buffer.put([group(0)])
        with pytest.raises(RuntimeError, match="group 0 cannot become trained: it is generated"):
            await buffer.trained([0])

    asyncio.run(scenario())


def test_unread_groups_are_never_overwritten_even_over_many_rounds():
    async def scenario():
        buffer = buffer_of(P=2, T=1, capacity=4)  # exactly as many places as groups may be outstanding
        next_group = 0
        for version in range(50):
            await buffer.published(version)
            new = await admit(buffer)
            # The newest first, so that places are written in an order of their own.
            await buffer.put([group(g, (float(g), 0.5)) for g in reversed(new)])
            taken = await take_batch(buffer)
            assert taken.group_ids == [next_group, next_group + 1]
            assert [g.trajectories()[0].reward for g in taken.groups] == [float(next_group), float(next_group + 1)]
            next_group += 2

    asyncio.run(scenario())


def test_the_writer_refuses_when_every_place_is_unread():
    buffer = torchrl.data.ReplayBuffer(
        storage=torchrl.data.ListStorage(max_size=2), writer=(writer := FreeSlotWriter(2)), collate_fn=lambda x: x
    )
    assert [buffer.add("a"), buffer.add("b")] == [0, 1]
    with pytest.raises(RuntimeError, match="all 2 places hold groups nobody has taken"):
        buffer.add("c")
    assert buffer[0] == "a"
    assert buffer[1] == "b"
    writer.release([0])
    assert buffer.add("c") == 0
    assert buffer[1] == "b"
    with pytest.raises(RuntimeError, match="all 2 places"):
        buffer.add("d")


def test_a_time_out_of_admit_says_what_it_waited_for():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        await buffer.published(0)
        await admit(buffer)
        with pytest.raises(TimeoutError, match=r"waited 0.02 s for a slot \(published version 0, 2 groups outstanding"):
            await buffer.admit(1, timeout_s=0.02)

    asyncio.run(scenario())


def test_a_time_out_of_a_batch_names_the_missing_groups():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        await buffer.published(0)
        with pytest.raises(TimeoutError, match=r"waited 0.02 s for 2 more finished groups for batch 0"):
            await buffer.take_batch(timeout_s=0.02)
        await admit(buffer)
        await buffer.put([group(1)])
        with pytest.raises(TimeoutError, match=r"group 0 and 0 more that must be in batch 0"):
            await buffer.take_batch(timeout_s=0.02)
        # A wait that was given up leaves nothing behind.
        await buffer.put([group(0)])
        assert (await take_batch(buffer)).group_ids == [0, 1]

    asyncio.run(scenario())


def test_a_filtered_group_is_replaced_before_the_batch():
    async def scenario():
        buffer = buffer_of(P=2, T=0, operators=[filter_zero_variance])
        await buffer.published(0)
        assert await admit(buffer) == [0, 1]
        waiting_batch, waiting_admit = await waits(take_batch(buffer)), await waits(admit(buffer))
        await buffer.put([group(0, (1.0, 1.0)), group(1)])
        assert await goes_on(waiting_admit) == [2]
        await still_waits(waiting_batch)
        await buffer.put([group(2)])
        assert (await goes_on(waiting_batch)).group_ids == [1, 2]
        assert buffer.stats().filtered == 1

    asyncio.run(scenario())


def test_the_first_filter_that_objects_gives_the_reason():
    assert filter_zero_variance(group(0, (0.5, 0.5, 0.5))) == "equal rewards"
    assert filter_zero_variance(group(0, (0.5, 0.5, 0.25))) is None

    async def scenario():
        buffer = buffer_of(P=1, T=0, operators=[lambda g: None, lambda g: "too long", lambda g: "never asked"])
        await buffer.published(0)
        await admit(buffer)
        await buffer.put([group(0)])
        for _ in range(NO_PROGRESS_BATCHES - 1):
            [g] = await admit(buffer)
            await buffer.put([group(g)])
        with pytest.raises(NoProgressError, match=r"20 groups in a row .*\(of the last 20: 20 x too long\)"):
            await take_batch(buffer)

    asyncio.run(scenario())


def test_a_group_that_failed_for_good_is_replaced():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        await buffer.published(0)
        await admit(buffer)
        await buffer.retried(0)
        waiter = await waits(admit(buffer))
        await buffer.fail(0, "the environment is broken")
        assert await goes_on(waiter) == [2]
        await buffer.put([group(1), group(2)])
        assert (await take_batch(buffer)).group_ids == [1, 2]
        with pytest.raises(RuntimeError, match="group 0"):
            await buffer.put([group(0)])
        assert (buffer.stats().failed, buffer.stats().retries) == (1, 1)

    asyncio.run(scenario())


def test_group_after_group_lost_ends_the_run_with_the_reason_instead_of_waiting():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        await buffer.published(0)
        waiter = await waits(take_batch(buffer))
        lost = 0
        while lost < NO_PROGRESS_BATCHES * 2 - 1:
            for group_id in await admit(buffer, 1):
                await buffer.fail(group_id, "no such tool")
                lost += 1
        await still_waits(waiter)
        [group_id] = await admit(buffer, 1)
        await buffer.fail(group_id, "no such tool")
        with pytest.raises(NoProgressError, match=r"40 groups in a row .*no such tool.*replay.operators"):
            await goes_on(waiter)

    asyncio.run(scenario())


def test_a_batch_resets_the_count_of_lost_groups():
    async def scenario():
        buffer = buffer_of(P=1, T=0)
        for version in range(3):
            await buffer.published(version)
            for _ in range(NO_PROGRESS_BATCHES - 1):
                [group_id] = await admit(buffer)
                await buffer.fail(group_id, "unlucky")
            [group_id] = await admit(buffer)
            await buffer.put([group(group_id)])
            assert (await take_batch(buffer)).group_ids == [group_id]

    asyncio.run(scenario())


def test_a_complete_batch_is_served_however_many_other_groups_were_lost():
    async def scenario():
        buffer = buffer_of(P=1, T=1)
        await buffer.published(0)
        await admit(buffer, 1)
        await buffer.put([group(0)])
        for _ in range(NO_PROGRESS_BATCHES):
            [group_id] = await admit(buffer, 1)
            await buffer.fail(group_id, "unlucky")
        assert (await take_batch(buffer)).group_ids == [0]

    asyncio.run(scenario())


def test_close_frees_waiting_collectors_with_an_empty_list():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        waiters = [await waits(admit(buffer)) for _ in range(3)]
        await buffer.close()
        assert [await goes_on(w) for w in waiters] == [[], [], []]
        assert await admit(buffer) == []

    asyncio.run(scenario())


def test_what_was_in_flight_at_the_close_can_still_be_delivered():
    async def scenario():
        buffer = buffer_of(P=2, T=0)
        await buffer.published(0)
        await admit(buffer)
        await buffer.close()
        await buffer.put([group(0), group(1)])
        assert buffer.stats().groups_ready == 2

    asyncio.run(scenario())


def test_the_end_of_the_tasks_ends_admission_and_makes_the_last_batch_short():
    async def scenario():
        buffer = buffer_of(P=2, T=5, num_tasks=5)
        await buffer.published(0)
        assert await admit(buffer) == [0, 1, 2, 3, 4]
        waiting_admit = await waits(admit(buffer))  # group 4 may yet have to be issued again
        await buffer.put([group(g) for g in range(4)])
        assert (await take_batch(buffer)).group_ids == [0, 1]
        assert (await take_batch(buffer)).group_ids == [2, 3]
        waiter = await waits(take_batch(buffer))
        await buffer.put([group(4)])
        assert await goes_on(waiting_admit) == []
        assert (await goes_on(waiter)).group_ids == [4]
        assert await take_batch(buffer) is None

    asyncio.run(scenario())


def test_a_batch_that_waits_ends_when_the_last_group_is_lost():
    async def scenario():
        buffer = buffer_of(P=2, T=5, num_tasks=1)
        await buffer.published(0)
        await admit(buffer)
        waiter = await waits(take_batch(buffer))
        await buffer.fail(0, "gone")
        assert await goes_on(waiter) is None

    asyncio.run(scenario())


def test_no_tasks_at_all_is_an_end_and_not_a_wait():
    async def scenario():
        buffer = buffer_of(num_tasks=0)
        assert await admit(buffer) == []
        assert await take_batch(buffer) is None

    asyncio.run(scenario())


def test_no_more_groups_start_than_the_run_will_ever_take():
    async def scenario():
        buffer = buffer_of(P=2, T=9, num_batches=2)
        await buffer.published(0)
        assert await admit(buffer) == [0, 1, 2, 3]
        waiter = await waits(admit(buffer))  # one of them may still be lost
        await buffer.fail(2, "gone")
        assert await goes_on(waiter) == [4]
        await buffer.put([group(g) for g in (0, 1, 3, 4)])
        assert (await take_batch(buffer)).group_ids == [0, 1]
        assert (await take_batch(buffer)).group_ids == [3, 4]
        assert await take_batch(buffer) is None

    asyncio.run(scenario())


def test_collectors_are_told_that_there_will_be_no_slot_when_the_last_group_is_safe():
    """While the trainer is still at work on the last batches, for as long as it likes, nobody waits for anything."""

    async def scenario():
        buffer = buffer_of(P=2, T=9, num_batches=2)
        await buffer.published(0)
        held = await admit(buffer)
        await buffer.put([group(g) for g in held[:3]])
        waiter = await waits(admit(buffer))  # group 3 may yet have to be issued again
        await buffer.put([group(3)])
        assert await goes_on(waiter) == []
        assert [(await take_batch(buffer)).group_ids for _ in range(2)] == [[0, 1], [2, 3]]

    asyncio.run(scenario())


def test_of_two_that_wait_for_the_only_batch_the_second_is_told_that_it_is_over():
    async def scenario():
        buffer = buffer_of(P=2, T=9, num_batches=1)
        await buffer.published(0)
        waiters = [await waits(take_batch(buffer)) for _ in range(2)]
        await admit(buffer)
        await buffer.put([group(0), group(1)])
        results = [await goes_on(w) for w in waiters]
        assert [r is None for r in results].count(True) == 1

    asyncio.run(scenario())


def test_versions_are_published_in_order():
    async def scenario():
        buffer = buffer_of()
        await buffer.published(3)
        for version in (3, 2):
            with pytest.raises(AssertionError, match=f"version {version} published after 3"):
                await buffer.published(version)

    asyncio.run(scenario())


def test_stats_count_every_life():
    async def scenario():
        buffer = buffer_of(P=2, T=2, operators=[filter_zero_variance])
        await buffer.published(0)
        await admit(buffer)
        await buffer.put([group(0), group(1), group(2, (1.0, 1.0)), group(3)])
        await buffer.fail(4, "gone")
        await take_batch(buffer)
        s = buffer.stats()
        assert (s.admitted, s.slots_in_use, s.groups_ready, s.groups_taken, s.filtered, s.failed) == (6, 2, 1, 2, 1, 1)

    asyncio.run(scenario())


def test_it_does_not_leave_its_process():
    with pytest.raises(TypeError, match="hand out its actor"):
        pickle.dumps(buffer_of())


def test_the_ledger_forgets_ended_lives_and_counts_them():
    ledger = Ledger()
    for group_id in range(3):
        ledger.admit(group_id)
    ledger.move(0, GroupState.FILTERED)
    ledger.move(1, GroupState.FILTERED)
    ledger.move(2, GroupState.FAILED)
    assert (ledger.count(GroupState.FILTERED), ledger.count(GroupState.ADMITTED)) == (2, 0)
    with pytest.raises(RuntimeError, match="group 0 cannot become taken: it is ended"):
        ledger.move(0, GroupState.TAKEN)


# -------------------------------------------------------------------------------------------------------- resume


async def tasks_of(buffer: ReplayBuffer, limit: int = 100) -> list[tuple[int, str]]:
    return [(a.group_id, a.task.task_id) for a in await buffer.admit(limit, timeout_s=SOON_S)]


def test_in_lockstep_a_resumed_buffer_admits_what_the_first_one_would_have() -> None:
    async def scenario() -> None:
        operators = [filter_zero_variance]
        buffer = buffer_of(T=0, P=2, operators=operators)
        await buffer.published(0)
        assert await tasks_of(buffer) == [(0, "task-0"), (1, "task-1")]
        await buffer.put([group(0), group(1, (1.0, 1.0))])  # one is filtered, and replaced
        assert await tasks_of(buffer) == [(2, "task-2")]
        await buffer.put([group(2)])
        first = await take_batch(buffer)
        at_rest = buffer.position(1)  # trained, though nobody has said so yet
        await buffer.trained(first.group_ids)
        await buffer.published(1)
        assert buffer.position(1) == at_rest
        expected = await tasks_of(buffer)
        assert expected == [(3, "task-3"), (4, "task-4")]
        await buffer.put([group(4, (0.0, 0.0))])  # filtered, while 3 is in flight: both are drawn again
        after_filtering = buffer.position(1)
        await buffer.put([group(3, (0.0, 0.0))])  # nothing before 5 is left to do
        for position, admitted in (
            (at_rest, expected),
            (after_filtering, expected),
            (buffer.position(1), [(5, "task-5"), (6, "task-6")]),
        ):
            assert position is not None
            resumed = buffer_of(T=0, P=2, operators=operators, start=position)
            await resumed.published(1)
            assert await tasks_of(resumed) == admitted
            assert resumed.stats().dropped_stale == 0
            await resumed.put([group(group_id) for group_id, _ in admitted])
            assert (await take_batch(resumed)).index == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_after_overtaking_nothing_is_trained_twice_and_nothing_is_lost() -> None:
    for seed in range(40):
        asyncio.run(_kill_and_resume(random.Random(seed)))


async def _kill_and_resume(rng: random.Random) -> None:
    """Run, forget everything but the position, go on; three times. Each task is trained once, none is left out.

    A group's id is that of the same task through all of it, so whatever is kept of a group can be found by its id.
    """
    position, version, trained = Position(), 0, []
    tasks_by_id: dict[int, str] = {}
    for _ in range(3):
        buffer = buffer_of(P=2, W=3, T=4, start=position)
        await buffer.published(version)
        tasks: dict[int, str] = {}
        waiting: list[int] = []
        for _ in range(rng.randint(1, 5)):
            for admission in await buffer.admit(100, timeout_s=SOON_S):
                tasks[admission.group_id] = admission.task.task_id
                assert tasks_by_id.setdefault(admission.group_id, admission.task.task_id) == admission.task.task_id
                waiting.append(admission.group_id)
            while buffer._window.missing_for_batch(last=False) is not None:
                await buffer.put([group(waiting.pop(rng.randrange(len(waiting))))])
            served = await take_batch(buffer)
            trained += [tasks[g] for g in served.group_ids]
            version += 1
            await buffer.trained(served.group_ids)
            await buffer.published(version)
        if rng.random() < 0.5 and buffer._window.missing_for_batch(last=False) is None:
            await take_batch(buffer)  # served, never trained
        found = buffer.position(version)
        assert found is not None
        position = found
        # Known from the position alone: what was not trained is drawn again, in order.
        drawn = {f"task-{d}" for d in position.open_draws}
        everything = {f"task-{d}" for d in range(position.next_draw)}
        assert drawn == everything - set(trained)
    assert len(trained) == len(set(trained)) == 2 * version


@pytest.mark.parametrize("T", [0, 2])
def test_after_a_short_last_batch_longer_runs_keep_the_bound(T: int) -> None:
    """Queue indices count whole batches: else each later group would begin a version too early."""

    async def play(buffer: ReplayBuffer, version: int) -> int:
        begun: dict[int, int] = {}
        await buffer.published(version)
        while True:
            begun |= dict.fromkeys(ids := await admit(buffer), version)
            await buffer.put([group(i) for i in ids])
            if (served := await take_batch(buffer)) is None:
                return version
            assert version - min(begun[i] for i in served.group_ids) <= T
            await buffer.trained(served.group_ids)
            version += 1
            await buffer.published(version)

    async def scenario() -> None:
        buffer = buffer_of(P=4, T=T, num_tasks=11)
        version = await play(buffer, 0)
        assert version == 3
        longer = buffer_of(P=4, T=T, num_tasks=24, start=buffer.position(version))
        assert await play(longer, version) == 3 + 4

    asyncio.run(scenario())


def test_the_middle_of_a_batchs_steps_is_no_place_to_go_on_from() -> None:
    async def scenario() -> None:
        buffer = buffer_of(P=2, T=2, updates_per_batch=2)
        await buffer.published(0)
        ids = await admit(buffer, 2)
        await buffer.put([group(i) for i in ids])
        await take_batch(buffer)
        assert buffer.position(1) is None
        assert buffer.position(2) is not None
        assert buffer.position(4) is None, "no batch of that was ever served"

    asyncio.run(scenario())


def raises(group):
    raise ZeroDivisionError("a reward of nothing")


@pytest.mark.parametrize("broken", ["operator", "priority", "sampler", "delivered"])
def test_what_breaks_in_the_runs_own_parts_ends_the_run_whoever_delivered(broken):
    """One who delivers from another job is told, and lives on."""

    async def scenario():
        told = []
        buffer = buffer_of(P=1, T=1, operators=[raises] if broken == "operator" else (), failed=told.append)
        if broken == "priority":
            buffer._priority = raises
        if broken == "delivered":
            buffer._delivered = lambda task, group: raises(group)
        if broken == "sampler":
            buffer._window_sampler = SimpleNamespace(is_prioritized=True, default_priority=1.0)
            buffer.update_priority = lambda index, priority: raises(None)
        await buffer.published(0)
        await admit(buffer)
        batch, slot = await waits(take_batch(buffer)), await waits(admit(buffer))
        for call in (buffer.put([group(0)]), goes_on(batch), goes_on(slot), admit(buffer)):
            with pytest.raises(ZeroDivisionError):
                await call
        assert [type(error) for error in told] == [ZeroDivisionError]

    asyncio.run(scenario())


def test_a_source_of_tasks_that_breaks_ends_the_run_and_passes_over_none():
    def tasks():
        yield from (Task(task_id=f"task-{i}", prompt="") for i in range(2))
        raises(None)

    async def scenario():
        told = []
        buffer = buffer_of(P=4, T=0, tasks=tasks(), failed=told.append)
        await buffer.published(0)
        with pytest.raises(ZeroDivisionError):
            await admit(buffer)
        with pytest.raises(ZeroDivisionError):
            await admit(buffer)
        assert len(told) == 1

    asyncio.run(scenario())


def test_a_delivery_that_nobody_asked_for_is_its_senders_mistake():
    async def scenario():
        told = []
        buffer = buffer_of(failed=told.append)
        await buffer.published(0)
        with pytest.raises(RuntimeError, match="never admitted"):
            await buffer.put([group(99)])
        assert not told
        assert await admit(buffer) == [0, 1, 2, 3]

    asyncio.run(scenario())
