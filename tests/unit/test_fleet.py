"""Generators that join and leave while a run goes on: what they do all the time, and what becomes of what they hold."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config import load_config
from leeway.driver import control as control_module
from leeway.driver.control import Control
from leeway.driver.publishing import Publishing
from leeway.failures import PartFailed
from leeway.runtime import generators as generators_module
from leeway.runtime.fleet import Duty, Fleet, with_a_process
from leeway.runtime.generators import Generator, Made, Restarts
from leeway.runtime.parts_files import PARTS, SCALE, Wanted, read_json, read_wanted
from leeway.runtime.supervisor import Supervisor

from .virtual_clock import VirtualClock

NOTHING: Any = None


class Worker:
    """An actor's handle: pulls until it ends, and collects until it is retired and has finished what it holds."""

    def __init__(self, world: World, name: str, instead: Any) -> None:
        self.world, self.name, self.instead, self.killed = world, name, instead, False
        self.held, self.proven = 2, -1
        self.retired = asyncio.Event()

    async def pull(self) -> None:
        await asyncio.Event().wait()

    async def collect(self) -> str:
        await self.retired.wait()
        await asyncio.sleep(5)
        self.held = 0
        return self.name

    async def evaluate(self) -> str:
        await asyncio.sleep(20)
        return self.name

    @property
    def until_verified(self) -> Any:
        async def answer(version: int) -> None:
            await asyncio.sleep(7)
            self.proven = version

        return SimpleNamespace(remote=answer)

    @property
    def state(self) -> Any:
        async def answer() -> dict[str, int]:
            return {"policy_version": 3, "groups": self.held}

        return SimpleNamespace(remote=answer)


def watch_that_tells(failures: list[PartFailed]) -> Any:
    """A `RunWatch` of a run whose failures are noted: each would end it."""
    nothing: Any = lambda *_, **__: None  # noqa: E731
    return SimpleNamespace(
        until_broken=asyncio.Event().wait,
        failed=failures.append,
        add=nothing,
        kill=nothing,
        forget_parts=nothing,
        evidence=list,
    )


class World:
    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.failures: list[PartFailed] = []
        self.supervisor = Supervisor(watch_that_tells(self.failures))
        self.issued_again: list[str] = []
        self.refuses = False
        self.has_room = True
        self.restarts = Restarts(
            allowed=3, backoff_s=1.0, start_timeout_s=30.0, tell=lambda text: None, lost=self._lost
        )
        self.fleet = Fleet(self._make, start=self._begin, retire=self._retire, supervisor=self.supervisor)

    def _make(self, index: int) -> Generator:
        async def launch(placed: Callable[[], None], made: Made, instead: Any) -> str:
            while not self.has_room:
                await asyncio.sleep(1)
            placed()
            if self.refuses:
                raise ValueError("no memory")
            name = f"generator-{index}/{len(self.workers)}"
            made(worker := Worker(self, name, instead), lambda: None)
            self.workers[name] = worker
            return name

        return Generator(f"generator-{index}", launch, supervisor=self.supervisor, restarts=self.restarts)

    async def _begin(self, generator: Generator) -> None:
        await self.supervisor.wait(generator.start(), what=generator.role, timeout_s=30)

    async def _lost(self, name: str, cause: str) -> int:
        self.issued_again.append(name)
        return self.workers[name].held

    async def _retire(self, name: str) -> None:
        self.workers[name].retired.set()


