"""A collector on an engine of limited places, on a virtual clock: it is kept full, nobody is blamed for its queue, and
one that hangs is found out.

The engine is played: so many places, first come first served, passes of one second. It tells its `Progress` what the
real one does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.collector.clock import RolloutClock
from leeway.collector.engine import EngineLost, LoadTimes, StagedWeights
from leeway.collector.progress import EngineHung, Progress, Sampled
from leeway.collector.room import Room
from leeway.types import Task
from leeway.weights import Manifest

from ..fakes import GREEDY, Answer, FakeEngine, Rig, play
from .virtual_clock import VirtualClock

ANSWER_S = 60


@dataclass(eq=False)
class Sequence:
    request_id: str
    name: str
    left_s: int
    done: asyncio.Future[None]


class PlayedEngine(FakeEngine):
    """`answer_s(index)`: passes that a completion takes. `hangs`: no pass ends any more. `loses`: these requests."""

    def __init__(
        self, places: int, answer_s: Callable[[int], int] = lambda index: ANSWER_S, pass_s: float = 1.0
    ) -> None:
        super().__init__()
        self.pass_s = pass_s
        loop = asyncio.get_running_loop()
        self.progress, self.places = Progress(loop.time), places
        self.answer_s = answer_s
        self.hangs = self.load_hangs = False
        self.loses: set[int] = set()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.used_s: list[int] = []
        self.most_waiting = 0
        self._something = asyncio.Event()
        self._num = 0
        self.task = asyncio.create_task(self._passes())

    async def generate(self, prompt_tokens: list[int], *, clock: Any = None, **sampling: Any) -> list[Any]:
        n, request_id = sampling["n"], str(self._num)
        self._num += 1
        with self.progress.request(request_id, num_sequences=n, prompt_tokens=len(prompt_tokens), clock=clock):
            mine = [
                Sequence(request_id, f"{i}_{request_id}", self.answer_s(i), asyncio.get_running_loop().create_future())
                for i in range(n)
            ]
            if int(request_id) not in self.loses:
                self.waiting.extend(mine)
            self._something.set()
            try:
                await asyncio.gather(*(s.done for s in mine))
            finally:
                self.waiting = deque(s for s in self.waiting if s not in mine)
                self.running = [s for s in self.running if s not in mine]
        one = SimpleNamespace(tokens=[7, 0], logprobs=[-1.0, -0.1], policy_versions=[0] * 2, finish_reason="stop")
        return [one] * n

    def stage(self, manifest: Manifest, files: Any = ()) -> StagedWeights:
        return StagedWeights(manifest, [])

    async def load_weights(self, staged: StagedWeights, *, in_flight: str, paused: Any) -> Any:
        with self.progress.call():
            if self.load_hangs:
                await asyncio.Event().wait()
        return LoadTimes(drain_s=0.0, pause_s=0.0)

    async def _passes(self) -> None:
        while True:
            if not (self.waiting or self.running) or self.hangs:
                self._something.clear()
                await self._something.wait()
            while self.waiting and len(self.running) < self.places:
                self.running.append(self.waiting.popleft())
            self.used_s.append(len(self.running))
            self.most_waiting = max(self.most_waiting, len(self.waiting))
            worked_on = list(self.running)
            await asyncio.sleep(self.pass_s)
            if self.hangs:
                continue
            for s in worked_on:
                s.left_s -= 1
            self.progress.passed(
                asyncio.get_running_loop().time(), [Sampled(s.request_id, s.name, 1, not s.left_s) for s in worked_on]
            )
            for s in worked_on:
                if not s.left_s and not s.done.done():
                    s.done.set_result(None)
            self.running = [s for s in self.running if s.left_s]

    def use(self, *, after: int = 0, before: int | None = None) -> float:
        """Share of the places that were at work, between two passes."""
        used = self.used_s[after:before]
        return sum(used) / len(used) / self.places


SETTINGS: dict[str, Any] = {
    "group_size": 8, "max_in_flight": 200, "timeout_s": 600.0, "engine_stall_s": 300.0, "retries": 0,
    "deadline_s": 1e6,
}  # fmt: skip


def played(
    scenario: Callable[[Any, asyncio.Task[None]], Awaitable[None]], environment: Any = None, *, places: int = 32,
    answer_s: Callable[[int], int] = lambda index: ANSWER_S, pass_s: float = 1.0, **changes: Any,
) -> Any:  # fmt: skip
    """Run `scenario` beside a collector on a played engine, at virtual time."""
    return play(
        scenario,
        environment,
        engine=lambda: PlayedEngine(places, answer_s, pass_s),
        loop=VirtualClock,
        limit_s=1e7,
        **(SETTINGS | changes),
    )


def to_the_end(environment: Any = None, *, groups: int, **changes: Any) -> Any:
    async def scenario(rig: Rig, collecting: asyncio.Task[None]) -> None:
        rig.slots.add(*[0] * groups)
        rig.slots.end()
        await collecting

    return played(scenario, environment, **changes)


class Thinks(Answer):
    """Takes its time before it asks, or until `gate` is opened."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.gate: asyncio.Event | None = None

    async def rollout(self, task: Task, policy: Any) -> Any:
        await (asyncio.sleep(self.seconds) if self.gate is None else self.gate.wait())
        return await super().rollout(task, policy)


