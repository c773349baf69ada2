"""The jobs of a run in one folder: a real replay buffer, its host, and explorers' links, in one process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from leeway.config.errors import ConfigError
from leeway.config.inputs import EvalSampling
from leeway.config.sampling import Sampling, Samplings
from leeway.config.stages import plan_run
from leeway.failures import PartFailed, Refused
from leeway.group import Group
from leeway.jobs import calls, folder, host, link
from leeway.jobs.actor import TrainLinkActor
from leeway.jobs.calls import Call, Caller, Calls
from leeway.jobs.evaluations import Evaluations
from leeway.jobs.fit import check_fit, must_be_equal
from leeway.jobs.folder import Meeting, claimed, good_until, read_json, write_json
from leeway.jobs.group_bytes import group_bytes, group_of, groups_of, laid_out
from leeway.jobs.host import MOST_FAILED, Host, take_over
from leeway.jobs.link import TrainLink
from leeway.jobs.store import FINISHED, LEFT_OUT, TRAINED, VOID, GroupStore
from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.position import Position
from leeway.replay.stream import TaskStream
from leeway.tasks.taskset import TaskSet
from leeway.types import Admission, Task

from .. import fakes

P, LIMIT_S = 4, 120.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host, link):
        monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(link, "LOOK_S", 0.01)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Train:
    """The train job's buffer with its host and store, as the actor puts them together; L = 1."""

    def __init__(
        self,
        folder: Path,
        start: str | None = None,
        *,
        num_batches: int | None = None,
        now: Callable[[], float] | None = None,
        silent_s: float = 5.0,
        operated_elsewhere: Callable[[Group], Awaitable[Group | str]] | None = None,
        operators: Sequence[Any] = (),
    ) -> None:
        saved: dict[str, Any] | None = json.loads(start) if start else None
        stream = saved.pop("stream") if saved else None
        position = Position(**(saved or {}))
        self.meeting, self.clock = Meeting(folder), Clock()
        self.failures: list[Exception] = []
        tasks = TaskSet([Task(task_id=f"task-{i}", prompt="p") for i in range(1000)], seed=0, order="sequential")
        self.stream = TaskStream(tasks, num_tokens=lambda task: 1, max_prompt_tokens=1, start=stream)
        self.buffer = ReplayBuffer(
            tasks=self.stream,
            drawn=self.stream.admitted,
            returned=self.stream.returned,
            start=position,
            rule=AdmissionRule(
                groups_per_batch=P, updates_per_batch=1, publish_every=1, reorder_window=1, target_lag=1, max_lag=1
            ),
            num_batches=num_batches,
            capacity=64,
            num_collectors=0,
            operated_elsewhere=operated_elsewhere,
            operators=operators,
            failed=self.failures.append,
        )
        self.store = GroupStore(self.meeting.groups)
        self.version = position.num_batches
        resumed_at = self.version if start else -1
        take_over(self.store, self.buffer, position, policy_version=resumed_at)
        self.host = Host(
            self.meeting, self.buffer, self.store, about={"must_be_equal": {}, "model": None},
            samplings=Samplings(default=Sampling(group_size=2, temperature=1.0), by_taskset={}, shares={}),
            vocab_size=16, max_length=8,
            resumed_at=resumed_at, silent_s=silent_s, timeout_s=1e6, wait_s=1e6, now=now or self.clock,
        )  # fmt: skip
        self.running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self.running = asyncio.create_task(self.host.run())
        await self.publish()

    async def publish(self) -> None:
        await self.buffer.published(self.version)
        self.host.published(self.version)

    async def step(self, *, written_down: bool = True) -> list[Group]:
        served = await self.buffer.take_batch(timeout_s=1e6)
        assert served is not None
        for group in served.groups:
            oldest, newest = group.policy_versions()
            assert 0 <= self.version - newest <= self.version - oldest <= 1, "the bound"
        self.version += 1
        await self.publish()
        if written_down:
            of = [self.buffer.of(group_id) for group_id in served.group_ids]
            self.store.trained(of, batch=served.index)
            await self.buffer.trained(served.group_ids)
        return served.groups

    def saved(self) -> str:
        position = self.buffer.position(self.version)
        assert position is not None
        return json.dumps(asdict(position) | {"stream": self.stream.position(position)})

    async def loses(self, name: str) -> None:
        """It gives no more signs. One that was on its way may still come, so time passes more than once."""
        explorer = self.host._explorers[name]

        def is_lost() -> bool:
            explorer.beats._since -= 100.0
            return not explorer.is_here

        await until(is_lost, "it is lost")

    async def killed(self) -> None:
        assert self.running is not None
        async with self.host._signing:  # a sign that it has counted is written
            self.running.cancel()
        await asyncio.wait({self.running})
        for explorer in self.host._explorers.values():
            explorer.calls.stop()
        self.store.close()


