"""A generator whose process dies is replaced: what was asked of it is asked of its successor, within a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from leeway.failures import Kind, PartFailed
from leeway.runtime import generators as generators_module
from leeway.runtime.generators import Generator, Made, Restarts
from leeway.runtime.supervisor import Supervisor

from .virtual_clock import VirtualClock

STOPPED = PartFailed("generator-0", "the process is stopped", kind=Kind.STOPPED)


class Fleet:
    """Launches processes number 0, 1, ... of one generator; `fails` says which do not start, and how."""

    def __init__(
        self, *, restarts: int = 5, fails: dict[int, Exception | float] | None = None, room_after_s: float = 0.0
    ) -> None:
        self.fails = fails or {}
        self.room_after_s = room_after_s
        self.made: list[Fake] = []
        self.told: list[str] = []
        self.given_back: list[str] = []
        self.left: list[int] = []
        self.started_at: list[float] = []
        self.supervisor = Supervisor()
        self.restarts = Restarts(
            allowed=restarts, backoff_s=2.0, start_timeout_s=30.0, tell=self.told.append, lost=self._lost
        )
        self.generator = Generator("generator-0", self._launch, supervisor=self.supervisor, restarts=self.restarts)

    async def _lost(self, name: str, cause: str) -> int:
        self.given_back.append(name)
        return 3

    async def _launch(self, placed: Callable[[], None], made: Made, instead: Any) -> str:
        number = len(self.made)
        await asyncio.sleep(self.room_after_s if number else 0)
        placed()
        process = Fake(number, instead)
        self.made.append(process)
        self.started_at.append(asyncio.get_running_loop().time())
        made(process, lambda: self.left.append(number))
        failure = self.fails.get(number)
        if isinstance(failure, Exception):
            raise failure
        await asyncio.sleep(failure or 0)
        self.supervisor.watch_pulse("generator-0", process.answers, instead=instead)
        return f"generator-0/{number}"


class Fake:
    """An actor's handle, and the process behind it. It answers when told to."""

    def __init__(self, number: int, instead: Any) -> None:
        self.number = number
        self.instead = instead
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.verified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_asked = 0
        self.killed = False
        self.until_verified = SimpleNamespace(remote=lambda version: asyncio.shield(self.verified))

    def ask(self) -> Awaitable[Any]:
        self.num_asked += 1
        return asyncio.shield(self.answer)

    async def answers(self) -> None: ...

    def dies(self) -> None:
        error = ActorDiedError()
        for future in (self.answer, self.verified):
            if not future.done():
                future.set_exception(error)
                future.exception()