# ------------------------------------------------------------------------------------------------------ the queue


@pytest.mark.slow
def test_groups_in_flight_follow_the_places_of_the_engine():
    """80 groups of 8 may start, 32 places: as many as fill them start, and some more; no answer waits for long."""
    rig = to_the_end(groups=80)
    assert len(rig.group_ids) == 80
    assert (rig.slots.retried_ids, rig.slots.failures) == ([], {})
    assert rig.engine.most_waiting <= 8
    assert rig.engine.use(before=-ANSWER_S) > 0.98


def test_short_answers_wait_in_the_queue_so_that_no_place_is_empty():
    """An answer takes 0.08 s, and what comes in its place 0.06 s: nearly twice as many as there are places."""
    rig = to_the_end(Thinks(0.06), groups=400, places=64, answer_s=lambda index: 4, pass_s=0.02)
    assert rig.engine.use(after=40, before=-10) > 0.9
    assert 32 < rig.engine.most_waiting <= 64 + 8


def test_a_wave_of_long_answers_is_no_rate():
    """All of 256 end within 0.3 s, as they began: no more than an eighth waits, for as long as an answer takes."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        progress = Progress(loop.time)
        room = Room(progress, places=256)
        for _ in range(3):
            with ExitStack() as inside:
                held = [str(i) for i in range(room.groups(8))]
                for name in held:
                    inside.enter_context(progress.request(name, num_sequences=8, prompt_tokens=8))
                    progress.passed(loop.time(), [Sampled(name, str(i), 1, False) for i in range(8)])
                assert 8 * len(held) == 256 + 32
                await asyncio.sleep(30)
                for name in held:
                    await asyncio.sleep(0.3 / len(held))
                    progress.passed(loop.time(), [Sampled(name, str(i), 1, True) for i in range(8)])
                    room.groups(8)

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())


def test_more_is_begun_once_half_of_what_waits_is_gone():
    """An eighth of 256 places waits, 4 groups of 8: those that end are replaced two at a time, not one by one."""

    async def main() -> None:
        progress = Progress(asyncio.get_running_loop().time)
        room, begun = Room(progress, places=256), dict[str, ExitStack]()
        free = [room.groups(8)]
        for turn in range(6):
            for _ in range(free[-1]):
                name = str(len(begun))
                begun[name] = ExitStack()
                begun[name].enter_context(progress.request(name, num_sequences=8, prompt_tokens=8))
                progress.passed(0.0, [Sampled(name, str(i), 1, False) for i in range(8)])
            begun[str(turn)].close()
            free.append(room.groups(8))
        assert free == [36, 0, 2, 0, 2, 0, 2]
        for name in begun:
            begun[name].close()
        assert room.groups(8) == 36

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())


@pytest.mark.slow
def test_long_answers_do_not_leave_places_empty():
    """One completion in eight takes ten times as long: its group holds one place, not eight."""
    rig = to_the_end(groups=40, answer_s=lambda index: 10 * ANSWER_S if index == 0 else ANSWER_S, timeout_s=1e4)
    assert rig.engine.use(before=-10 * ANSWER_S) > 0.95
    assert rig.engine.most_waiting <= 8


@pytest.mark.slow
def test_slow_environments_hold_no_place():
    """Each group thinks for three times as long as it generates: four times as many are in flight."""
    rig = to_the_end(Thinks(3 * ANSWER_S), groups=80)
    assert len(rig.group_ids) == 80
    assert rig.engine.use(after=2 * ANSWER_S, before=-4 * ANSWER_S) > 0.9


@pytest.mark.slow
def test_no_more_groups_are_in_flight_than_may_be():
    rig = to_the_end(Thinks(5 * ANSWER_S), groups=12, max_in_flight=5)
    assert len(rig.group_ids) == 12
    assert max(rig.slots.limits) <= 5


@pytest.mark.slow
def test_what_waits_in_the_engines_queue_does_not_count_against_a_rollout():
    """40 groups ask at the same moment, and the last are answered after 600 s of waiting: with a limit of 150 s."""

    async def scenario(rig: Any, collecting: asyncio.Task[None]) -> None:
        rig.environment.gate = asyncio.Event()
        rig.slots.add(*[0] * 40)
        rig.slots.end()
        await asyncio.sleep(100)
        rig.environment.gate.set()
        await collecting
        assert (rig.slots.retried_ids, rig.slots.failures) == ([], {})
        assert rig.engine.most_waiting > 200

    played(scenario, Thinks(), timeout_s=170.0)


def test_working_too_long_does_count():
    rig = to_the_end(groups=3, timeout_s=50.0)
    assert set(rig.slots.failures.values()) == {"rollout took longer than rollout.timeout_s = 50 s"}


@pytest.mark.slow
def test_a_request_that_the_engine_forgot_ends_by_the_time_limit():
    async def scenario(rig: Any, collecting: asyncio.Task[None]) -> None:
        rig.engine.loses = {1}
        rig.slots.add(*[0] * 60)
        rig.slots.end()
        await collecting
        assert len(rig.group_ids) == 59
        assert list(rig.slots.failures.values()) == ["rollout took longer than rollout.timeout_s = 100 s"]

    played(scenario, timeout_s=100.0)


@pytest.mark.slow
def test_an_evaluation_takes_all_places():
    """Greedy answers to 100 tasks, of which training has 2 groups in flight: in 4 rounds, not in 50."""

    async def scenario(rig: Any, collecting: asyncio.Task[None]) -> None:
        tasks = [Task(task_id=f"t{i}", prompt="x") for i in range(100)]
        begun = asyncio.get_running_loop().time()
        assert len(await rig.collector.evaluate(tasks, GREEDY, policy_version=0)) == 100
        assert asyncio.get_running_loop().time() - begun <= 4 * ANSWER_S + 10
        assert rig.collector.num_evaluated() == 100

    played(scenario, max_in_flight=2)


def test_an_evaluation_has_as_many_in_the_queue_as_there_may_be():
    async def scenario(rig: Any, collecting: asyncio.Task[None]) -> None:
        tasks = [Task(task_id=f"t{i}", prompt="x") for i in range(400)]
        assert len(await rig.collector.evaluate(tasks, GREEDY, policy_version=0)) == 400
        assert rig.engine.most_waiting == 256 // 8

    played(scenario, places=256)


def test_a_rollouts_clock_counts_its_share_of_the_passes_and_all_that_is_outside():
    now = [0.0]
    clock, progress = RolloutClock(lambda: now[0], patience_s=100.0), Progress(lambda: now[0])

    def passes(seconds: float, *names: str) -> None:
        now[0] += seconds
        progress.passed(now[0], [Sampled("r" if name in "ab" else name, name, 1, False) for name in names])

    now[0] += 5
    with clock, progress.request("r", num_sequences=2, prompt_tokens=10, clock=clock):
        passes(40, "other")  # both wait
        assert clock.counted_s == 5
        passes(10, "a", "b")
        assert clock.counted_s == 15
        passes(10, "a")  # b was preempted
        assert clock.counted_s == 20
        assert (progress.num_sequences, progress.num_waiting, progress.num_tokens) == (2, 0, 10 + 3)
        progress.pause()
        now[0] += 90
        progress.resume()
        passes(10, "a", "b")
        assert clock.counted_s == 30
        now[0] += 150
        assert clock.counted_s == 80, "nothing for longer than anybody waits"
    now[0] += 7
    assert (progress.num_sequences, progress.num_waiting, progress.num_tokens) == (0, 0, 0)
    assert clock.counted_s == 37
    assert clock.idle_s == 12


def test_the_pass_after_a_load_counts_for_nobody_where_its_news_comes_before_that_of_the_load():
    now = [0.0]
    clock, progress = RolloutClock(lambda: now[0]), Progress(lambda: now[0])
    with clock, progress.request("r", num_sequences=1, prompt_tokens=10, clock=clock):
        progress.passed(10.0, [Sampled("r", "a", 1, False)])
        progress.passed(500.0, [Sampled("r", "a", 1, False)], after_load=True)
        assert clock.counted_s == 10
        progress.passed(501.0, [Sampled("r", "a", 1, False)])
        assert clock.counted_s == 11


def test_a_full_cache_lets_nobody_begin():
    async def main() -> None:
        progress = Progress()
        room = Room(progress, places=100, cache_tokens=1000)
        with progress.request("r", num_sequences=10, prompt_tokens=500):
            progress.passed(1.0, [Sampled("r", str(i), 30, False) for i in range(10)])
            assert room.groups(4) == (100 + 12 - 10) // 4
            progress.passed(2.0, [Sampled("r", str(i), 20, False) for i in range(10)])
            assert room.groups(4) == 0
        assert room.groups(4) == 112 // 4

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------- engines that hang


def test_an_engine_that_hangs_ends_the_iteration_by_name_and_costs_no_retry():
    async def scenario(rig: Any, collecting: asyncio.Task[None]) -> None:
        rig.slots.add(*[0] * 100)
        await asyncio.sleep(100)
        rig.engine.hangs = True
        begun = asyncio.get_running_loop().time()
        said = r"the inference engine hangs: it has \d+ sequences to answer .* rollout.engine_stall_s = 300 s"
        with pytest.raises(EngineLost, match=said):
            await collecting
        assert 300 <= asyncio.get_running_loop().time() - begun <= 312
        assert (rig.slots.retried_ids, rig.slots.failures) == ([], {})

    played(scenario, retries=2, timeout_s=200.0)


def test_an_engine_that_hangs_in_an_evaluation_or_in_a_load_is_found_out():
    async def scenario(rig: Any, collecting: asyncio.Task[None]) -> None:
        rig.engine.hangs = True
        with pytest.raises(EngineLost, match="hangs: it has 1 sequences"):
            await rig.collector.evaluate([Task(task_id="t", prompt="x")], GREEDY, policy_version=0)
        rig.engine.load_hangs = True
        watching = asyncio.create_task(rig.collector.watch_engine())
        await rig.publish(1)
        with pytest.raises(EngineLost, match="hangs: it has a call"):
            await watching

    played(scenario)


def test_an_engine_that_is_paused_or_has_nothing_to_do_does_not_hang():
    async def main() -> None:
        progress = Progress(asyncio.get_running_loop().time)
        watching = asyncio.create_task(progress.watch(10.0))
        await asyncio.sleep(1000)
        with progress.request("r", num_sequences=1, prompt_tokens=1):
            await asyncio.sleep(9)
            progress.pause()
            await asyncio.sleep(1000)
            progress.resume()
            await asyncio.sleep(9)
            assert not watching.done()
            with pytest.raises(EngineHung):
                await watching

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())


def test_a_loop_that_stood_still_says_nothing_about_the_engine():
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        progress = Progress(loop.time)
        watching = asyncio.create_task(progress.watch(10.0))
        with progress.request("r", num_sequences=1, prompt_tokens=1):
            await asyncio.sleep(5)
            loop.now += 60  # somebody blocked it
            await asyncio.sleep(5)
            assert not watching.done()
        watching.cancel()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(main())
