"""A run that goes on draws the tasks that the first one would have drawn, in every order."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import asdict
from typing import Any

import pytest

from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.position import Position
from leeway.replay.stream import TaskStream
from leeway.tasks.mixed import MixedTaskSet
from leeway.tasks.taskset import TaskSet
from leeway.types import Group, Task, Trajectory

NUM_TASKS, BATCHES = 7, 40


def taskset_of(kind: str, num_tasks: int = NUM_TASKS) -> TaskSet | MixedTaskSet:
    if kind == "mixture":
        parts = {name: letters(5, order, name) for name, order in (("a", "adaptive"), ("b", "shuffle"))}
        return MixedTaskSet(parts, {"a": 2.0, "b": 1.0})
    return letters(num_tasks, kind)


def letters(count: int, order: str, prefix: str = "") -> TaskSet:
    return TaskSet([Task(task_id=f"{prefix}{i}", prompt="x" * i) for i in range(count)], seed=3, order=order)


def solved(task_id: str) -> float:
    """How often: fixed, and different for each task."""
    return (sum(map(ord, task_id)) % 5) / 4


class Run:
    """A buffer in lockstep and its tasks, as the actor puts them together; `start` is JSON."""

    def __init__(self, kind: str, start: str | None = None) -> None:
        saved: dict[str, Any] | None = json.loads(start) if start else None
        stream = saved.pop("stream") if saved else None
        position = Position(**(saved or {}))
        self.taskset = taskset_of(kind)
        self.stream = TaskStream(
            self.taskset,
            num_tokens=lambda task: len(task.prompt),
            max_prompt_tokens=NUM_TASKS,
            start=stream,
        )
        rule = AdmissionRule(
            groups_per_batch=3, updates_per_batch=1, publish_every=1, reorder_window=1, target_lag=0, max_lag=0
        )
        self.buffer = ReplayBuffer(
            tasks=self.stream,
            rule=rule,
            num_batches=None,
            capacity=64,
            start=position,
            drawn=self.stream.admitted,
        )
        self.version = position.num_batches

    async def step(self, rng: random.Random) -> list[tuple[int, str]]:
        """One batch: (group, task) of each admitted group; some fail, and are replaced."""
        await self.buffer.published(self.version)
        drawn: list[tuple[int, str]] = []
        while self.buffer._window.missing_for_batch(last=False) is not None:
            for admission in await self.buffer.admit(100, timeout_s=200):
                group_id, task_id = admission.group_id, admission.task.task_id
                drawn.append((group_id, task_id))
                if rng.random() < 0.2:
                    await self.buffer.fail(group_id, "by chance")
                    continue
                self.taskset.record(task_id, solved(task_id))
                await self.buffer.put([Group.of(group_id=group_id, task_id=task_id, trajectories=[TRAJECTORY])])
        batch = await self.buffer.take_batch(timeout_s=200)
        assert batch is not None
        self.version += 1
        self.saved = self.position()
        await self.buffer.trained(batch.group_ids)
        self.stream.forget_before(self.buffer.first_draw)
        return drawn

    def position(self) -> str:
        position = self.buffer.position(self.version)
        assert position is not None
        return json.dumps(asdict(position) | {"stream": self.stream.position(position)})


TRAJECTORY = Trajectory(
    prompt_tokens=[1],
    response_tokens=[2],
    loss_mask=[True],
    behavior_logprobs=[-1.0],
    policy_versions=[0],
    reward=0.0,
    finish_reason="stop",
    text="",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffle", "sequential", "adaptive", "mixture"])
def test_a_lockstep_run_that_is_ended_anywhere_draws_what_it_would_have_drawn(kind: str) -> None:
    async def scenario() -> None:
        through, rngs = Run(kind), [random.Random(i) for i in range(BATCHES)]
        expected, saved = [], []
        for rng in rngs:
            expected.append(await through.step(rng))
            saved.append(through.saved)
        drawn = [task_id for step in expected for _, task_id in step]
        if kind == "adaptive":
            shuffled = itertools.islice(taskset_of("shuffle"), len(drawn))
            assert drawn != [t.task_id for t in shuffled], "the order did not adapt: nothing is shown"
        again: Run | None = None
        for k in range(BATCHES - 1):
            if again is None or k % 3:  # mostly ended after every step, and now and then going on a while
                again = Run(kind, saved[k] if again is None else again.saved)
            assert await again.step(random.Random(k + 1)) == expected[k + 1], f"step {k + 1}"
            assert again.saved == saved[k + 1]
        assert len(again.stream._task_of) < 20, "draws that are over are forgotten"  # type: ignore[union-attr]

    asyncio.run(scenario())


def test_epochs_end_where_they_would_have_ended_and_long_prompts_are_left_out_in_both_runs() -> None:
    def stream(start: Any = None) -> TaskStream:
        options = {"max_prompt_tokens": 4, "epochs": 2.5, "num_tokens": lambda task: len(task.prompt)}
        return TaskStream(taskset_of("shuffle", 10), start=start, **options)

    whole = [task.task_id for task in stream()]
    assert set(whole) == {str(i) for i in range(5)}
    assert 10 < len(whole) < 15
    first = stream()
    drawn = [next(first).task_id for _ in range(6)]
    assert drawn == whole[:6]
    assert first.num_too_long > 0
    # Draws 2 and 4 are not over; 5 was drawn ahead and nobody has asked for it.
    for draw in range(5):
        first.admitted(draw)
    second = stream(first.position(Position(open_draws=[2, 4], next_draw=5)))
    assert [task.task_id for task in second] == [whole[2], whole[4], *whole[5:]]


def test_when_every_prompt_is_too_long_that_is_said_at_once() -> None:
    options = {"num_tokens": lambda task: 9, "max_prompt_tokens": 8}
    with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens: got 8, but every prompt is longer"):
        next(TaskStream(taskset_of("shuffle"), **options))


@pytest.mark.parametrize("order", ["shuffle", "adaptive", "sequential"])
def test_one_prompt_that_fits_is_found_in_every_epoch(order: str) -> None:
    """Between two draws of it the others may come up twice: at the end of an epoch and at the beginning of the next."""
    for seed in range(20):
        tasks = [Task(task_id=str(i), prompt="x" if i == 2 else "xx") for i in range(6)]
        stream = TaskStream(
            TaskSet(tasks, seed=seed, order=order), num_tokens=lambda task: len(task.prompt), max_prompt_tokens=1
        )
        assert [next(stream).task_id for _ in range(20)] == ["2"] * 20
    rare = {"a": TaskSet(tasks[3:], seed=0), "b": TaskSet(tasks[2:3], seed=0)}
    mixed = MixedTaskSet(rare, {"a": 50.0, "b": 1.0})
    stream = TaskStream(mixed, num_tokens=lambda task: len(task.prompt), max_prompt_tokens=1)
    assert next(stream).task_id == "2"
    assert stream.num_too_long > len(tasks)


def test_a_position_in_other_tasks_is_refused() -> None:
    first = TaskStream(taskset_of("shuffle"), num_tokens=lambda _: 1, max_prompt_tokens=8)
    saved = first.position(Position())
    with pytest.raises(ValueError, match="saved position has fingerprint"):
        TaskStream(taskset_of("shuffle", 8), num_tokens=lambda _: 1, max_prompt_tokens=8, start=saved)