def play(scenario: Callable[[Fleet], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Fleet:
    async def kill(actor: Fake, role: str) -> None:
        actor.killed = True

    monkeypatch.setattr(generators_module, "_kill", kill)

    async def main() -> Fleet:
        fleet = Fleet(**options)
        await fleet.generator.start()
        try:
            async with asyncio.timeout(36_000):
                await scenario(fleet)
        finally:
            fleet.supervisor.forget_all()
        return fleet

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main())


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_what_was_asked_of_a_process_that_dies_is_asked_of_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        asking = asyncio.ensure_future(fleet.generator.call(lambda actor: actor.ask()))
        await until(lambda: fleet.made[0].num_asked)
        fleet.made[0].dies()
        await until(lambda: len(fleet.made) == 2 and fleet.made[1].num_asked)
        assert fleet.restarts.over == [], "it has not served yet"
        await asyncio.sleep(1.5)
        fleet.made[1].verified.set_result(None)
        fleet.made[1].answer.set_result(7)
        assert await fleet.supervisor.wait(asking, what="generators", timeout_s=30) == 7
        await until(lambda: fleet.restarts.over)
        assert fleet.given_back == ["generator-0/0"]
        assert fleet.left == [0], "and its place is free"
        assert (fleet.made[0].killed, fleet.made[1].killed) == (True, False)
        (restart,) = fleet.restarts.over
        assert (restart.part, restart.groups) == ("generator-0", 3)
        assert restart.down_s == pytest.approx(1.5, abs=0.1)
        assert "the process died" in restart.cause

    play(scenario, monkeypatch)


@pytest.mark.parametrize(
    "failure",
    [
        STOPPED,
        PartFailed("generator-0", "EngineLost: the inference engine hangs", kind=Kind.ENGINE),
        ActorUnavailableError("the network", None),
    ],
    ids=["seen from outside", "said by its engine's keeper", "out of reach"],
)
def test_so_is_one_that_is_there_and_does_not_work(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    async def scenario(fleet: Fleet) -> None:
        asking = asyncio.ensure_future(fleet.generator.call(lambda actor: actor.ask()))
        await until(lambda: fleet.made[0].num_asked)
        if failure is STOPPED:
            fleet.made[0].instead(failure)
            fleet.made[0].instead(failure)  # whoever watches says it until the part is forgotten
        else:
            fleet.made[0].answer.set_exception(failure)
        await until(lambda: len(fleet.made) == 2)
        fleet.made[1].verified.set_result(None)
        fleet.made[1].answer.set_result("done")
        assert await asking == "done"
        await until(lambda: fleet.restarts.over)
        assert len(fleet.made) == 2

    play(scenario, monkeypatch)


def test_an_error_that_a_process_raises_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.made[0].answer.set_exception(PartFailed("generator-0", "ValueError: no such tool"))
        with pytest.raises(PartFailed, match="no such tool"):
            await fleet.generator.call(lambda actor: actor.ask())
        assert len(fleet.made) == 1

    play(scenario, monkeypatch)


def test_what_another_part_failed_to_answer_it_is_no_death_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.made[0].answer.set_exception(PartFailed("generator-0", "ActorDiedError: the buffer", kind=Kind.LOST))
        with pytest.raises(PartFailed, match="the buffer"):
            await fleet.generator.call(lambda actor: actor.ask())
        assert len(fleet.made) == 1

    play(scenario, monkeypatch)


def test_a_successor_that_does_not_serve_is_replaced_too_after_longer_and_longer_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second does not start, the third hangs in its start, the fourth dies before it has verified weights."""

    async def scenario(fleet: Fleet) -> None:
        asking = asyncio.ensure_future(fleet.generator.call(lambda actor: actor.ask()))
        await until(lambda: fleet.made[0].num_asked)
        fleet.made[0].dies()
        await until(lambda: len(fleet.made) == 4)
        await until(lambda: fleet.made[3].num_asked)
        fleet.made[3].dies()
        await until(lambda: len(fleet.made) == 5)
        fleet.made[4].verified.set_result(None)
        fleet.made[4].answer.set_result("done")
        assert await asking == "done"
        await until(lambda: fleet.restarts.over)
        waits = [later - earlier for earlier, later in zip(fleet.started_at[1:], fleet.started_at[2:], strict=False)]
        assert waits == pytest.approx([2, 30 + 4, 8], abs=0.1)
        assert fleet.given_back == ["generator-0/0", "generator-0/3"], "the others had never asked for a group"
        assert all(process.killed for process in fleet.made[:4])
        assert (len(fleet.restarts.over), fleet.restarts.left) == (1, 1)
        assert [line.split(";")[0].removeprefix("warning: ") for line in fleet.told[1:3]] == [
            "generator-0: ValueError: no memory",
            "generator-0: it did not start within 30 s (cluster.start_timeout_s)",
        ]

    play(scenario, monkeypatch, fails={1: ValueError("no memory"), 2: 1e9})


def test_a_successor_waits_for_room_and_starts_in_time_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour in which its machine is away is one restart, and not one for every `start_timeout_s`."""

    async def scenario(fleet: Fleet) -> None:
        asking = asyncio.ensure_future(fleet.generator.call(lambda actor: actor.ask()))
        await until(lambda: fleet.made[0].num_asked)
        fleet.made[0].dies()
        await asyncio.sleep(3600 + 30 + 2 + 3600 + 1)
        assert len(fleet.made) == 3
        fleet.made[2].verified.set_result(None)
        fleet.made[2].answer.set_result("done")
        assert await asking == "done"
        assert fleet.started_at[1:] == pytest.approx([3600, 3600 + 30 + 2 + 3600], abs=0.1), "the second hangs"
        assert fleet.restarts.left == 3
        assert "it did not start within 30 s" in fleet.told[1]

    play(scenario, monkeypatch, fails={1: 1e9}, room_after_s=3600.0)


def test_one_that_joins_does_not_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        with pytest.raises(PartFailed, match="did not start within 30 s"):
            await fleet.generator.join()

    play(scenario, monkeypatch, room_after_s=3600.0)


def test_when_all_restarts_are_used_up_the_run_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        standing = fleet.supervisor.watch("generator-0", fleet.generator.call(lambda actor: actor.ask()))
        for number in range(3):
            await until(lambda number=number: len(fleet.made) > number and fleet.made[number].num_asked)
            if number:
                fleet.made[number].verified.set_result(None)
                await until(lambda number=number: len(fleet.restarts.over) == number)
            fleet.made[number].dies()
        with pytest.raises(PartFailed) as failed:
            await fleet.supervisor.wait(asyncio.Event().wait(), what="replay", timeout_s=100)
        assert failed.value.part == "generator-0"
        assert "all 2 restarts are used up (cluster.restarts)" in failed.value.cause
        assert len(fleet.made) == 3
        assert not standing.done()

    play(scenario, monkeypatch, restarts=2)


def test_without_restarts_the_first_death_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        assert fleet.made[0].instead is None, "those who watch it end the run"
        fleet.made[0].dies()
        with pytest.raises(ActorDiedError):
            await fleet.generator.call(lambda actor: actor.ask())

    play(scenario, monkeypatch, restarts=0)


def test_a_look_at_those_that_are_up_waits_for_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        looking = asyncio.ensure_future(fleet.generator.call_now(lambda actor: actor.ask()))
        await until(lambda: fleet.made[0].num_asked)
        fleet.made[0].instead(STOPPED)
        assert await looking is None
        assert await fleet.generator.call_now(lambda actor: actor.ask()) is None
        await fleet.generator.call(lambda actor: actor.answers())
        fleet.made[1].answer.set_result("up")
        assert await fleet.generator.call_now(lambda actor: actor.ask()) == "up"

    play(scenario, monkeypatch)


def test_a_generator_that_never_started_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        raise AssertionError("it never comes here")

    with pytest.raises(PartFailed, match="generator-0: ValueError: no such model"):
        play(scenario, monkeypatch, fails={0: ValueError("no such model")})
