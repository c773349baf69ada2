"""Many tasks outside of admission, some at a time: for evaluation, and for measuring speed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..types import Task, Trajectory
from .clock import RolloutClock
from .room import Room


class RolloutFailed(RuntimeError):
    """A task failed in every attempt; the message is the last attempt's reason."""


async def run_bounded(
    tasks: Sequence[Task],
    attempts: Callable[[Task, RolloutClock], Awaitable[list[Trajectory]]],
    *,
    room: Room,
    num_sequences: int,
    at_most: int,
    clock: Callable[[], RolloutClock],
) -> list[list[Trajectory] | RolloutFailed]:
    """What `attempts` gives for each task of `num_sequences`, or why it failed for good, in the order of the tasks.

    They begin as the engine has room for them, `at_most` at a time.
    """
    under_way = 0

    async def one(task: Task, clock: RolloutClock) -> list[Trajectory] | RolloutFailed:
        nonlocal under_way
        try:
            return await attempts(task, clock)
        except RolloutFailed as failure:
            return failure
        finally:
            under_way -= 1
            room.left()

    begun: list[asyncio.Task[list[Trajectory] | RolloutFailed]] = []
    try:
        async with asyncio.TaskGroup() as group:
            free = 0
            for task in tasks:
                while under_way >= at_most or not (free := free or room.groups(num_sequences)):
                    await room.more()
                    free = 0
                free -= 1
                under_way += 1
                room.begin(its_clock := clock(), num_sequences)
                begun.append(group.create_task(one(task, its_clock)))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in begun]
