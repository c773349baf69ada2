"""Waiting for one part never outlasts the death of another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from leeway.failures import PartFailed, as_text
from leeway.runtime import supervisor as supervisor_module
from leeway.runtime.supervisor import GRACE_S, Supervisor, as_part_failure, together

from .virtual_clock import VirtualClock

LONG_S = 30.0
KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: CollectorActor
\tactor_id: 01
\tpid: 4711
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process \
is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."""
"""What Ray says of a process that was killed."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that explain others come at once here."""
    monkeypatch.setattr(supervisor_module, "GRACE_S", dict.fromkeys(GRACE_S, 0.1))


def died(message: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = message
    return error


async def for_ever() -> None:
    await asyncio.Event().wait()


async def after(seconds: float, result: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(result, BaseException):
        raise result
    return result


def play(scenario: Callable[[Supervisor], Awaitable[None]]) -> None:
    async def main() -> None:
        supervisor = Supervisor()
        async with asyncio.timeout(5):
            await scenario(supervisor)
        supervisor.forget_all()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())


def test_the_result_of_a_call_comes_back():
    async def scenario(supervisor):
        supervisor.watch("generator-0", for_ever())
        assert await supervisor.wait(after(0.01, 7), what="replay", timeout_s=LONG_S) == 7

    play(scenario)


def test_a_part_that_is_watched_during_a_wait_ends_it_too():
    async def scenario(supervisor):
        supervisor.watch("generator-0", for_ever())
        waiting = asyncio.ensure_future(supervisor.wait(for_ever(), what="replay", timeout_s=LONG_S))
        await asyncio.sleep(0.01)
        for _ in range(2):  # one that goes well, and one that does not
            supervisor.watch("generator-1", after(0.05, "started"))
            await asyncio.sleep(0.1)
        supervisor.watch("generator-1", after(0.05, ValueError("no memory")))
        begun = asyncio.get_running_loop().time()
        with pytest.raises(PartFailed, match="generator-1: ValueError: no memory"):
            await waiting
        assert asyncio.get_running_loop().time() - begun < 1

    play(scenario)


def test_a_watched_part_that_fails_ends_a_wait_at_once_by_its_name():
    async def scenario(supervisor):
        supervisor.watch("generator-0", for_ever())
        supervisor.watch("generator-1", after(0.05, ValueError("no such\n   model")))
        with pytest.raises(PartFailed) as caught:
            await supervisor.wait(for_ever(), what="replay", timeout_s=LONG_S)
        assert asyncio.get_running_loop().time() < 2
        assert caught.value.part == "generator-1"
        assert str(caught.value) == "generator-1: ValueError: no such model"

    play(scenario)


def test_a_part_that_failed_before_the_wait_ends_it_too():
    async def scenario(supervisor):
        supervisor.watch("generator-1", after(0, RuntimeError("gone")))
        await asyncio.sleep(0.02)
        with pytest.raises(PartFailed, match="generator-1: RuntimeError: gone"):
            await supervisor.wait(for_ever(), what="replay", timeout_s=LONG_S)

    play(scenario)


def test_a_failed_part_keeps_ending_waits():
    async def scenario(supervisor):
        supervisor.watch("generator-1", after(0, RuntimeError("gone")))
        for _ in range(2):
            with pytest.raises(PartFailed, match="generator-1"):
                await supervisor.wait(for_ever(), what="replay", timeout_s=0.3)

    play(scenario)


def test_of_two_waits_side_by_side_both_end_when_a_part_dies():
    async def scenario(supervisor):
        supervisor.watch("generator-1", after(0.02, RuntimeError("gone")))
        waits = [
            asyncio.create_task(supervisor.wait(for_ever(), what=what, timeout_s=0.5)) for what in ("replay", "trainer")
        ]
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert [str(r) for r in results] == ["generator-1: RuntimeError: gone"] * 2

    play(scenario)


def test_a_part_that_ends_in_peace_does_not_end_the_wait():
    async def scenario(supervisor):
        supervisor.watch("generator-0", after(0.0, None))
        supervisor.watch("generator-1", after(0.01, None))
        assert await supervisor.wait(after(0.05, "batch"), what="replay", timeout_s=LONG_S) == "batch"

    play(scenario)


def test_a_time_out_names_what_was_waited_for_and_for_how_long_and_cancels_it():
    cancelled = []

    async def stubborn() -> None:
        try:
            await for_ever()
        finally:
            cancelled.append(True)

    async def scenario(supervisor):
        with pytest.raises(PartFailed, match=r"^replay: no answer for 0.05 s; raise cluster\.\w+_timeout_s"):
            await supervisor.wait(stubborn(), what="replay", timeout_s=0.05)
        await asyncio.sleep(0)
        assert cancelled == [True]

    play(scenario)


def test_an_inner_failure_is_told_in_its_own_words():
    async def scenario(supervisor):
        with pytest.raises(PartFailed, match=r"^trainer: ValueError: bad batch$"):
            await supervisor.wait(after(0.01, ValueError("bad batch")), what="trainer", timeout_s=LONG_S)

    play(scenario)


def test_a_failure_that_names_its_part_already_keeps_that_name():
    async def scenario(supervisor):
        inner = PartFailed("trainer-3", "StalenessError: refused a batch", "its traceback")
        with pytest.raises(PartFailed) as caught:
            await supervisor.wait(after(0.01, inner), what="trainer", timeout_s=LONG_S)
        assert (caught.value.part, caught.value.details) == ("trainer-3", "its traceback")

    play(scenario)


def test_a_time_out_of_the_call_itself_is_not_taken_for_the_waits_own():
    async def scenario(supervisor):
        inner = TimeoutError("waited 5 s for group 3 that must be in batch 1")
        with pytest.raises(PartFailed, match=r"^replay: TimeoutError: waited 5 s for group 3"):
            await supervisor.wait(after(0.01, inner), what="replay", timeout_s=LONG_S)

    play(scenario)


def test_parts_that_are_ended_on_purpose_are_no_failures():
    async def scenario(supervisor):
        supervisor.watch("generator-0", for_ever())
        supervisor.watch("generator-1", after(0, RuntimeError("killed on purpose")))
        await asyncio.sleep(0.01)
        supervisor.forget_all()
        assert await supervisor.wait(after(0.01, 1), what="saving", timeout_s=LONG_S) == 1

    play(scenario)


def test_an_interrupt_goes_through_and_cancels_the_call():
    async def scenario(supervisor):
        call = asyncio.ensure_future(for_ever())
        waiting = asyncio.create_task(supervisor.wait(call, what="replay", timeout_s=LONG_S))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        assert call.cancelled()

    play(scenario)


def test_a_failure_becomes_one_line_and_keeps_its_details():
    failure = as_part_failure("replay", KeyError("a\nb"))
    assert "\n" not in str(failure)
    assert failure.part == "replay"
    assert str(as_part_failure("generator-0", died(KILLED))) == (
        "generator-0: the process died "
        "(pid 4711: it was killed from outside, ran out of memory, or crashed in native code)"
    ), "without what Ray guesses, which is in the details"
    assert "ray stop --force" in as_part_failure("generator-0", died(KILLED)).details
    gone = died("The actor died unexpectedly.\nThe actor is dead because its node has died. Node Id: 0a1b")
    assert as_part_failure("replay", gone).cause == "the process died (its node has died)"
    same = PartFailed("x", "y")
    assert as_part_failure("replay", same) is same


def test_an_actors_exception_leaves_it_as_text_with_its_role():
    class Actor:
        role = "trainer-1"

        @as_text
        async def step(self, fail: bool) -> int:
            if fail:
                raise ValueError("first line\nsecond line")
            return 3

    async def main() -> None:
        assert await Actor().step(False) == 3
        with pytest.raises(PartFailed) as caught:
            await Actor().step(True)
        assert str(caught.value) == "trainer-1: ValueError: first line second line"
        assert "test_supervisor.py" in caught.value.details

    asyncio.run(main())


def test_calls_made_together_answer_in_their_order_not_in_the_order_they_end():
    async def scenario(supervisor):
        calls = [after(0.03, "a"), after(0.0, "b"), after(0.01, "c")]
        assert await supervisor.wait(together(calls), what="trainer", timeout_s=LONG_S) == ["a", "b", "c"]
        assert await together([]) == []

    play(scenario)


def test_calls_made_together_are_under_way_at_the_same_time():
    async def scenario(supervisor):
        met = asyncio.Barrier(3)
        await supervisor.wait(together(met.wait() for _ in range(3)), what="trainer", timeout_s=0.5)

    play(scenario)


def test_of_calls_made_together_the_first_failure_ends_the_wait_at_once():
    async def scenario(supervisor):
        calls = together([for_ever(), after(0.01, ValueError("bad batch")), after(0.02, KeyError("later"))])
        with pytest.raises(PartFailed, match=r"^trainer: ValueError: bad batch$"):
            await supervisor.wait(calls, what="trainer", timeout_s=0.5)

    play(scenario)


def test_a_wait_for_calls_made_together_that_is_given_up_cancels_them_all():
    ended = []

    async def stubborn(name: str) -> None:
        try:
            await for_ever()
        finally:
            ended.append(name)

    async def scenario(supervisor):
        with pytest.raises(PartFailed, match=r"^trainer: no answer for 0.05 s"):
            await supervisor.wait(together(map(stubborn, "ab")), what="trainer", timeout_s=0.05)
        await asyncio.sleep(0.01)
        assert sorted(ended) == ["a", "b"]

    play(scenario)
