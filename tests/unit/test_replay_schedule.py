"""Random schedules against the real admission rule, window and replay buffer: the bound holds and nothing gets stuck.

Everything runs in one asyncio loop without a clock: a duration is a number of turns of the loop. Collectors are as lazy
as they may be (they load new weights only when a floor forces them), a group is generated entirely under the weights
its collector had at the start, and publications arrive late.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config.derived import max_outstanding_groups
from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.operators import filter_zero_variance
from leeway.types import Admission, Group, Task, Trajectory

STUCK_S = 5.0
"""A wait of this long in a schedule that takes milliseconds is a deadlock."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    P: int
    u: int
    n: int
    W: int
    T: int
    L: int
    num_collectors: int
    max_in_flight: int
    num_takes: int | None
    num_tasks: int | None
    slowest_group: int
    slowest_step: int
    slowest_publication: int
    filtered_frac: float = 0.0
    failed_frac: float = 0.0
    retried_frac: float = 0.0
    eager_pull_frac: float = 0.0


def random_schedule(rng: random.Random) -> Schedule:
    P, n = rng.randint(1, 5), rng.choice((1, 1, 1, 2, 3))
    u = rng.choice([u for u in (1, 1, 2, 3) if u <= P])
    W = rng.choice((1, 1, 2, P, P + 1, 2 * P + 1))
    least = u * (-(-(W - 1) // P) + 1) + n - 2
    T = least + rng.choice((0, 0, 1, 2, 4))
    finite = rng.random() < 0.5
    return Schedule(
        P=P,
        u=u,
        n=n,
        W=W,
        T=T,
        L=T + rng.choice((0, 0, 0, 1, 3)),
        num_collectors=rng.randint(1, 4),
        max_in_flight=rng.randint(1, 8),
        num_takes=None if finite else rng.randint(1, 10),
        num_tasks=rng.randint(1, 10 * P) if finite else None,
        slowest_group=rng.choice((0, 3, 20, 60)),
        slowest_step=rng.choice((0, 3, 20)),
        slowest_publication=rng.choice((0, 3, 30)),
        filtered_frac=rng.choice((0.0, 0.0, 0.2, 0.5)),
        failed_frac=rng.choice((0.0, 0.0, 0.1)),
        retried_frac=rng.choice((0.0, 0.0, 0.3)),
        eager_pull_frac=rng.choice((0.0, 0.0, 0.5)),
    )


def group_of(admission: Admission, version: int, *, equal: bool) -> Group:
    def attempt(reward: float) -> Trajectory:
        return Trajectory(
            prompt_tokens=[1],
            response_tokens=[2],
            loss_mask=[True],
            behavior_logprobs=[-1.0],
            policy_versions=[version],
            reward=reward,
            finish_reason="stop",
            text="",
        )

    return Group(
        group_id=admission.group_id,
        task_id=admission.task.task_id,
        trajectories=[attempt(0.0), attempt(0.0 if equal else 1.0)],
    )


def keep_groups(index: int, groups: Sequence[Group], reused: Sequence[Group]) -> SimpleNamespace:
    return SimpleNamespace(index=index, groups=list(groups))


@dataclass
class Run:
    """One schedule, played. What happened is recorded; the bound is checked at every use."""

    schedule: Schedule
    rng: random.Random
    lags: list[int] = field(default_factory=list)
    takes: list[list[int]] = field(default_factory=list)
    delivered: set[int] = field(default_factory=set)
    filtered: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    tasks_seen: list[str] = field(default_factory=list)
    generated_under: dict[int, int] = field(default_factory=dict)
    most_outstanding: int = 0

    async def play(self) -> None:
        s = self.schedule
        self.server_version = -1  # what a pull returns
        number = 10_000 if s.num_tasks is None else s.num_tasks
        self.buffer = ReplayBuffer(
            tasks=(Task(task_id=str(i), prompt="") for i in range(number)),
            rule=AdmissionRule(
                groups_per_take=s.P,
                updates_per_take=s.u,
                publish_every=s.n,
                reorder_window=s.W,
                target_lag=s.T,
                max_lag=s.L,
            ),
            num_takes=s.num_takes,
            # Exactly what `validate` prints: one group more than promised and the writer refuses.
            capacity=max_outstanding_groups(s.P, s.u, s.W, s.T),
            assemble=keep_groups,  # type: ignore[arg-type]
            operators=[filter_zero_variance],
        )
        collectors = [asyncio.create_task(self._collector()) for _ in range(s.num_collectors)]
        try:
            await self._trainer()
            await self.buffer.close()
            await asyncio.gather(*collectors)
        finally:
            for task in collectors:
                task.cancel()

    async def _turns(self, most: int) -> None:
        for _ in range(self.rng.randint(0, most)):
            await asyncio.sleep(0)

    async def _publish(self, version: int) -> None:
        await self._turns(self.schedule.slowest_publication)
        self.server_version = version
        await self._turns(self.schedule.slowest_publication)
        await self.buffer.published(version)

    async def _trainer(self) -> None:
        s = self.schedule
        version = 0
        await self._publish(0)
        publishing: asyncio.Task[None] | None = None
        while True:
            take: Any = await self.buffer.take(timeout_s=STUCK_S)
            if take is None:
                break
            self.takes.append([g.group_id for g in take.groups])
            for _ in range(s.u):
                for group in take.groups:
                    oldest, newest = group.policy_versions()
                    assert newest <= version, f"group {group.group_id} comes from the future"
                    self.lags.append(version - oldest)
                    assert version - oldest <= s.L, (
                        f"group {group.group_id} of version {oldest} used at version {version}: bound {s.L}"
                    )
                await self._turns(s.slowest_step)
                version += 1
                if version % s.n == 0:
                    if publishing is not None:
                        await publishing
                    publishing = asyncio.create_task(self._publish(version))
            await self.buffer.trained([g.group_id for g in take.groups])
        if publishing is not None:
            await publishing

    async def _collector(self) -> None:
        s = self.schedule
        weights = SimpleNamespace(version=-1)
        in_flight: set[asyncio.Task[None]] = set()
        while True:
            free = s.max_in_flight - len(in_flight)
            if not free:
                _, in_flight = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                continue
            admissions = await self.buffer.admit(free, timeout_s=STUCK_S)
            assert len(admissions) <= free
            self.most_outstanding = max(self.most_outstanding, self.buffer.stats().slots_in_use)
            if not admissions:
                break
            in_flight |= {asyncio.create_task(self._group(a, weights)) for a in admissions}
            in_flight = {t for t in in_flight if not t.done()}
        await asyncio.gather(*in_flight)

    async def _group(self, admission: Admission, weights: SimpleNamespace) -> None:
        s, rng = self.schedule, self.rng
        self.tasks_seen.append(admission.task.task_id)
        while True:
            if weights.version < admission.floor or rng.random() < s.eager_pull_frac:
                while self.server_version < admission.floor:
                    await asyncio.sleep(0)  # admission promises that this version is on its way
                weights.version = self.server_version
            version = weights.version
            await self._turns(s.slowest_group)
            if rng.random() < s.failed_frac:
                self.failed.add(admission.group_id)
                await self.buffer.fail(admission.group_id, "it was not to be")
                return
            if rng.random() >= s.retried_frac:
                break
            await self.buffer.retried(admission.group_id)
        equal = rng.random() < s.filtered_frac
        (self.filtered if equal else self.delivered).add(admission.group_id)
        self.generated_under[admission.group_id] = version
        await self.buffer.put([group_of(admission, version, equal=equal)])


def play(schedule: Schedule, seed: int) -> Run:
    run = Run(schedule, random.Random(seed))
    asyncio.run(run.play())
    return run


@pytest.mark.timeout(60)
def test_random_schedules_hold_the_bound_take_everything_once_and_never_get_stuck():
    reached = 0
    for seed in range(600):
        rng = random.Random(seed)
        schedule = random_schedule(rng)
        try:
            check(schedule, run := play(schedule, seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {schedule}: {error!r}") from error
        reached += bool(run.lags) and max(run.lags) == schedule.L
    # A rule that is merely too careful would pass everything above.
    assert reached > 100


def check(s: Schedule, run: Run) -> None:
    taken = [g for take in run.takes for g in take]
    assert len(taken) == len(set(taken)), "a group was taken twice"
    assert set(taken) <= run.delivered
    assert not set(taken) & (run.filtered | run.failed)
    assert len(run.tasks_seen) == len(set(run.tasks_seen)), "a task was drawn twice"
    assert all(len(take) == s.P for take in run.takes[:-1]), "a take in the middle was short"
    assert all(take == sorted(take) for take in run.takes)
    if s.num_tasks is not None:
        assert len(run.tasks_seen) == s.num_tasks, "the tasks were not used up"
        assert set(taken) == run.delivered, "a delivered group was never taken"
        assert len(run.takes) == -(-len(run.delivered) // s.P)
    else:
        assert s.num_takes is not None
        assert [len(take) for take in run.takes] == [s.P] * s.num_takes
        assert set(taken) == run.delivered, "more was generated than the run could ever take"
    for group_id in taken:
        overtakers = sum(other > group_id for take in run.takes[: _take_of(run, group_id)] for other in take)
        assert overtakers <= s.W - 1
    stats = run.buffer.stats()
    assert (stats.slots_in_use, stats.groups_ready) == (0, 0)
    assert (stats.filtered, stats.failed, stats.groups_taken) == (len(run.filtered), len(run.failed), len(taken))
    assert stats.admitted == len(run.tasks_seen)
    assert run.most_outstanding <= max_outstanding_groups(s.P, s.u, s.W, s.T)


def _take_of(run: Run, group_id: int) -> int:
    return next(k for k, take in enumerate(run.takes) if group_id in take)


FAST = Schedule(
    P=3,
    u=1,
    n=1,
    W=1,
    T=2,
    L=2,
    num_collectors=2,
    max_in_flight=50,
    num_takes=12,
    num_tasks=None,
    slowest_group=0,
    slowest_step=60,
    slowest_publication=0,
)


def varied(**changes) -> Schedule:
    return Schedule(**{**vars(FAST), **changes})


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_fast_lazy_collectors_reach_the_bound(lag):
    for seed in range(10):
        assert max(play(varied(T=lag, L=lag), seed).lags) == lag


@pytest.mark.parametrize("lag", [1, 3])
def test_the_target_alone_limits_how_far_ahead_collectors_that_keep_up_are(lag):
    for seed in range(10):
        assert max(play(varied(T=lag, L=lag + 3, eager_pull_frac=1.0), seed).lags) <= lag


def test_lag_zero_is_lockstep():
    for seed in range(30):
        run = play(varied(T=0, L=0, slowest_group=seed % 7, slowest_publication=seed % 5), seed)
        assert set(run.lags) == {0}
        # Take k is groups 3 k .. 3 k + 2, generated by exactly version k, and never is more than one take outstanding.
        assert run.takes == [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(12)]
        assert all(version == group_id // 3 for group_id, version in run.generated_under.items())
        assert run.most_outstanding <= 3


def test_a_window_lets_short_groups_pass_a_long_one():
    long_groups = Counter()
    for seed in range(20):
        run = play(varied(W=4, T=2, L=2, slowest_group=40, slowest_step=0), seed)
        long_groups["in order" if [g for t in run.takes for g in t] == list(range(36)) else "overtaken"] += 1
    assert long_groups["overtaken"] > 10


def test_the_bound_is_checked_by_this_test_and_not_assumed(monkeypatch):
    """The same schedules with floors one version too low break the bound: the simulation is not blind."""
    real = AdmissionRule.floor
    monkeypatch.setattr(AdmissionRule, "floor", lambda self, rank: max(0, real(self, rank) - 1))
    with pytest.raises(AssertionError, match="bound 2"):
        play(FAST, 0)


def test_a_rule_that_is_too_strict_would_be_seen_to_get_stuck(monkeypatch):
    real = AdmissionRule.num_admissible
    monkeypatch.setattr(AdmissionRule, "num_admissible", lambda self, *, published: real(self, published=published) - 1)
    monkeypatch.setitem(globals(), "STUCK_S", 0.1)
    with pytest.raises(TimeoutError, match="take 0"):
        play(varied(T=0, L=0), 0)
