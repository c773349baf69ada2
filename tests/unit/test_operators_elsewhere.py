"""Operators in other processes, as the buffer sees them: a delivered group is outstanding until they are through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from leeway.replay.buffer import ReplayBuffer
from leeway.types import Group, Task

from ..fakes import SOON_S, admit, buffer_of, goes_on, group, still_waits, take_batch, waits


class Elsewhere:
    """Operators that answer when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[int, asyncio.Future[Group | str]] = {}
        self.failures: list[Exception] = []

    async def apply(self, delivered: Group) -> Group | str:
        answer = self.asked[delivered.group_id] = asyncio.get_running_loop().create_future()
        result = await answer
        return delivered if result is UNCHANGED else result

    async def answers(self, group_id: int, result: Any = None) -> None:
        self.asked[group_id].set_result(UNCHANGED if result is None else result)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def fails(self, group_id: int, error: Exception) -> None:
        self.asked[group_id].set_exception(error)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def buffer(self, **settings: Any) -> ReplayBuffer:
        return buffer_of(operated_elsewhere=self.apply, failed=self.failures.append, **settings)


UNCHANGED: Any = object()


async def delivered(buffer: ReplayBuffer, *group_ids: int, attempt: int = 0) -> None:
    await buffer.put([replace(group(i), attempt=attempt) for i in group_ids])
    await asyncio.sleep(0)


def test_a_group_is_outstanding_until_its_operators_are_through() -> None:
    async def scenario() -> None:
        elsewhere = Elsewhere()
        buffer = elsewhere.buffer(P=2, T=0)
        await buffer.published(0)
        assert await admit(buffer, collector="a") == [0, 1]
        await delivered(buffer, 0, 1)
        assert (buffer.num_held("a"), buffer.num_held("operators")) == (0, 2)
        assert (buffer.stats().slots_in_use, buffer.stats().groups_ready, buffer.stats().dropped_stale) == (2, 0, 0)
        asking, taking = await waits(admit(buffer, collector="a")), await waits(take_batch(buffer))
        await elsewhere.answers(1, replace(group(1), rewards=[5.0, 6.0]))
        await still_waits(taking)
        await elsewhere.answers(0)
        batch = await goes_on(taking)
        assert [g.group_id for g in batch.groups] == [0, 1], "admission order, whichever was through first"
        assert batch.groups[1].rewards == [5.0, 6.0]
        await still_waits(asking)  # the bound: version 1 is not there yet
        await buffer.trained([0, 1])
        await buffer.published(1)
        assert await goes_on(asking) == [2, 3]

    asyncio.run(scenario())


def test_while_operators_have_a_group_nobody_else_can_have_it() -> None:
    async def scenario() -> None:
        elsewhere = Elsewhere()
        buffer = elsewhere.buffer(P=2, T=0)
        await buffer.published(0)
        await admit(buffer, collector="a")
        await delivered(buffer, 0)
        with pytest.raises(RuntimeError, match="group 0 cannot become delivered: it is delivered"):
            await buffer.put([group(0)])
        with pytest.raises(RuntimeError, match="group 0 cannot be issued again: it is delivered"):
            await buffer.reissue([0], "why not")
        with pytest.raises(RuntimeError, match="group 0 cannot become failed: it is delivered"):
            await buffer.fail(0, "too late")
        assert await buffer.mark_dead("a", "it died") == [1], "what it had delivered is not made again"
        assert await admit(buffer, collector="b") == [1]
        await delivered(buffer, 1)  # attempt 0: of the dead one, too late
        assert list(elsewhere.asked) == [0]
        await delivered(buffer, 1, attempt=1)
        assert await buffer.withdraw("") == [], "it is delivered, so its task is not drawn again"
        await elsewhere.answers(0)
        await elsewhere.answers(1)
        assert (await take_batch(buffer)).group_ids == [0, 1]

    asyncio.run(scenario())


def test_a_group_that_is_left_out_late_is_replaced_though_all_had_been_admitted() -> None:
    async def scenario() -> None:
        elsewhere = Elsewhere()
        buffer = elsewhere.buffer(P=2, T=0, num_batches=1)
        await buffer.published(0)
        assert await admit(buffer, collector="a") == [0, 1]
        await delivered(buffer, 0, 1)
        asking = await waits(admit(buffer, collector="a"))  # not told yet that there will be no more
        await elsewhere.answers(0)
        await elsewhere.answers(1, "equal rewards")
        assert await goes_on(asking) == [2]
        assert buffer.stats().filtered == 1
        await delivered(buffer, 2)
        over = await waits(admit(buffer, collector="a"))
        await elsewhere.answers(2)
        assert await goes_on(over) == []
        assert (await take_batch(buffer)).group_ids == [0, 2]

    asyncio.run(scenario())