def play(scenario: Callable[[World, Duty], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def kill(actor: Worker, role: str) -> None:
        actor.killed = True

    monkeypatch.setattr(generators_module, "_kill", kill)

    async def main() -> None:
        world = World()
        await world.fleet.begin(2)
        world.fleet.always(lambda actor: actor.pull())
        collecting = world.fleet.always(lambda actor: actor.collect(), drains=True)
        try:
            async with asyncio.timeout(1000):
                await scenario(world, collecting)
        finally:
            world.supervisor.forget_all()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())


def roles(world: World) -> list[str]:
    return [generator.role for generator in world.fleet]


def test_one_that_leaves_finishes_what_it_holds_and_one_that_joins_does_what_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        now = asyncio.get_running_loop().time
        begun = now()
        assert await world.fleet.leave() == 0
        assert now() - begun == pytest.approx(5, abs=0.1)
        assert roles(world) == ["generator-0"]
        assert [worker.killed for worker in world.workers.values()] == [False, True]
        await world.fleet.join()
        assert roles(world) == ["generator-0", "generator-1"]
        for worker in world.workers.values():
            worker.retired.set()
        await collecting.ended()
        assert now() - begun == pytest.approx(10, abs=0.1), "the new one collected too"
        assert await world.supervisor.wait(asyncio.sleep(1, "all is well"), what="replay", timeout_s=9)

    play(scenario, monkeypatch)


def test_what_one_holds_that_leaves_at_once_is_issued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        assert await world.fleet.leave(at_once=True) == 2
        assert world.issued_again == ["generator-1/1"]
        world.workers["generator-0/0"].retired.set()
        await collecting.ended()

    play(scenario, monkeypatch)


def test_one_does_not_leave_before_it_has_answered_who_asked_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        asking = asyncio.ensure_future(world.fleet[1].call(lambda actor: actor.evaluate()))
        await asyncio.sleep(1)
        await world.fleet.leave(at_once=True)
        assert asking.done()
        assert asking.result() == "generator-1/1"

    play(scenario, monkeypatch)


def test_one_that_dies_while_it_leaves_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        leaving = asyncio.ensure_future(world.fleet.leave())
        await asyncio.sleep(1)
        world.workers["generator-1/1"].instead(PartFailed("generator-1", "the process died"))
        assert await leaving == 2
        assert len(world.workers) == 2
        assert world.restarts.left == 3

    play(scenario, monkeypatch)


@pytest.mark.parametrize("is_lost_late", [False, True])
def test_the_end_of_a_run_does_not_wait_for_one_that_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, is_lost_late: bool
) -> None:
    """Its machine is gone, and may never be back."""

    async def scenario(world: World, collecting: Duty) -> None:
        now = asyncio.get_running_loop().time
        world.has_room = False
        lose = functools.partial(
            world.workers["generator-1/1"].instead, PartFailed("generator-1", "its machine is gone")
        )
        if not is_lost_late:
            lose()
            await asyncio.sleep(1)
        begun = now()
        world.workers["generator-0/0"].retired.set()
        if is_lost_late:
            asyncio.get_running_loop().call_later(9, lose)
        await collecting.wound_up()
        assert now() - begun == pytest.approx(9 if is_lost_late else 5, abs=0.1)
        assert await with_a_process(world.fleet) == [world.fleet[0]]
        parts: Any = SimpleNamespace(generators=world.fleet, supervisor=world.supervisor)
        config = load_config("quickstart", [])
        publishing = Publishing(config, parts, report=NOTHING, keep=NOTHING, uploads=NOTHING)
        await publishing.wait_engines_at(4)
        assert world.workers["generator-0/0"].proven == 4

    play(scenario, monkeypatch)