class Explorer:
    """A link and one collector, which finishes what it is told to. `version`: of its engine."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        own: Callable[[], Iterator[Task]] | None = None,
        clients: bool = False,
        silent_s: float = 1e6,
        wait_s: float = 1e6,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = TrainLink(
            Meeting(folder), name, silent_s=silent_s, wait_s=wait_s, own=own, clients=clients, now=now
        )
        self.running = asyncio.create_task(self.link.run())
        self.version = 0

    async def admit(self, limit: int = 2) -> list[Admission]:
        asked = asyncio.create_task(self.link.admit(limit, "generator-0/1"))
        await asyncio.wait({asked, self.running}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            await asyncio.wait_for(asyncio.shield(self.running), 0)  # its link has failed: that is the cause
        return asked.result()

    async def put(self, *admissions: Admission, version: int | None = None) -> None:
        await self.link.put([finished(a, self.version if version is None else version) for a in admissions])

    async def work(self) -> None:
        """For ever: one group after the other, under the newest weights that there are."""
        while admissions := await self.link.admit(2, "generator-0/1"):
            for admission in admissions:
                version = max(self.link._train.get("published", 0), admission.min_policy_version)
                await self.put(admission, version=version)
                await asyncio.sleep(0)

    async def killed(self) -> None:
        async with self.link._signing:  # no thread is writing a sign, which would be seen after the last
            self.running.cancel()
        await asyncio.wait({self.running})


def finished(admission: Admission, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    trajectories = [fakes.trajectory(reward, version) for reward in rewards]
    return Group.of(
        group_id=admission.group_id,
        task_id=admission.task.task_id,
        attempt=admission.attempt,
        trajectories=trajectories,
    )


async def until(holds: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.005)
    assert holds(), what


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(limited())


# ------------------------------------------------------------------------------------------------------------- bytes


def test_a_group_is_the_same_as_bytes_and_nothing_else_is_one() -> None:
    groups = [fakes.group(3), fakes.group(4, rewards=(0.25, 0.5, 1.0))]
    data = laid_out(groups)
    assert groups_of(data) == groups
    assert group_of(group_bytes(groups[1])) == groups[1]
    for wrong in (data[:-3], b"\x80\x04N.", b"{}", group_bytes(groups[0])[:40], (1 << 40).to_bytes(8, "little") + b"x"):
        with pytest.raises(Refused):
            groups_of(wrong)


# ------------------------------------------------------------------------------------------------------------- calls


def test_calls_are_answered_whenever_somebody_comes_and_what_waits_holds_up_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        files = Meeting(tmp_path).explorer("a")
        caller = Caller(files)
        fetching = asyncio.create_task(caller.run())
        first = await caller.send("0000000a-0000000b", "put", {"x": 1}, b"bytes")
        second = await caller.send("0000000a-0000000b", "admit", {})
        third = await caller.send("0000000a-0000000b", "fail", {})
        seen: list[Call] = []
        free = asyncio.Event()

        async def handle(call: Call) -> dict[str, Any]:
            seen.append(call)
            if call.verb == "admit":
                await free.wait()
            if call.verb == "fail":
                raise ValueError("no such group")
            return {"number": call.number}

        answering = Calls(files, handle)

        async def look() -> None:
            while True:
                answering.look()
                await asyncio.sleep(0.005)

        looking = asyncio.create_task(look())
        assert await first == {"number": 1}
        assert await third == {"error": "ValueError: no such group"}
        assert not second.done()
        free.set()
        assert await second == {"number": 2}
        assert [(c.verb, c.arguments, c.payload) for c in seen] == [
            ("put", {"x": 1}, b"bytes"), ("admit", {}, None), ("fail", {}, None),
        ]  # fmt: skip
        await until(lambda: not [*files.calls.iterdir(), *files.answers.iterdir()], "both sides clean up")
        for task in (looking, fetching):
            task.cancel()

    play(scenario)


def test_an_answer_to_a_namesake_is_left_to_it_and_removed_when_nobody_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        files = Meeting(tmp_path).explorer("a")
        one, other = Caller(files), Caller(files)
        fetching = asyncio.create_task(one.run())
        await one.send("0000000a-0000000b", "admit", {})
        awaited = await other.send("0000000a-0000000c", "admit", {})
        answer = files.answers / "0000000a-0000000c-00000001.json"
        write_json(answer, {"number": 1})
        await until(lambda: answer.name in one._abandoned, "one has seen it")
        also_fetching = asyncio.create_task(other.run())
        assert await awaited == {"number": 1}
        monkeypatch.setattr(calls, "ABANDONED_S", 0.0)
        write_json(answer, {})
        await until(lambda: not answer.exists(), "it is removed")
        for task in (fetching, also_fetching):
            task.cancel()

    play(scenario)


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"verb": 3}', b'{"verb": "put", "has_groups": true}', b"\xff"])
def test_a_file_that_is_no_call_is_answered_with_what_is_wrong(tmp_path: Path, content: bytes) -> None:
    async def scenario() -> None:
        files = Meeting(tmp_path).explorer("a")
        Caller(files)
        name = "0000000a-0000000b-00000001.json"
        (files.calls / name).write_bytes(content)
        answering = Calls(files, lambda call: pytest.fail("it was handled"))
        while not (files.answers / name).exists():
            answering.look()
            await asyncio.sleep(0.005)
        assert "error" in (read_json(files.answers / name) or {})

    play(scenario)


# ------------------------------------------------------------------------------------------------------------- store


def test_what_was_stored_is_there_after_a_kill_and_later_batches_are_undone(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    store.add([fakes.group(0), fakes.group(1)], explorer="a")
    store.add([fakes.group(2)], explorer="b", of=lambda _: ("b", 7))
    later = Group.of(group_id=3, task_id="task-3", trajectories=[fakes.trajectory(0.0, 5), fakes.trajectory(1.0, 6)])
    store.add([later], explorer="a")
    store.trained([("", 0)], batch=0)
    store.trained([("", 1)], batch=1)
    again = GroupStore(tmp_path)  # the first was not closed
    kept = again.resume(num_batches=1, policy_version=5)
    assert [(s.group, s.explorer, s.of) for s in kept] == [
        (fakes.group(1), "a", ("", 1)),
        (fakes.group(2), "b", ("b", 7)),
    ]
    assert (again.count(TRAINED), again.count(FINISHED), again.count(VOID)) == (1, 2, 1)
    assert again.by_explorer() == {"a": 3, "b": 1}


def test_a_file_goes_when_nothing_in_it_is_needed(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    for i in range(4):
        store.add([fakes.group(2 * i), fakes.group(2 * i + 1)])
    for batch in range(3):
        store.trained([("", 2 * batch), ("", 2 * batch + 1)], batch=batch)
    assert store.forget_before(2) == 2
    assert [s.group.group_id for s in store.read()] == [4, 5, 6, 7]
    assert len([*tmp_path.glob("*/*.groups")]) == 2


def test_what_operators_left_out_is_neither_kept_for_ever_nor_taken_for_trained(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    rows = [store.add([fakes.group(i)])[0] for i in range(4)]
    store.trained([("", 0)], batch=0)
    store.left_out(rows[1:3])
    position = Position(num_batches=1, num_taken=1, next_draw=4)
    take_over(store, fakes.buffer_of(start=position), position, policy_version=1)
    assert [store.count(state) for state in (TRAINED, LEFT_OUT)] == [2, 2], "3 was trained on and not written down"
    assert store.forget_before(1) == 4
    assert not [*tmp_path.glob("*/*.groups")]


def test_an_index_of_something_else_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_text("something else, and long enough to be taken for a header of SQLite" * 3)
    with pytest.raises(ValueError, match=r"index\.sqlite: no index of groups"):
        GroupStore(tmp_path)
    store = GroupStore(tmp_path / "own")
    store.add([fakes.group(0)])
    next((tmp_path / "own").glob("*/*.groups")).unlink()
    with pytest.raises(ValueError, match=r"\.groups: the index names it"):
        list(store.read())


# ----------------------------------------------------------------------------------------------------- both together


def test_an_explorer_joins_delivers_and_hears_of_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        explorer = Explorer(tmp_path, "a")  # before there is a train job
        admitting = asyncio.create_task(explorer.admit())
        train = Train(tmp_path, num_batches=2)
        await train.begin()
        admissions = await admitting
        assert [a.group_id for a in admissions] == [0, 1]
        assert train.host.num_explorers == 1
        await explorer.put(*admissions)
        working = asyncio.create_task(explorer.work())
        trained = [g.group_id for _ in range(2) for g in await train.step()]
        assert trained == [*range(2 * P)]
        assert train.store.count(TRAINED) == 2 * P
        await train.host.close(ended=True)
        await asyncio.wait_for(working, LIMIT_S)  # without any group
        await until(lambda: explorer.link.has_ended, "it hears of it")

    play(scenario)


def test_operators_elsewhere_hold_up_no_call_and_what_they_leave_out_is_marked(tmp_path: Path) -> None:
    async def scenario() -> None:
        asked: dict[int, asyncio.Future[Group | str]] = {}

        async def elsewhere(group: Group) -> Group | str:
            asked[group.group_id] = asyncio.get_running_loop().create_future()
            return await asked[group.group_id] or group

        train = Train(tmp_path, operated_elsewhere=elsewhere)
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        held = await explorer.admit(P)
        await explorer.put(*held)
        await until(lambda: len(asked) == P, "they are with the operators")
        assert len(await explorer.admit(1)) == 1, "answered, though nobody knows yet what becomes of them"
        assert train.store.count(LEFT_OUT) == 0
        asked[held[0].group_id].set_result("too long")
        await until(lambda: train.buffer.stats().filtered == 1, "it is left out")
        for admission in held[1:]:
            asked[admission.group_id].set_result("")
        await until(lambda: train.store.count(LEFT_OUT) == 1, "it is marked, when all of its delivery are through")
        assert (train.buffer.stats().groups_ready, train.store.count(FINISHED)) == (P - 1, P - 1)
        await explorer.killed()
        await train.killed()

    play(scenario)


def test_an_operator_that_breaks_ends_the_train_job_and_is_not_the_explorers_fault(tmp_path: Path) -> None:
    async def scenario() -> None:
        def breaks(group: Group) -> None:
            raise ZeroDivisionError("a reward of nothing")

        train = Train(tmp_path, operators=[breaks])
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        await explorer.put(*await explorer.admit(1))
        await until(lambda: train.failures, "the train job hears of it")
        assert [type(error) for error in train.failures] == [ZeroDivisionError]
        await explorer.killed()
        await train.killed()

    play(scenario)


@pytest.mark.slow
def test_one_that_is_silent_is_lost_and_what_it_then_delivers_is_not_trained_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        one = Explorer(tmp_path, "a")
        held = await one.admit(2)
        await one.killed()  # it gives no more signs
        await train.loses("a")
        assert any("a is gone" in text for text in train.host.sayings())
        other = Explorer(tmp_path, "b")
        again = await other.admit(3)
        assert {a.task.task_id for a in again} == {"task-0", "task-1", "task-2"}, "one was drawn ahead"
        one.running = asyncio.create_task(one.link.run())  # it goes on
        await one.put(*held)
        await until(lambda: train.host.num_explorers == 2, "it is back, under another session")
        await other.put(*again)
        working = [asyncio.create_task(explorer.work()) for explorer in (one, other)]
        trained = [g.task_id for _ in range(3) for g in await train.step()]
        assert sorted(trained) == sorted(f"task-{i}" for i in range(3 * P))
        assert train.store.count(TRAINED) == 3 * P
        for task in working:
            task.cancel()

    play(scenario)


def test_a_train_job_that_was_killed_goes_on_with_what_was_finished_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        await explorer.put(*await explorer.admit(2), *await explorer.admit(2))
        await train.step()
        saved = train.saved()
        held = await explorer.admit(4)  # groups 4 to 7, under version 1
        await explorer.put(held[0], version=1)
        await until(lambda: train.store.count(FINISHED) == 1, "one is stored")
        await train.killed()
        await explorer.put(held[1], version=1)  # nobody is there
        train = Train(tmp_path, saved)
        await train.begin()
        rest = await explorer.admit(2)
        assert [a.group_id for a in rest] == [6, 7], "4 and 5 are finished"
        await explorer.put(*rest, version=1)
        trained = await train.step()
        assert [g.group_id for g in trained] == [4, 5, 6, 7]
        assert not explorer.link.must_start_again

    play(scenario)


@pytest.mark.parametrize("wrong", [{"response_tokens": [2, 16]}, {"behavior_logprobs": [-1.0, float("nan")]}])
def test_what_cannot_be_trained_on_is_not_kept_for_a_later_life_either(tmp_path: Path, wrong: dict[str, Any]) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        await explorer.put(*await explorer.admit(2), *await explorer.admit(2))
        await train.step()
        saved = train.saved()
        good, bad = await explorer.admit(2)
        await train.killed()
        await explorer.put(good, version=1)
        broken = [replace(fakes.trajectory(reward, 1), **wrong) for reward in (0.0, 1.0)]
        await explorer.link.put([Group.of(group_id=bad.group_id, task_id=bad.task.task_id, trajectories=broken)])
        train = Train(tmp_path, saved)
        await train.begin()
        again = [a.group_id for a in await explorer.admit(2)]
        assert bad.group_id in again
        assert good.group_id not in again

    play(scenario)


def test_a_batch_that_was_trained_and_not_written_down_is_not_trained_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        await explorer.put(*await explorer.admit(2), *await explorer.admit(2))
        await train.step(written_down=False)
        saved = train.saved()
        await train.killed()
        train = Train(tmp_path, saved)
        assert (train.store.count(TRAINED), train.store.count(VOID)) == (P, 0)
        await train.begin()
        assert [a.group_id for a in await explorer.admit(2)] == [4, 5]

    play(scenario)


def test_groups_and_weights_of_a_life_that_was_given_up_are_not_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        saved = train.saved()
        explorer = Explorer(tmp_path, "a")
        await explorer.put(*await explorer.admit(2), *await explorer.admit(2))
        await train.step()
        held = await explorer.admit(2)
        await explorer.put(held[0], version=1)  # of weights that are never made again
        await until(lambda: train.store.count(FINISHED) == 1, "it is stored")
        explorer.link.newest_pulled = 1
        await train.killed()
        train = Train(tmp_path, saved)
        await train.begin()
        await until(lambda: explorer.link.must_start_again, "its engine has weights that are no more")
        assert await explorer.admit() == []
        await explorer.killed()  # as its job ends
        fresh = Explorer(tmp_path, "a")
        assert [a.group_id for a in await fresh.admit(4)] == [4, 5, 6, 7], "0 to 3 were kept, of version 0"
        assert [g.group_id for g in await train.step()] == [0, 1, 2, 3]

    play(scenario)


@pytest.mark.parametrize(
    ("version", "rewards", "cause"),
    [(9, (0.0, 1.0), "got tokens of versions 9 to 9, expected 0 to 0"), (0, (1.0,), "got 1 trajectories")],
)
def test_a_group_that_cannot_be_is_refused_and_its_slot_is_not_lost(
    tmp_path: Path, version: int, rewards: tuple[float, ...], cause: str
) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        first, second = await explorer.admit(2)
        await explorer.link.put([finished(first, version, rewards)])
        said: list[str] = []
        await until(lambda: said.extend(explorer.link.sayings()) or any(cause in text for text in said), cause)
        await explorer.put(second)
        await explorer.link.leave()
        other = Explorer(tmp_path, "b")
        assert first.task in [a.task for a in await other.admit(2)]

    play(scenario)


def test_a_second_attempt_is_not_taken_for_the_first_that_its_collector_still_works_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        one, other = Explorer(tmp_path, "a"), Explorer(tmp_path, "b")
        (first,) = await one.admit(1)
        await other.admit(1)
        await one.killed()
        await train.loses("a")
        one.running = asyncio.create_task(one.link.run())
        again = await one.admit(2)
        assert (again[0].group_id, again[0].attempt) == (first.group_id, 1), "nobody else had room for it"
        await one.put(first)  # the attempt that was given up ends first
        await one.put(*again)
        await until(lambda: train.buffer.has(first.group_id), "the second one arrives")

    play(scenario)


def test_a_collector_that_dies_while_the_train_job_is_silent_leaves_nothing_with_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        held = await explorer.admit(2)
        explorer.link._beats._silent_s = -1.0  # as it seems
        assert await explorer.link.mark_dead("generator-0/1", "killed") == []
        explorer.link._beats._silent_s = 1e6
        again = await explorer.link.admit(2, "generator-0/2")
        assert [(a.group_id, a.attempt) for a in again] == [(a.group_id, 1) for a in held]
        await asyncio.wait_for(explorer.link.leave(), LIMIT_S)

    play(scenario)


@pytest.mark.parametrize("sabotage", ["tokens", "logprobs", "twice", "draws", "number"])
def test_what_a_broken_explorer_delivers_neither_ends_the_run_nor_is_trained_on(tmp_path: Path, sabotage: str) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        first, _ = await explorer.admit(2)
        group = finished(first, 0)
        if sabotage == "tokens":
            group.samples["response_tokens"][0] = 16
        if sabotage == "logprobs":
            group.samples["behavior_logprobs"][0] = float("nan")
        data = laid_out([group, group] if sabotage == "twice" else [group])
        held = explorer.link._holders.pop((first.group_id, 0))
        arguments: dict[str, Any] = {"collector": 7 if sabotage == "number" else held.collector, "draws": [1]}
        answer = await (await explorer.link._caller.send(held.session, "put", arguments, data))
        assert ("error" in answer) is (sabotage in ("tokens", "logprobs", "number")), answer
        assert train.running is not None
        assert not train.running.done()
        assert train.store.count(FINISHED) == (sabotage in ("twice", "draws"))
        if sabotage in ("tokens", "logprobs"):
            assert (await explorer.admit(1))[0].group_id == first.group_id, "it is issued again"

    play(scenario)


def test_odd_files_in_the_folder_end_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        odd = tmp_path / "explorers" / "odd"
        (odd / "explorer.json").mkdir(parents=True)
        (odd / "calls").write_text("a file")
        worse = tmp_path / "explorers" / "worse" / "calls"
        (worse / "0000000a-0000000b-00000001.json").mkdir(parents=True)
        os.mkfifo(worse / "0000000a-0000000b-00000002.json")
        await train.begin()
        explorer = Explorer(tmp_path, "a")
        assert await explorer.admit(1)
        assert train.running is not None
        assert not train.running.done()

    play(scenario)


def test_of_two_that_explore_under_one_name_the_first_ends_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        one = Explorer(tmp_path, "a")
        await one.admit(1)
        other = Explorer(tmp_path, "a")
        done, _ = await asyncio.wait({one.running, other.running}, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(PartFailed, match=r"explorer\.name: a is explored by process \d+ on .* by now"):
            done.pop().result()

    play(scenario)


def test_weights_of_a_life_are_good_until_the_earliest_beginning_of_a_later_one() -> None:
    lives = [["a", -1], ["b", 4], ["c", 6]]
    assert [good_until(lives, life) for life in "abx"] == [4, 6, -1]
    assert good_until(lives, "c") > 10**9


def own_tasks(name: str) -> Callable[[], Iterator[Task]]:
    return lambda: (Task(task_id=f"{name}-{i}", prompt="p") for i in itertools.count())


def test_an_explorers_own_tasks_wait_for_it_and_nobody_else_gets_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        own = Explorer(tmp_path, "a", own=own_tasks("a"))
        held = await own.admit(3)
        assert [a.task.task_id for a in held] == ["a-0", "a-1", "a-2"]
        await own.put(held[1])
        await own.killed()
        await until(lambda: train.buffer.has(held[1].group_id), "it has arrived")
        await train.loses("a")
        other = Explorer(tmp_path, "b")
        assert [a.task.task_id for a in await other.admit(2)] == ["task-0", "task-1"], "the trainer's own"
        back = Explorer(tmp_path, "a", own=own_tasks("a"))
        assert [a.task.task_id for a in await back.admit(3)] == ["a-0", "a-2", "a-3"]

    play(scenario)


def test_an_own_task_that_is_made_first_after_a_resume_costs_no_group_that_was_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        one = Explorer(tmp_path, "a")
        admitted = [*await one.admit(2), *await one.admit(2), *await one.admit(1)]
        assert [a.group_id for a in admitted] == [0, 1, 2, 3, 4]
        saved = train.saved()
        await one.put(admitted[1], admitted[2])
        await until(lambda: train.buffer.stats().groups_ready == 2, "they are on disk")
        await train.killed()
        await one.killed()
        later = Train(tmp_path, saved)
        own = Explorer(tmp_path, "own", own=own_tasks("o"))
        later.running = asyncio.create_task(later.host.run())
        asked = asyncio.create_task(own.admit(1))
        await until(lambda: later.buffer._slot_requests, "its own tasks are asked for first")
        await later.publish()
        (mine,) = await asked
        again = Explorer(tmp_path, "b")
        made = [*await again.admit(2), *await again.admit(1)]
        assert later.buffer.stats().groups_ready == 2, "both that were kept are used"
        assert [a.task.task_id for a in made] == ["task-0", "task-3", "task-4"]
        await own.put(mine)
        await again.put(*made)
        await until(lambda: later.buffer.stats().groups_ready == 6, "all have arrived")
        trained = await later.step()
        assert len({g.group_id for g in trained}) == P
        index = [(s.of, s.state) for s in later.store.read() if s.state == TRAINED]
        assert len(index) == P
        assert len({of for of, _ in index}) == P
        for job in (own, again, later):
            await job.killed()

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_each_own_task_is_trained_once_and_in_the_end_none_is_left_out(tmp_path: Path, seed: int) -> None:
    """Explorers and the train job are killed at random; the train job goes on from its last checkpoint."""
    rng = random.Random(seed)

    async def scenario() -> None:
        train = Train(tmp_path, now=time.monotonic, silent_s=1.0)
        await train.begin()
        saved, trained_at_saved = train.saved(), 0
        trained: list[tuple[str, int]] = []
        explorers: dict[str, tuple[Explorer, asyncio.Task[None]]] = {}

        def start(name: str) -> None:
            explorer = Explorer(tmp_path, name, own=own_tasks(name) if name != "t" else None)
            explorers[name] = explorer, asyncio.create_task(explorer.work())

        async def stop(name: str) -> None:
            explorer, working = explorers.pop(name)
            working.cancel()
            await explorer.killed()

        for name in "abt":
            start(name)
        for _ in range(20):
            assert train.running is not None
            stepping = asyncio.create_task(train.step())
            going_on = {train.running, *(working for _, working in explorers.values())}
            await asyncio.wait({stepping, *going_on}, return_when=asyncio.FIRST_COMPLETED)
            for task in going_on:
                if task.done():
                    task.result()
            for group in await stepping:
                trained.append((group.task_id, train.version))
            if rng.random() < 0.3:
                saved, trained_at_saved = train.saved(), len(trained)
            if rng.random() < 0.2 and len(explorers) > 1:
                await stop(rng.choice(list(explorers)))
            if rng.random() < 0.3:
                for name in set("abt") - explorers.keys():
                    start(name)
            if rng.random() < 0.1:
                await train.killed()
                del trained[trained_at_saved:]
                for name in list(explorers):  # as their stages do when the weights are others
                    await stop(name)
                train = Train(tmp_path, saved, now=time.monotonic, silent_s=1.0)
                await train.begin()
                for name in "abt":
                    start(name)
        ids = [task_id for task_id, _ in trained]
        assert len(ids) == len(set(ids)), "a task was trained on twice"
        for name in ("a", "b", "task"):
            own = sorted(int(task_id.split("-")[1]) for task_id in ids if task_id.startswith(f"{name}-"))
            missing = set(range(own[-1])) - set(own)
            assert len(missing) <= 4 * P, f"tasks of {name} were lost: {sorted(missing)}"

    play(scenario)


def given(version: int, *, oldest: int | None = None, size: int = 2) -> Group:
    versions = [version] * (size - 1) + [version if oldest is None else oldest]
    return Group.of(
        group_id=0, task_id="said", trajectories=[fakes.trajectory(float(i), v) for i, v in enumerate(versions)]
    )


@pytest.mark.slow
def test_what_clients_commit_is_trained_on_once_within_the_bound_and_nothing_of_it_is_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        clients = Explorer(tmp_path, "serve", clients=True)

        async def give(group: Group, commit: str) -> dict[str, Any]:
            return await clients.link.give(group, commit=commit, prompt="p", within_s=LIMIT_S)

        trained: list[Group] = []
        number = itertools.count()
        while len(trained) < 5 * P:
            for _ in range(P):
                assert await give(given(train.version), f"commit {next(number)}") == {"taken": True}
            trained += await train.step()
            newest = train.version
            await until(lambda newest=newest: clients.link._train.get("published") == newest, "it has heard of it")
            if newest >= 2:
                too_old = await give(given(newest, oldest=newest - 2), f"old {newest}")
                assert too_old == {"needs": newest - 1, "oldest": newest - 2, "published": newest}
        assert await give(given(train.version), "commit 3") == {"taken": True}, "a new name: it was answered before"
        room = 0
        while (answer := await give(given(train.version), f"more {room}")) == {"taken": True}:
            room += 1
        assert answer == {"needs": train.version + 1, "oldest": train.version, "published": train.version}, "full"
        assert room == 2 * P - 1, "as far as the bound goes, 1 in this run"
        with pytest.raises(RuntimeError, match="got 3 trajectories, expected 2"):
            await give(given(train.version, size=3), "three")
        with pytest.raises(RuntimeError, match="got tokens of versions 7 to 7, expected 0 to 5"):
            await give(given(7), "of tomorrow")
        assert train.store.count(TRAINED) == 5 * P
        assert [g.group_id for g in trained] == list(range(5 * P))
        assert train.host.metrics()["explorers/serve/groups"] == 5 * P + 2 * P
        assert not train.host.somebody_generates, "nobody has to commit anything"
        for job in (clients, train):
            await job.killed()

    play(scenario)


def test_a_commit_that_the_killed_train_job_has_stored_and_not_acknowledged_is_trained_on_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        clients = Explorer(tmp_path, "serve", clients=True)
        assert (await clients.link.give(given(0), commit="first", prompt="p", within_s=LIMIT_S))["taken"]
        saved = train.saved()

        real = train.buffer.give

        def killed_here(*args: Any, **kwargs: Any) -> int:
            real(*args, **kwargs)
            assert train.running is not None
            train.running.cancel()
            raise asyncio.CancelledError

        train.buffer.give = killed_here  # type: ignore[method-assign]
        second = asyncio.create_task(clients.link.give(given(0), commit="second", prompt="p", within_s=LIMIT_S))
        assert train.running is not None
        await asyncio.wait({train.running}, timeout=LIMIT_S)
        await train.killed()
        later = Train(tmp_path, saved)
        await later.begin()
        assert await second == {"taken": True}, "by the next life"
        assert (await clients.link.give(given(0), commit="third", prompt="p", within_s=LIMIT_S)) == {"taken": True}
        assert (await clients.link.give(given(0), commit="fourth", prompt="p", within_s=LIMIT_S)) == {"taken": True}
        assert len(await later.step()) == P
        assert later.buffer.stats().admitted == P, "first and second were kept, and come once"
        for job in (clients, later):
            await job.killed()

    play(scenario)


def test_without_any_explorer_the_wait_ends_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        train.host._wait_s = 3600.0
        await train.begin()
        assert train.running is not None
        train.clock.seconds += 3599.0
        one = Explorer(tmp_path, "a")
        assert await one.admit(1)
        await one.killed()
        await train.loses("a")
        train.clock.seconds += 3599.0
        await asyncio.wait({train.running}, timeout=0.2)
        assert not train.running.done(), "counted from when the last one was here"
        train.clock.seconds += 2.0
        with pytest.raises(TimeoutError, match=r"no explorer was here for 3600 s \(explorer\.wait_s\)"):
            await train.running

    play(scenario)


def test_a_train_job_that_never_comes_back_ends_the_explorer_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        alone = TrainLink(Meeting(tmp_path), "a", silent_s=30.0, wait_s=3600.0, now=clock)
        running = asyncio.create_task(alone.run())
        await until(lambda: alone._beats._last is not None, "it has looked")
        clock.seconds += 3599.0
        await asyncio.wait({running}, timeout=0.2)
        assert not running.done()
        clock.seconds += 2.0
        with pytest.raises(PartFailed, match=r"the train job was not there for 3600 s \(explorer\.wait_s\)"):
            await running

    play(scenario)


@pytest.mark.parametrize("first", ["explore", "train"])
def test_jobs_that_start_an_hour_apart_work_together_and_an_hour_of_silence_costs_no_group(
    tmp_path: Path, first: str
) -> None:
    async def scenario() -> None:
        clock = Clock()
        one = Explorer(tmp_path, "a", silent_s=30.0, wait_s=4000.0, now=clock) if first == "explore" else None
        train = None
        if one is None:
            train = Train(tmp_path, now=clock, silent_s=30.0)
            await train.begin()
        await asyncio.sleep(0.1)
        clock.seconds += 3600.0
        if train is None:
            train = Train(tmp_path, now=clock, silent_s=30.0)
            await train.begin()
        one = one or Explorer(tmp_path, "a", silent_s=30.0, wait_s=4000.0, now=clock)
        admitted = [await one.admit(2), await one.admit(2)]
        saved, version = train.saved(), train.version
        await train.killed()
        await one.put(*admitted[0])
        await until(lambda: one.link._train.get("beat") == train.host._beat, "the last sign of the train job was seen")
        clock.seconds += 3600.0
        await until(lambda: one.link._is_gone, "it is missed")
        await one.put(*admitted[1])
        later = Train(tmp_path, saved, now=clock, silent_s=30.0)
        await later.begin()
        assert (await one.admit(1))[0].group_id == P, "nothing that was finished is made again"
        assert [g.group_id for g in await later.step()] == list(range(P))
        assert later.version == version + 1
        for job in (one, later):
            await job.killed()

    play(scenario)


def test_a_second_train_job_in_the_folder_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    about = {"state": "up", "beat": 1, "pid": 17, "host": socket.gethostname()}
    with claimed(meeting, "explorer.folder"):
        write_json(meeting.train, about)
        before = sorted(tmp_path.iterdir())
        said = r"explorer\.folder: got .*, where a train job is running \(process 17 on"
        with pytest.raises(Refused, match=said), claimed(meeting, "explorer.folder"):
            raise AssertionError("not reached")
        assert sorted(tmp_path.iterdir()) == before
    with claimed(meeting, "explorer.folder"):
        pass  # it was killed, and left its sign


def test_a_train_job_of_another_host_is_known_by_its_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, beats = Meeting(tmp_path), itertools.count()

    def beating(path: Path) -> dict[str, Any]:
        return {"state": "up", "beat": next(beats), "host": "elsewhere"}

    write_json(meeting.train, beating(meeting.train))
    monkeypatch.setattr(folder, "ALIVE_S", 0.05)
    with claimed(meeting, "explorer.folder"):
        pass  # silent
    monkeypatch.setattr(folder, "read_json", beating)
    monkeypatch.setattr(folder, "ALIVE_S", LIMIT_S)
    with pytest.raises(Refused, match="on elsewhere"), claimed(meeting, "explorer.folder"):
        raise AssertionError("not reached")


@pytest.mark.slow
def test_one_whose_groups_all_fail_is_sent_away_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        bad, good = Explorer(tmp_path, "bad"), Explorer(tmp_path, "good")
        for _ in range(MOST_FAILED):
            (admission,) = await bad.admit(1)
            await bad.link.fail(admission.group_id, "no env", admission.attempt)
        with pytest.raises(RuntimeError, match=r"bad was sent away: 20 groups in a row have failed, the last: no env"):
            await bad.admit(1)
        assert any("bad is gone: 20 groups in a row have failed" in said for said in train.host.sayings())
        for _ in range(2):  # and it does not come back by itself
            admitted = [await good.admit(2), await good.admit(2)]
            await good.put(*admitted[0], *admitted[1], version=train.version)
            assert len(await train.step()) == P
        assert train.buffer.stats().failed == MOST_FAILED
        for job in (bad, good, train):
            await job.killed()

    play(scenario)


def test_one_that_holds_groups_and_tells_nothing_of_them_is_sent_away_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path, silent_s=1e6)
        train.host._timeout_s = 200.0
        await train.begin()
        hoards, good = Explorer(tmp_path, "hoards"), Explorer(tmp_path, "good")
        held = await hoards.admit(2)
        train.clock.seconds += 90.0
        await until(lambda: train.host._explorers["hoards"].held_s == 90.0, "90 s have passed")
        await hoards.put(held[0])
        await until(lambda: train.buffer.has(held[0].group_id), "it has delivered")
        assert train.host._explorers["hoards"].held_s == 0.0
        train.clock.seconds += 101.0
        await until(lambda: not train.host._explorers["hoards"].is_here, "it is sent away")
        (said,) = [said for said in train.host.sayings() if "is gone" in said]
        assert "hoards is gone: it holds 1 groups, and has told nothing of them for 101 s" in said
        with pytest.raises(RuntimeError, match="hoards was sent away"):
            await hoards.admit(1)
        again = await good.admit(3)
        assert again[0].group_id == held[1].group_id, "it is issued to others"
        await good.put(*again)
        assert len(await train.step()) == P
        for job in (hoards, good, train):
            await job.killed()

    play(scenario)


def test_one_that_is_gone_is_logged_once_more_and_then_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        one = Explorer(tmp_path, "a")
        await one.put(*await one.admit(2))
        await until(lambda: train.buffer.stats().groups_ready == 2, "they have arrived")
        await one.killed()
        await train.loses("a")
        assert train.host.metrics() == {"explorers/present": 0.0, "explorers/a/groups": 2.0}
        assert train.host.metrics() == {"explorers/present": 0.0}
        await train.killed()

    play(scenario)


def test_engines_whose_groups_wait_for_a_version_that_may_never_come_again_start_again(tmp_path: Path) -> None:
    """Else they would fill the collector, which then asks for no other groups."""

    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        saved = train.saved()
        explorer = Explorer(tmp_path, "a")
        await explorer.put(*await explorer.admit(4))
        await train.step()
        held = await explorer.admit(8)
        assert held[-1].min_policy_version == 1 > explorer.link.newest_pulled
        await train.killed()
        train = Train(tmp_path, saved)
        await train.begin()
        await until(lambda: explorer.link.must_start_again, "a group waits for version 1, and the run is at 0 again")

    play(scenario)


# -------------------------------------------------------------------------------------------------------- evaluation

HELD_OUT = [Task(task_id=f"held-out-{i}", prompt="p") for i in range(8)]
Score = Callable[[int], Any]


def evaluating(train: Train, version: int = 0) -> asyncio.Task[Any]:
    sampling = EvalSampling(temperature=0.5, max_tokens=7)
    return asyncio.create_task(train.host.evaluate(HELD_OUT, sampling, version))


async def share(explorer: Explorer) -> dict[str, Any]:
    found = await asyncio.wait_for(explorer.link.evaluation(), LIMIT_S)
    assert found is not None
    return found


async def answer(explorer: Explorer, found: dict[str, Any], score: Score, why: str = "") -> None:
    numbers = {index: int(task["task_id"].rpartition("-")[2]) for index, task in found["tasks"].items()}
    answers = {index: own for index, number in numbers.items() if (own := score(number)) is not None}
    await explorer.link.evaluated(found["session"], found["number"], answers, why)


def answering(explorer: Explorer, score: Score, why: str = "") -> asyncio.Task[None]:
    async def always() -> None:
        while True:
            await answer(explorer, await share(explorer), score, why)

    return asyncio.create_task(always())


def right(number: int) -> list[Any]:
    return [[float(number), 3, {"exact_match": 1.0}]]


def test_held_out_tasks_are_shared_out_and_those_of_a_lost_explorer_go_to_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        one, other = Explorer(tmp_path, "a"), Explorer(tmp_path, "b")
        taking = [asyncio.create_task(share(explorer)) for explorer in (one, other)]
        await until(lambda: sum(e.evaluates for e in train.host._explorers.values()) == 2, "both can answer")
        result = evaluating(train, version=3)
        lost, kept = await asyncio.gather(*taking)
        sampling = {"samples": 1, "temperature": 0.5, "top_p": 1.0, "max_tokens": 7}
        assert (kept["policy_version"], kept["sampling"]) == (3, sampling)
        assert min(len(lost["tasks"]), len(kept["tasks"])) >= 2
        assert not lost["tasks"].keys() & kept["tasks"].keys(), "each task is with one of them"
        assert [a.group_id for a in await other.admit(2)] == [0, 1], "groups go on"
        await answer(other, kept, right)
        works = answering(other, right)
        await one.killed()
        await train.loses("a")
        answers = await asyncio.wait_for(result, LIMIT_S)
        assert [(own.reward, own.num_tokens) for (own,) in answers] == [(float(i), 3) for i in range(8)], "in order"
        assert train.buffer.stats().groups_ready == 0, "none of it is a group"
        again = evaluating(train, version=4)
        one.running = asyncio.create_task(one.link.run())  # it goes on, with what is not its own any more
        await answer(one, lost, lambda number: [[-1.0, 0, {}]])
        assert [own.reward for (own,) in await asyncio.wait_for(again, LIMIT_S)] == [float(i) for i in range(8)]
        works.cancel()
        for job in (one, other, train):
            await job.killed()

    play(scenario)


def test_answers_for_a_life_of_the_train_job_that_is_over_are_not_wanted_any_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        saved, explorer = train.saved(), Explorer(tmp_path, "a")
        result = evaluating(train)
        found = await share(explorer)
        assert await explorer.link.evaluating(found["session"], moved=True)
        await train.killed()
        result.cancel()
        assert await explorer.link.evaluating(found["session"], moved=False), "it may be back, and want them"
        train = Train(tmp_path, saved)
        await train.begin()
        async with asyncio.timeout(LIMIT_S):
            while await explorer.link.evaluating(found["session"], moved=False):
                await asyncio.sleep(0.005)

    play(scenario)


def test_an_answer_counts_if_its_explorer_was_asked_in_this_evaluation() -> None:
    async def scenario() -> None:
        evaluations = Evaluations()
        here: dict[str, Any] = {"num_holders": lambda: 2, "is_here": lambda: True}
        for number in (1, 2):
            asking = asyncio.create_task(evaluations.ask(HELD_OUT[:2], EvalSampling(), policy_version=number))
            first, second = await evaluations.take("a", **here), await evaluations.take("b", **here)
            assert first is not None
            assert second is not None
            assert ([*first["tasks"]], [*second["tasks"]]) == ([0], [1])
            both = {"0": right(5), "1": right(6)}
            assert await evaluations.answer("a", number - 1, both) == 0, "of the evaluation before"
            assert await evaluations.answer("b", number, both) == 1, "one of these is its own"
            assert await evaluations.answer("b", number, both) == 0
            assert not asking.done()
            assert await evaluations.answer("a", number, both) == 1
            assert [own[0].reward for own in await asking if not isinstance(own, str)] == [5.0, 6.0]
            assert not evaluations.is_under_way

    play(scenario)


@pytest.mark.parametrize(
    "wrong",
    [[[float("nan"), 3, {}]], [[1.0, 3, {}], [1.0, 3, {}]], [[1.0, -3, {}]], [[1.0, 3, {"m": "x"}]], [], 5, [[1.0]]],
)
def test_what_is_no_answer_to_a_held_out_task_is_not_taken_and_another_explorer_is_asked(
    tmp_path: Path, wrong: Any
) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        bad, good = Explorer(tmp_path, "bad"), Explorer(tmp_path, "good")
        result = evaluating(train)
        await answer(bad, await share(bad), lambda number: right(number) if number else wrong)
        works = answering(good, right)
        assert [own.reward for (own,) in await asyncio.wait_for(result, LIMIT_S)] == [float(i) for i in range(8)]
        works.cancel()
        for job in (bad, good, train):
            await job.killed()

    play(scenario)


@pytest.mark.slow
def test_one_that_answers_no_held_out_task_is_sent_away_by_name_and_a_task_that_failed_has_a_reason(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        bad, good = Explorer(tmp_path, "bad"), Explorer(tmp_path, "good")
        result = evaluating(train)
        works = answering(bad, lambda number: None, "OSError: no env")
        with pytest.raises(RuntimeError, match=r"bad was sent away: 20 times .* no held-out task, the last: OSError"):
            await asyncio.wait_for(works, LIMIT_S)
        assert not result.done()
        works = answering(good, lambda number: right(number) if number else "no tool")
        answers = await asyncio.wait_for(result, LIMIT_S)
        assert answers[0] == "no tool"
        assert [own.reward for (own,) in answers[1:]] == [float(i) for i in range(1, 8)]
        works.cancel()
        for job in (bad, good, train):
            await job.killed()

    play(scenario)


def test_without_an_explorer_of_its_own_tasks_the_train_job_goes_on_unevaluated(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path)
        await train.begin()
        result = evaluating(train)
        train.clock.seconds += 1000.0
        await asyncio.sleep(0.1)
        assert not result.done(), "nobody is here yet"
        other = Explorer(tmp_path, "other", own=own_tasks("other"))
        assert await asyncio.wait_for(other.link.evaluation(), LIMIT_S) is None, "it is not asked"
        await until(lambda: train.host.num_explorers == 1, "it has joined")
        await asyncio.sleep(0.1)
        assert not result.done(), "one that can may come"
        while not result.done():
            train.clock.seconds += 1.0
            await asyncio.sleep(0.05)
        assert result.result() is None
        for job in (other, train):
            await job.killed()

    play(scenario)


def test_a_held_out_task_that_nobody_answers_has_a_deadline_and_engines_that_start_have_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path, silent_s=1e6)
        train.host._timeout_s = 200.0
        await train.begin()
        one = Explorer(tmp_path, "a")
        await until(lambda: train.host.num_explorers == 1, "it has joined")
        result = evaluating(train)
        for _ in range(4):
            train.clock.seconds += 150.0
            await until(lambda: train.host._looked_at == train.host._now(), "the host has seen the time pass")
        assert not result.done(), "its engines start"
        found = await share(one)
        for _ in range(2):  # it tells of its work before half of that time is over, or it would be sent away
            train.clock.seconds += 90.0
            await until(lambda: train.host._explorers["a"].held_s == 90.0, "90 s have passed")
            assert await one.link.evaluating(found["session"], moved=True)
            await until(lambda: train.host._explorers["a"].held_s == 0.0, "it gets on")
        train.clock.seconds += 30.0
        with pytest.raises(TimeoutError, match=r"no explorer answered a held-out task for 200 s; raise cluster\.step"):
            await result
        await until(lambda: not train.host._explorers["a"].is_here or not train.host._evaluations.is_under_way, "over")
        for job in (one, train):
            await job.killed()

    play(scenario)


def test_one_that_keeps_held_out_tasks_and_tells_nothing_is_sent_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        train = Train(tmp_path, silent_s=1e6)
        train.host._timeout_s = 200.0
        await train.begin()
        hoards, good = Explorer(tmp_path, "hoards"), Explorer(tmp_path, "good")
        result = evaluating(train)
        await share(hoards)
        held = await good.admit(1)  # it waits for the next version, which comes after the evaluation
        works = answering(good, right)
        train.clock.seconds += 101.0
        answers = await asyncio.wait_for(result, LIMIT_S)
        assert [own.reward for (own,) in answers] == [float(i) for i in range(8)]
        (said,) = [said for said in train.host.sayings() if "is gone" in said]
        assert "hoards is gone: it holds 8 held-out tasks, and has told nothing of them for 101 s" in said
        assert held
        works.cancel()
        for job in (hoards, good, train):
            await job.killed()

    play(scenario)


# ---------------------------------------------------------------------------------------------------------- settings


def test_settings_that_both_must_share_are_refused_with_the_difference() -> None:
    (*_, train) = plan_run("quickstart", "train")
    theirs = json.loads(json.dumps(must_be_equal(train.config)))
    (explore,) = plan_run("quickstart", "explore", ["explorer.name=a", "rollout.num_generators=2"])
    check_fit(explore.config, theirs)
    (other,) = plan_run("quickstart", "explore", ["rollout.temperature=0.7"])
    with pytest.raises(ConfigError, match=r"rollout\.temperature: got 0\.7, expected 1\.0 as in the train job"):
        check_fit(other.config, theirs)
    (other,) = plan_run("quickstart", "explore", ["param_server.publish_every=2"])
    with pytest.raises(ConfigError, match=r"publish_every: got 2, expected null as in the train job"):
        check_fit(other.config, theirs)
    for own in ("rollout.pull_every=1", "staleness.target_policy_lag=2"):  # each job's own
        (other,) = plan_run("quickstart", "explore", [own])
        check_fit(other.config, theirs)


def test_jobs_that_serve_adapters_agree_on_how_often_one_is_published() -> None:
    lora = ["model.lora.rank=8", "rollout.engine.name=hf"]
    (*_, train) = plan_run("quickstart", "train", lora)
    (other,) = plan_run("quickstart", "explore", [*lora, "rollout.pull_every=1"])
    with pytest.raises(ConfigError, match=r"publish_every: got 1, expected 2 .* set param_server\.publish_every=2"):
        check_fit(other.config, must_be_equal(train.config))


def test_the_halves_of_a_run_meet_in_its_folder_and_each_has_its_own() -> None:
    *before, train = plan_run("quickstart", "train", ["output_dir=/tmp/o"])
    (explore,) = plan_run("quickstart", "explore", ["output_dir=/tmp/o", "explorer.name=a"])
    assert [stage.name for stage in before] == ["sft"], "what comes before is the train job's"
    assert train.config.meeting_folder == explore.config.meeting_folder == Path("/tmp/o/leeway/quickstart/meeting")
    assert explore.config.run_dir == Path("/tmp/o/leeway/quickstart/explorers/a")
    assert train.config.run_dir == Path("/tmp/o/leeway/quickstart")
    assert train.config.param_server.transport == explore.config.param_server.transport == "files"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("param_server.transport=broadcast", "param_server.transport: got 'broadcast', expected files"),
        ("param_server.delta=true", "param_server.delta: got True, expected false"),
        ("rollout.pull=oldest", "rollout.pull: got 'oldest', expected newest"),
        ("cluster.placement=turns", "cluster.placement: got 'turns', expected separate"),
        ("cluster.step_timeout_s=1200", "expected more than 2 * rollout.timeout_s = 1200: an explorer is sent away"),
    ],
)
@pytest.mark.parametrize("recipe", ["train", "explore"])
def test_what_two_jobs_cannot_do_is_refused(recipe: str, setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_run("quickstart", recipe, [setting])
    assert said in str(error.value)


def test_calls_says_how_often_it_looks() -> None:
    assert calls.SOON_S < calls.LATER_S <= 0.1, "a call and its answer take less than a fifth of a second"


def test_an_explorers_finished_groups_are_put_before_more_are_asked_for_and_keep_nobody_waiting():
    class Link:
        def __init__(self) -> None:
            self.calls: list[Any] = []
            self.arrived = asyncio.Event()

        async def put(self, groups: Sequence[Any]) -> None:
            self.calls.append(("put", list(groups)))
            await self.arrived.wait()

        async def admit(self, limit: int, collector: str) -> list[int]:
            self.calls.append(("admit", limit))
            self.arrived.set()  # the answer does not wait for the groups
            return [7]

    async def scenario() -> None:
        actor = object.__new__(TrainLinkActor)
        actor.role, actor._link = "link", cast("Any", link := Link())
        assert await actor.admit(3, 60.0, "generator-0", cast("Any", ["group"])) == [7]
        assert link.calls == [("put", ["group"]), ("admit", 3)]
        assert await actor.admit(2, 60.0, "generator-0") == [7]
        assert link.calls[2:] == [("admit", 2)]

    asyncio.run(asyncio.wait_for(scenario(), 60))
