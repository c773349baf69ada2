"""Batches for supervised training: in order, made ahead, and continued exactly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from leeway.driver import offline
from leeway.tasks.batches import Batches
from leeway.tasks.mixed import MixedTaskSet
from leeway.tasks.taskset import TaskSet
from leeway.types import Task


def tasks(number: int = 7, name: str = "") -> TaskSet:
    return TaskSet([Task(task_id=f"{name}{i}", prompt="p") for i in range(number)], seed=0)


def mixture() -> MixedTaskSet:
    return MixedTaskSet({"a": tasks(4, "a"), "b": tasks(3, "b")}, {"a": 2.0, "b": 1.0})


def ids(source: TaskSet | MixedTaskSet, **options: Any) -> Batches[list[str]]:
    return Batches(source, make=lambda task: task.task_id, size=3, collate=list, **options)


@pytest.mark.parametrize("source", [tasks, mixture])
@pytest.mark.parametrize("cut", [0, 1, 4])
def test_a_state_is_that_after_the_last_batch_whatever_was_made_ahead(source: Any, cut: int) -> None:
    whole = ids(source())
    expected = [next(whole) for _ in range(8)]
    assert len(set(map(tuple, expected))) > 4
    first = ids(source())
    head = [next(first) for _ in range(cut)]
    state = json.loads(json.dumps(first.state_dict()))
    rest = ids(source(), start=state)
    assert head + [next(rest) for _ in range(8 - cut)] == expected


def test_a_state_of_other_tasks_is_refused() -> None:
    state = ids(tasks(7)).state_dict()
    with pytest.raises(Exception, match="saved position has fingerprint"):
        next(ids(tasks(8), start=state))


def test_a_task_that_cannot_be_trained_on_is_named_in_one_line() -> None:
    def make(task: Task) -> str:
        raise ValueError(f"task {task.task_id}: no answer")

    with pytest.raises(ValueError, match=r"^task \d: no answer$"):
        next(Batches(tasks(), make=make, size=2, collate=list))


def test_a_checkpoint_has_the_position_of_the_step_that_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.ray, "put", lambda share: share)

    class Share(list[str]):
        num_tokens = 1

    def shares(**options: Any) -> Any:
        return Batches(tasks(), make=lambda task: task.task_id, size=3, collate=lambda b: [Share(b)], **options)

    feed = offline.Feed(shares(), tasks(), first_step=0)
    given = [feed.next(step)[0][0] for step in (1, 2, 3)]
    # An interrupt between a batch and its step: the ranks are still at version 2.
    for version in (2, 3):
        position = asyncio.run(feed.position(version))
        resumed = offline.Feed(shares(start=position["batches"]), tasks(), first_step=version)
        following = resumed.next(version + 1)[0][0]
        assert (following == given[2]) is (version == 2)
    assert position["stream"]["taskset"]["fingerprint"] == tasks().fingerprint()