def test_a_failure_of_operators_is_raised_by_all_that_wait_and_all_that_come() -> None:
    async def scenario() -> None:
        elsewhere = Elsewhere()
        buffer = elsewhere.buffer(P=2, T=0)
        await buffer.published(0)
        await admit(buffer, collector="a")
        await delivered(buffer, 0, 1)
        left_out = asyncio.ensure_future(buffer.left_out([]))
        asking, taking = await waits(admit(buffer, collector="a")), await waits(take_batch(buffer))
        error = ZeroDivisionError("operator my_ops:judge failed on group 0")
        await elsewhere.fails(0, error)
        for waiting in (asking, taking):
            with pytest.raises(ZeroDivisionError, match="my_ops:judge"):
                await goes_on(waiting)
        for call in (admit(buffer), take_batch(buffer), delivered(buffer, 1)):
            with pytest.raises(ZeroDivisionError, match="my_ops:judge"):
                await call
        assert elsewhere.failures == [error]
        assert elsewhere.asked[1].cancelled(), "the others are waited for no more"
        assert await left_out == []

    asyncio.run(scenario())


def test_a_source_of_tasks_that_fails_when_a_group_is_left_out_is_a_failure_too() -> None:
    async def scenario() -> None:
        def tasks() -> Iterator[Task]:
            yield from (Task(task_id=f"task-{i}", prompt="") for i in range(3))
            raise ValueError("the prompt of task-3 is too long")

        elsewhere = Elsewhere()
        buffer = elsewhere.buffer(P=2, T=0, tasks=tasks())
        await buffer.published(0)
        await admit(buffer, collector="a")
        await delivered(buffer, 0, 1)
        asking, taking = await waits(admit(buffer, collector="a")), await waits(take_batch(buffer))
        await elsewhere.answers(0, "equal rewards")
        for waiting in (asking, taking):
            with pytest.raises(ValueError, match="task-3 is too long"):
                await goes_on(waiting)
        assert [str(error) for error in elsewhere.failures] == ["the prompt of task-3 is too long"]

    asyncio.run(scenario())


@pytest.mark.parametrize("saved", [lambda buffer, path: buffer.dumps(path), None])
def test_a_copy_issues_again_what_operators_had(saved: Callable[..., Any] | None, tmp_path: Any) -> None:
    async def scenario() -> None:
        elsewhere, later = Elsewhere(), Elsewhere()
        buffer = elsewhere.buffer(P=2, T=1, num_batches=2)
        await buffer.published(0)
        assert await admit(buffer, collector="a") == [0, 1, 2, 3]
        await delivered(buffer, 0, 1)
        await elsewhere.answers(1)
        position = buffer.position(0)
        assert position is not None
        assert position.open_draws == [0, 1, 2, 3]
        copy = later.buffer(P=2, T=1, num_batches=2)
        if saved is not None:
            saved(buffer, tmp_path / "saved")
            copy.loads(tmp_path / "saved")
        else:
            copy.load_state_dict(buffer.state_dict())
        again = await copy.admit(9, timeout_s=SOON_S, collector="b")
        assert [(a.group_id, a.attempt) for a in again] == [(0, 1), (2, 1), (3, 1)]
        await delivered(copy, 0, 2, 3, attempt=1)
        for group_id in (3, 2, 0):
            await later.answers(group_id)
        assert (await take_batch(copy)).group_ids == [0, 1]
        assert (await take_batch(copy)).group_ids == [2, 3]

    asyncio.run(scenario())


def test_which_of_the_delivered_groups_are_left_out_is_known_when_their_operators_are_through() -> None:
    async def scenario() -> None:
        elsewhere = Elsewhere()
        buffer = elsewhere.buffer(P=2, T=1)
        await buffer.published(0)
        await admit(buffer)
        await delivered(buffer, 0, 1, 2)
        asking = asyncio.ensure_future(buffer.left_out([0, 1, 2]))
        await elsewhere.answers(0)
        await elsewhere.answers(1)
        assert (await take_batch(buffer)).group_ids == [0, 1]  # taken before anybody hears of them
        await still_waits(asking)
        await elsewhere.answers(2, "too long")
        assert await goes_on(asking) == [2]
        here = buffer_of(P=1, T=0, operators=[lambda g: "never"])
        await here.published(0)
        await admit(here)
        await here.put([group(0)])
        assert await here.left_out([0]) == [0]

    asyncio.run(scenario())


def test_a_wait_that_is_too_long_names_the_operators() -> None:
    async def scenario() -> None:
        buffer = Elsewhere().buffer(P=1, T=0)
        await buffer.published(0)
        await admit(buffer, collector="a")
        await delivered(buffer, 0)
        with pytest.raises(TimeoutError, match=re.escape("operators holds 1 groups (group 0 among them)")):
            await buffer.take_batch(timeout_s=0.01)

    asyncio.run(scenario())