def test_a_successor_of_one_run_is_not_asked_for_that_runs_duties_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a study, whose runs have the same generators one after the other."""

    async def scenario(world: World, collecting: Duty) -> None:
        asked: list[tuple[str, str]] = []

        def notes(what: str) -> Callable[[Worker], Awaitable[None]]:
            async def note(worker: Worker) -> None:
                asked.append((what, worker.name))
                await worker.pull()

            return note

        world.fleet.always(notes("first run's"))
        asked.clear()
        first, second = world.workers.values()
        world.has_room = False
        second.instead(PartFailed("generator-1", "it died"))
        first.retired.set()
        await collecting.wound_up()
        world.has_room = True
        finishing = asyncio.ensure_future(world.fleet.finish())
        await asyncio.sleep(2)
        [successor] = [w for w in world.workers.values() if w not in (first, second)]
        successor.retired.set()  # the buffer is closed
        await finishing
        assert (successor.proven, successor.held) == (0, 0), "it waited for its proof, and it gets no more groups"
        asked.clear()
        world.fleet.always(notes("second run's"))
        await asyncio.sleep(1)
        successor.instead(PartFailed("generator-1", "it died again"))
        await asyncio.sleep(30)
        newest = [*world.workers][-1]
        names = ("generator-0/0", successor.name, newest)
        assert asked == [("second run's", name) for name in names]
        assert world.failures == []

    play(scenario, monkeypatch)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_the_next_run_does_not_wait_for_ever_for_one_that_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        world.restarts.left = 3 if is_replaced else 0
        world.workers["generator-1/1"].instead(PartFailed("generator-1", "it died"))
        waiting = world.supervisor.wait(world.fleet[1].until_replaced(), what="generators", timeout_s=100)
        if is_replaced:
            await waiting
        else:
            with pytest.raises(PartFailed, match="it died; all 3 restarts are used up"):
                await waiting

    play(scenario, monkeypatch)


def test_what_needs_one_generator_waits_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        for worker in [*world.workers.values()]:
            worker.instead(PartFailed("generator", "it died"))
        waiting = asyncio.ensure_future(with_a_process(world.fleet))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert len(await waiting) >= 1

    play(scenario, monkeypatch)


def test_what_is_wanted_is_read_followed_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = load_config("quickstart", ["monitor.console=off"])
    monkeypatch.setattr(control_module, "say", lambda text: None)
    monkeypatch.setattr(control_module.asyncio, "to_thread", lambda function, *args: asyncio.sleep(0, function(*args)))

    async def scenario(world: World, collecting: Duty) -> None:
        processes = {"trainer-0": {"node": "here", "pid": 7}, "generator-0": {"node": "here", "pid": 8}}
        parts: Any = SimpleNamespace(generators=world.fleet, restarts=world.restarts, processes=processes)
        control = Control(config, parts, tmp_path, stage="rl", version=lambda: 5)
        control.allow_changes()
        (tmp_path / SCALE).write_text('{"generators": 9}')  # of an earlier part
        running = asyncio.ensure_future(control.run())
        await asyncio.sleep(5)
        assert roles(world) == ["generator-0", "generator-1"]
        for number, says in ((3, "generator-2 has joined"), (1, "generator-1 has left; 0 groups were issued again")):
            (tmp_path / SCALE).write_text(json.dumps({"generators": number}))
            await asyncio.sleep(30)
            assert len(world.fleet) == number
            seen = read_json(tmp_path / PARTS)
            assert (seen["generators"], seen["said"]) == (number, says)
            assert not (tmp_path / SCALE).exists()
        assert seen["parts"] == [
            {"role": "generator-0", "host": "here", "pid": 8, "state": "serves", "policy_version": 3, "groups": 2},
            {"role": "trainer-0", "host": "here", "pid": 7, "state": "up", "policy_version": 5},
        ]
        assert seen["answered"] == {"id": "", "refusal": ""}
        world.refuses = True
        (tmp_path / SCALE).write_text('{"generators": 2}')
        await asyncio.sleep(30)
        assert not running.done(), "the run goes on with those that it has"
        said = read_json(tmp_path / PARTS)["said"]
        assert said == "warning: there are 1 generators, not 2: generator-1: ValueError: no memory"
        assert world.failures == [], "the run has not failed, and nothing counts down to its end"
        running.cancel()

    play(scenario, monkeypatch)


def test_a_mistake_of_ours_while_the_number_changes_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(control_module, "say", lambda text: None)
    monkeypatch.setattr(control_module.asyncio, "to_thread", lambda function, *args: asyncio.sleep(0, function(*args)))

    async def scenario(world: World, collecting: Duty) -> None:
        parts: Any = SimpleNamespace(generators=world.fleet, restarts=world.restarts, processes={})
        control = Control(load_config("quickstart", []), parts, tmp_path, stage="rl", version=lambda: 5)
        control.allow_changes()
        monkeypatch.setattr(world.fleet, "leave", lambda **_: 1 / 0)
        running = asyncio.ensure_future(control.run())
        await asyncio.sleep(3)
        (tmp_path / SCALE).write_text('{"generators": 1}')
        with pytest.raises(ZeroDivisionError):
            await running

    play(scenario, monkeypatch)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"generators": 0}', '{"generators": "2"}', '{"generators": true}', '{"generators": 1e9}']
)
def test_what_nobody_can_have_wanted_is_not_followed(tmp_path: Path, text: str) -> None:
    (tmp_path / SCALE).write_text(text)
    assert read_wanted(tmp_path / SCALE) is None
    assert read_wanted(tmp_path / "none") is None
    (tmp_path / SCALE).write_text('{"generators": 2, "at_once": true}')
    assert read_wanted(tmp_path / SCALE) == Wanted(2, at_once=True)


def controlled(
    world: World, folder: Path, *overrides: str, elsewhere: Any = None
) -> tuple[Control, asyncio.Future[None]]:
    config = load_config("quickstart", ["monitor.console=off", *overrides], recipe="async_rl")
    parts: Any = SimpleNamespace(generators=world.fleet, restarts=world.restarts, processes={})
    control = Control(config.of_half(elsewhere) if elsewhere else config, parts, folder, stage="rl", version=lambda: 5)
    control.allow_changes()
    return control, asyncio.ensure_future(control.run())


def asks(folder: Path, number: int, id: str = "mine") -> None:
    (folder / SCALE).write_text(json.dumps({"generators": number, "id": id}))


@pytest.fixture
def _says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "say", lambda text: None)
    monkeypatch.setattr(control_module.asyncio, "to_thread", lambda function, *args: asyncio.sleep(0, function(*args)))


@pytest.mark.usefixtures("_says_nothing")
def test_what_is_asked_for_when_the_stage_ends_is_answered_and_what_is_half_done_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        _, running = controlled(world, tmp_path)
        await asyncio.sleep(3)
        asks(tmp_path, 1, "first")
        await asyncio.sleep(2)  # one of them finishes what it holds
        assert read_json(tmp_path / PARTS)["answered"] == {"id": "first", "refusal": ""}
        asks(tmp_path, 4, "second")
        running.cancel()
        await asyncio.wait({running})
        seen = read_json(tmp_path / PARTS)
        assert seen["is_over"]
        assert seen["answered"] == {"id": "second", "refusal": "the stage is ending"}
        assert seen["said"].startswith("warning: 4 generators were asked for")
        assert not (tmp_path / SCALE).exists(), "the next stage does not follow it"

    play(scenario, monkeypatch)


@pytest.mark.usefixtures("_says_nothing")
def test_generators_that_did_not_start_before_the_end_are_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        _, running = controlled(world, tmp_path)
        await asyncio.sleep(3)
        asks(tmp_path, 1)
        await asyncio.sleep(2)
        running.cancel()
        await asyncio.wait({running})
        assert read_json(tmp_path / PARTS)["said"] == "the stage ends with 1 generators: 1 were not reached in time"

    play(scenario, monkeypatch)


@pytest.mark.usefixtures("_says_nothing")
@pytest.mark.parametrize(
    ("overrides", "elsewhere", "why"),
    [
        (["cluster.restarts=0"], None, "their number is fixed where cluster.restarts is 0"),
        ([], "generators", "a train job has none of its own: those of explorers are in RUN/explorers/NAME"),
    ],
)
def test_a_stage_whose_number_of_generators_is_fixed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], elsewhere: Any, why: str
) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        asks(tmp_path, 3, "before")
        _, running = controlled(world, tmp_path, *overrides, elsewhere=elsewhere)
        await asyncio.sleep(0.1)
        early = read_json(tmp_path / PARTS)["answered"]
        assert early == {"id": "before", "refusal": "that was before this stage; ask again"}
        asks(tmp_path, 3)
        await asyncio.sleep(5)
        assert read_json(tmp_path / PARTS)["answered"] == {"id": "mine", "refusal": why}
        assert len(world.fleet) == 2
        running.cancel()

    play(scenario, monkeypatch)


@pytest.mark.usefixtures("_says_nothing")
def test_while_a_stage_starts_its_parts_are_seen_and_their_number_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(world: World, collecting: Duty) -> None:
        parts: Any = SimpleNamespace(generators=world.fleet, restarts=world.restarts, processes={})
        control = Control(load_config("quickstart", []), parts, tmp_path, stage="rl", version=lambda: 5)
        running = asyncio.ensure_future(control.run())
        await asyncio.sleep(1)
        assert [row["role"] for row in read_json(tmp_path / PARTS)["parts"]] == ["generator-0", "generator-1"]
        asks(tmp_path, 3)
        await asyncio.sleep(3)
        assert read_json(tmp_path / PARTS)["answered"]["refusal"] == "the stage is starting; ask again"
        control.allow_changes()
        asks(tmp_path, 3)
        await asyncio.sleep(3)
        assert len(world.fleet) == 3
        running.cancel()

    play(scenario, monkeypatch)
