"""A buffer whose tasks come from a queue that others feed: nobody waits for a task who could go on without one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config import find_recipe, load_config
from leeway.failures import PartFailed
from leeway.replay import actor
from leeway.replay.actor import ReplayBufferActor
from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.stream import TaskStream
from leeway.runtime import launch
from leeway.runtime.supervisor import Supervisor

from ..fakes import SOON_S, admit, goes_on, group, still_waits, take_batch, waits
from .test_task_feeds import build, close, feed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "queue.jsonl"
    feed(path, 0)
    return path


def fed_by(path: Path, *, num_batches: int | None = None) -> ReplayBuffer:
    """Batches of 2, as many as wanted under way."""
    stream = TaskStream(build(name="queue", path=str(path)), num_tokens=lambda task: 1, max_prompt_tokens=1)
    rule = AdmissionRule(
        groups_per_batch=2, updates_per_batch=1, publish_every=1, reorder_window=1, target_lag=9, max_lag=9
    )
    return ReplayBuffer(tasks=stream, rule=rule, num_batches=num_batches, capacity=64)


def test_the_newest_task_starts_at_once_and_the_next_when_it_comes(path: Path) -> None:
    async def scenario() -> None:
        buffer = fed_by(path)
        await buffer.published(0)
        assert await admit(buffer) == [0]
        assert buffer.awaits_a_task
        one, other = await waits(admit(buffer, 1, "one")), await waits(admit(buffer, 1, "other"))
        feed(path, 1)
        await buffer.tasks_arrived()
        assert await goes_on(one) == [1]
        await still_waits(other)
        feed(path, 2, 3, 4)
        await buffer.tasks_arrived()
        assert await goes_on(other) == [2]
        assert await admit(buffer, 2, "one") == [3, 4]

    asyncio.run(scenario())


def test_a_finished_run_leaves_a_queue_that_is_still_open(path: Path) -> None:
    async def scenario() -> None:
        buffer = fed_by(path)
        await buffer.published(0)
        await admit(buffer)
        waiting = [await waits(admit(buffer)) for _ in range(3)]
        await buffer.close()
        assert [await goes_on(call) for call in waiting] == [[], [], []]

    asyncio.run(scenario())


def test_groups_to_issue_again_wait_for_no_task(path: Path) -> None:
    async def scenario() -> None:
        buffer = fed_by(path)
        await buffer.published(0)
        assert await admit(buffer, collector="lost") == [0]
        first, second = await waits(admit(buffer, 1, "first")), await waits(admit(buffer, 1, "second"))
        await buffer.mark_dead("lost", "gone")
        assert await goes_on(first) == [0]
        await still_waits(second)

    asyncio.run(scenario())


def test_the_last_batch_is_short_where_the_queue_is_closed(path: Path) -> None:
    async def scenario() -> None:
        buffer = fed_by(path)
        await buffer.published(0)
        await buffer.put([group(g) for g in await admit(buffer)])
        trainer, collector = await waits(take_batch(buffer)), await waits(admit(buffer))
        close(path)
        await buffer.tasks_arrived()
        assert (await goes_on(trainer)).group_ids == [0]
        assert await goes_on(collector) == []
        assert await take_batch(buffer) is None

    asyncio.run(scenario())


def test_a_queue_that_nobody_feeds_is_named_when_time_is_up(path: Path) -> None:
    async def scenario() -> None:
        buffer = fed_by(path)
        await buffer.published(0)
        await admit(buffer)
        named = rf"waited 0\.01 s for a task in {path}; feed it, or close it with `touch {path}\.closed` \("
        with pytest.raises(TimeoutError, match=named):
            await buffer.admit(1, timeout_s=0.01)
        with pytest.raises(TimeoutError, match=named):
            await buffer.take_batch(timeout_s=0.01)

    asyncio.run(scenario())


def test_the_actor_sees_what_comes_and_ends_with_a_line_that_is_no_task(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "POLL_S", 0.001)

    async def scenario() -> None:
        buffer = fed_by(path)
        queue = buffer._tasks._taskset  # type: ignore[attr-defined]
        asked = []
        monkeypatch.setattr(buffer, "tasks_arrived", lambda came=buffer.tasks_arrived: asked.append(1) or came())
        await buffer.published(0)
        await admit(buffer)
        own: Any = SimpleNamespace(role="replay", _taskset=queue, _buffer=buffer)
        own._failure, own._has_failed = None, asyncio.Event()
        own._feed_from_queue = lambda: ReplayBufferActor._feed_from_queue(own)
        alive = asyncio.create_task(ReplayBufferActor.wait_until_death(own))  # type: ignore[arg-type]
        waiting = asyncio.create_task(buffer.admit(1, timeout_s=SOON_S))
        await asyncio.sleep(0.02)
        assert not asked, "a queue in which nothing has changed is not read"
        feed(path, 1)
        assert [a.group_id for a in await waiting] == [1]
        waiting = asyncio.create_task(buffer.admit(1, timeout_s=SOON_S))
        path.open("a").write("[]\n")
        with pytest.raises(PartFailed, match=r"replay: ValueError: .*queue\.jsonl:3: got list"):
            await alive
        waiting.cancel()

    asyncio.run(scenario())


def test_the_buffer_runs_where_the_driver_has_read_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Remote:
        @staticmethod
        def options(**given: Any) -> Any:
            asked.update(given)
            raise InterruptedError

    monkeypatch.setattr(launch, "ReplayBufferRemote", Remote)
    context = SimpleNamespace(get_node_id=lambda: "ab" * 28)
    monkeypatch.setattr(launch.ray, "get_runtime_context", lambda: context)
    launcher = launch.Launcher(
        load_config("quickstart"), find_recipe("async_rl"), run_dir=tmp_path, supervisor=Supervisor()
    )
    with pytest.raises(InterruptedError):
        asyncio.run(launcher.buffer())
    strategy = asked["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == ("ab" * 28, False)
