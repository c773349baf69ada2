"""Many tasks outside of admission, some at a time: for evaluation, and for measuring speed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..types import Task, Trajectory


class RolloutFailed(RuntimeError):
    """A task failed in every attempt; the message is the last attempt's reason."""


async def each(
    tasks: Sequence[Task], attempts: Callable[[Task], Awaitable[list[Trajectory]]], *, at_once: int
) -> list[list[Trajectory]]:
    """What `attempts` gives for each task, in their order; an empty list for one that failed for good.

    When all of them fail, it raises RuntimeError with the last one's reason.
    """
    room = asyncio.Semaphore(at_once)
    failures: list[RolloutFailed] = []

    async def one(task: Task) -> list[Trajectory]:
        async with room:
            try:
                return await attempts(task)
            except RolloutFailed as failure:
                failures.append(failure)
                return []

    groups = await asyncio.gather(*map(one, tasks))
    if failures and len(failures) == len(tasks):
        raise RuntimeError(f"all {len(tasks)} tasks failed; the last one: {failures[-1]}") from failures[-1]
    return groups
