"""The staleness rule as a property of the real classes, over thousands of random runs on a virtual clock.

The real `ReplayBuffer` (with its `AdmissionRule`, `Window` and `Ledger`) and the real `ParameterServer`; generators and
trainer are played. A run has random group, step, publication and pull times, generators that die and others that join,
publications that the next step waits for or not, groups that fail, are retried or filtered, and tasks that may end. A
group's tokens are sampled one by one, and the weights may change between them. Generators are lazy: most pull only when
a group forces them to. Time is virtual, so a wait that nothing would ever end is seen at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from leeway.config.derived import max_outstanding_groups, versions_in_flight
from leeway.param_server.server import ParameterServer
from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.operators import filter_zero_variance
from leeway.replay.reuse import ReusePool
from leeway.types import Admission, Group, Task, Trajectory
from leeway.weights import Canary, CanaryPrompts, Manifest, Publication

from ..tiers import sample
from .virtual_clock import VirtualClock

STUCK_S = 1e5
"""A wait of this much virtual time is a deadlock: whole runs take hundreds of seconds."""
NUM_SCHEDULES = sample(300, 2000)
TOKENS = 2
"""Moments at which a group samples tokens."""


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Joins the run, and perhaps dies; `lazy` ones pull only when a group forces them to."""

    joins_s: float
    lives_s: float | None
    max_in_flight: int
    lazy: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """P new groups per batch; each is used at most K times, `cooldown` batches or more between them, all within L."""

    P: int
    u: int
    n: int
    W: int
    T: int
    L: int
    num_batches: int | None
    num_tasks: int | None
    generators: tuple[Generator, ...]
    overlapped: bool  # publication runs beside the next step
    group_s: float
    long_tail: bool
    step_s: float
    publish_s: float
    pull_s: float
    failed: float
    retried: float
    filtered: float
    K: int = 1
    cooldown: int = 0
    priority: bool = False
    operator_s: float | None = None  # operators run elsewhere, for up to so long; None: in the buffer
    one_version: bool = False  # a group ends under the version that it began with: adapters

    @property
    def first_L(self) -> int:
        """The bound at a group's first use."""
        return self.L - self.u * (self.cooldown + 1) * (self.K - 1)

    @property
    def enough_generators(self) -> bool:
        """Generation is far ahead of training, all of the time, and the run is long enough for that to show."""
        width = sum(g.max_in_flight for g in self.generators if g.lazy and g.joins_s == 0 and g.lives_s is None)
        fast = (
            10 * max(self.group_s, self.pull_s, self.operator_s or 0.0) <= self.step_s * self.u and not self.long_tail
        )
        return width >= self.P * (self.T + 2) and fast and (self.num_batches or 0) > self.T + 2 * self.n

    @property
    def reachable(self) -> bool:
        """Some batch is last used at exactly L after a version that is published."""
        return any((self.u * (d + 1) - 1 - self.L) % self.n == 0 for d in range(self.n))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Hypothesis draws what the rule is about, so that a failure shrinks; times and accidents come from one seed."""
    P = draw(st.integers(1, 5))
    lockstep = draw(st.sampled_from((False,) * 7 + (True,)))
    u = 1 if lockstep else draw(st.sampled_from([u for u in (1, 1, 2, 3) if u <= P]))
    n = 1 if lockstep else draw(st.sampled_from((1, 1, 2, 3)))
    W = 1 if lockstep else draw(st.sampled_from((1, 1, 2, P, 2 * P + 1)))
    T = u * (-(-(W - 1) // P) + 1) + n - 2 + (0 if lockstep else draw(st.sampled_from((0, 0, 1, 3))))
    num_batches = draw(st.none() | st.integers(1, 8))
    # Hypothesis likes the same few seeds: what else is drawn makes others of them.
    rng = random.Random(f"{P} {u} {n} {W} {T} {num_batches} {draw(st.integers(0, 2**32))}")
    # One generator stays, so that the run can end; the others come and go.
    generators = [Generator(joins_s=0.0, lives_s=None, max_in_flight=rng.choice((1, 8, 40)), lazy=rng.random() < 0.3)]
    for _ in range(rng.choice((0, 1, 2))):
        generators.append(
            Generator(
                joins_s=rng.choice((0.0, 0.0, 0.5, 4.0)),
                lives_s=rng.choice((None, 0.1, 0.5, 2.0)),
                max_in_flight=rng.randint(1, 8),
                lazy=rng.random() < 0.5,
            )
        )
    group_s, step_s = rng.choice(((0.05, 1.0), (0.5, 0.5), (3.0, 1.0), (1.0, 0.1)))
    long_tail = rng.random() < 0.3
    operator_s = rng.choice((None, 0.0, 0.05, 3.0))
    if rng.random() < 0.25:  # a generator that is always far ahead of the trainer, in a long run
        operator_s = rng.choice((None, 0.0, 0.05))
        group_s, step_s, long_tail = 0.05, 4.0, False
        generators[0] = Generator(joins_s=0.0, lives_s=None, max_in_flight=40, lazy=True)
        num_batches = T + 2 * n + 2
    K = 1 if lockstep else draw(st.sampled_from((1, 1, 2, 3)))
    cooldown = draw(st.sampled_from((0, 0, 1, 2))) if K > 1 else 0
    failed, retried, filtered = (0.0 if rng.random() < 0.5 else rng.choice((0.1, 0.3)) for _ in range(3))
    return Schedule(
        P=P,
        u=u,
        n=n,
        W=W,
        T=T,
        L=T + u * (cooldown + 1) * (K - 1) + (0 if lockstep else draw(st.sampled_from((0, 0, 0, 1, 2)))),
        K=K,
        cooldown=cooldown,
        priority=not lockstep and rng.random() < 0.3,
        num_batches=num_batches,
        num_tasks=rng.randint(1, 6 * P) if num_batches is None else None,
        generators=tuple(reversed(generators)),
        overlapped=rng.random() < 0.5,
        group_s=group_s,
        long_tail=long_tail,
        step_s=step_s,
        publish_s=rng.choice((0.0, 0.1, 4.0)),
        pull_s=rng.choice((0.0, 0.05)),
        failed=failed,
        retried=retried,
        filtered=filtered,
        one_version=rng.random() < 0.3,
        operator_s=operator_s,
    )


def publication(version: int) -> Publication:
    canary = Canary(CanaryPrompts(scored=[], cached=[]), [], [], [])
    return Publication(Manifest(version, [], [], canary, ""), [])


@dataclass
class Run:
    """One schedule, played. The bound is checked at every use; everything else is recorded."""

    schedule: Schedule
    rng: random.Random
    lags: Counter[int] = field(default_factory=Counter)
    batches: list[list[int]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    trained: Counter[str] = field(default_factory=Counter)
    used_in: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    tasks_of: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    issued_again: int = 0
    mixed: int = 0
    most_in_use: int = 0
    most_versions: int = 0

    async def play(self) -> None:
        s = self.schedule
        self.server = ParameterServer()
        tasks: Iterable[int] = range(10_000 if s.num_tasks is None else s.num_tasks)
        self.buffer = ReplayBuffer(
            tasks=(Task(task_id=str(i), prompt="") for i in tasks),
            rule=AdmissionRule(
                groups_per_batch=s.P,
                updates_per_batch=s.u,
                publish_every=s.n,
                reorder_window=s.W,
                target_lag=s.T,
                max_lag=s.first_L,
            ),
            num_batches=s.num_batches,
            capacity=max_outstanding_groups(s.P, s.u, s.W, s.T),
            operators=[filter_zero_variance],
            operated_elsewhere=None if s.operator_s is None else self._operated,
            reuse=ReusePool(
                max_uses=s.K,
                max_reused=s.P * (s.K - 1),
                updates_per_batch=s.u,
                max_lag=s.L,
                cooldown=s.cooldown,
                priority=_worth if s.priority else None,
                decay=1.0,
            ),
            priority=_worth if s.priority else None,
            num_collectors=sum(g.joins_s == 0 for g in s.generators),
        )
        generators = [asyncio.create_task(self._lifetime(i, g)) for i, g in enumerate(s.generators)]
        trainer = asyncio.create_task(self._trainer())
        await asyncio.wait({trainer, *generators}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (trainer, *generators):
            if not task.done():
                task.cancel()
        await asyncio.gather(trainer, *generators)

    async def _operated(self, group: Group) -> Group | str:
        await asyncio.sleep(self.rng.random() * (self.schedule.operator_s or 0.0))
        return filter_zero_variance(group) or group

    # The trainer's side.

    async def _trainer(self) -> None:
        s = self.schedule
        version = 0
        await self._publish(0)
        publishing = None
        while (batch := await self.buffer.take_batch(timeout_s=STUCK_S)) is not None:
            groups = [*batch.groups, *batch.reused]
            for group in groups:
                self.used_in[group.group_id].append(len(self.batches))
            for _ in range(s.u):
                self._use(groups, version)
                await asyncio.sleep(s.step_s * self.rng.uniform(0.8, 1.2))
                version += 1
                if version % s.n == 0:
                    if publishing is not None:
                        await publishing
                    publishing = asyncio.create_task(self._publish(version))
                    if not s.overlapped:
                        await publishing
            await self.buffer.trained([g.group_id for g in groups])
            self.batches.append([g.group_id for g in batch.groups])
            self.trained.update(text for g in groups for text in g.texts)
        if publishing is not None:
            await publishing
        await self.buffer.close()

    def _use(self, groups: Sequence[Group], version: int) -> None:
        for group in groups:
            oldest, newest = group.policy_versions()
            assert newest <= version, f"group {group.group_id} comes from the future"
            assert version - oldest <= self.schedule.L, (
                f"group {group.group_id}: token of version {oldest} used at version {version}: bound {self.schedule.L}"
            )
            self.lags.update((version - oldest, version - newest))
            self.mixed += oldest < newest

    async def _publish(self, version: int) -> None:
        await asyncio.sleep(self.schedule.publish_s * self.rng.random())
        await self.server.publish(publication(version))
        await asyncio.sleep(self.schedule.publish_s * self.rng.random())
        await self.buffer.published(version)

    # The generators' side.

    async def _lifetime(self, index: int, generator: Generator) -> None:
        """Join, generate, and perhaps die in the middle of everything; then what was held is issued again."""
        await asyncio.sleep(generator.joins_s)
        name = f"generator-{index}"
        living = asyncio.create_task(self._generate(name, generator))
        await asyncio.wait({living}, timeout=generator.lives_s)
        if not living.done():
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await asyncio.sleep(self.rng.random())  # until somebody notices
            self.issued_again += len(await self.buffer.mark_dead(name, "died"))
        else:
            living.result()

    async def _generate(self, name: str, generator: Generator) -> None:
        weights = SimpleNamespace(version=-1, pulling=asyncio.Lock(), begun=Counter())
        in_flight: set[asyncio.Task[None]] = set()
        try:
            while True:
                if len(in_flight) == generator.max_in_flight:
                    await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for task in [t for t in in_flight if t.done()]:
                    task.result()
                    in_flight.remove(task)
                free = generator.max_in_flight - len(in_flight)
                admissions = await self.buffer.admit(free, timeout_s=STUCK_S, collector=name)
                at_work = [task for task in in_flight if not task.done()]
                assert len(at_work) + len(admissions) <= generator.max_in_flight
                self.most_in_use = max(self.most_in_use, self.buffer.stats().slots_in_use)
                for admission in admissions:
                    self.tasks_of[admission.task.task_id].add(admission.group_id)
                if not admissions:
                    await asyncio.gather(*in_flight)
                    return
                in_flight |= {asyncio.create_task(self._group(a, weights, generator)) for a in admissions}
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def _pull(self, weights: SimpleNamespace, at_least: int) -> None:
        async with weights.pulling:
            if weights.version >= at_least:
                return
            newest = await self.server.pull(newer_than=at_least - 1, timeout_s=STUCK_S)
            assert newest is not None, f"a group waits for version {at_least}, which never came"
            await asyncio.sleep(self.schedule.pull_s)
            weights.version = newest.manifest.policy_version
            self._hold(weights)

    def _hold(self, weights: SimpleNamespace) -> None:
        """An engine that serves adapters holds these versions now."""
        s, held = self.schedule, len({weights.version, *+weights.begun})
        assert not s.one_version or held <= versions_in_flight(s.first_L, s.u, s.n), f"{held} versions are in use"
        self.most_versions = max(self.most_versions, held)

    async def _group(self, admission: Admission, weights: SimpleNamespace, generator: Generator) -> None:
        s, rng, group_id = self.schedule, self.rng, admission.group_id
        while True:
            await self._pull(weights, max(0, admission.min_policy_version))
            versions, first = [], weights.version
            weights.begun[first] += s.one_version
            for _ in range(TOKENS):
                if not generator.lazy and self.server.newest_version >= 0:
                    await self._pull(weights, self.server.newest_version)
                versions.append(first if s.one_version else weights.version)
                await asyncio.sleep(s.group_s / TOKENS * (rng.paretovariate(1.2) if s.long_tail else rng.random()))
            weights.begun[first] -= s.one_version
            if rng.random() < s.failed:
                self.lost.add(f"{group_id}")
                return await self.buffer.fail(group_id, "failed", attempt=admission.attempt)
            if rng.random() >= s.retried:
                break
            await self.buffer.retried(group_id, attempt=admission.attempt)
        equal = rng.random() < s.filtered
        trajectories = [sampled(f"{group_id}.{admission.attempt}.{i}", versions, 0.0 if equal else i) for i in (0, 1)]
        group = Group.of(
            group_id=group_id, task_id=admission.task.task_id, trajectories=trajectories, attempt=admission.attempt
        )
        await self.buffer.put([group])
        # Delivered: whoever dies after this line has lost nothing.
        if equal:
            self.lost.add(f"{group_id}")
        else:
            self.finished.update(t.text for t in trajectories)


def sampled(name: str, versions: list[int], reward: float) -> Trajectory:
    return Trajectory(
        prompt_tokens=[1],
        response_tokens=[2] * len(versions),
        loss_mask=[True] * len(versions),
        behavior_logprobs=[-1.0] * len(versions),
        policy_versions=versions,
        reward=reward,
        finish_reason="stop",
        text=name,
    )


def _worth(group: Group) -> float:
    """Any order at all."""
    return float(group.group_id * 7919 % 13)


def play(schedule: Schedule, seed: int) -> Run:
    run = Run(schedule, random.Random(seed))
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(run.play())
    return run


def check(s: Schedule, run: Run) -> None:
    """What must be true of every run that has ended."""
    taken = [g for batch in run.batches for g in batch]
    assert len(taken) == len(set(taken)), "a group was taken twice"
    assert all(len(groups) == 1 for groups in run.tasks_of.values()), "a task was drawn for two groups"
    assert run.most_in_use <= max_outstanding_groups(s.P, s.u, s.W, s.T)
    for k, batch in enumerate(run.batches):
        newer = sorted(itertools.chain(*run.batches[:k]), reverse=True)
        assert all(sum(other > group for other in newer) <= s.W - 1 for group in batch), "overtaken too often"
        assert s.priority or batch == sorted(batch), "not in admission order"
    assert set(run.trained) == run.finished, "a finished sample was not trained on, or an unfinished one was"
    assert max(run.trained.values(), default=1) <= s.K, "a sample was trained on more often than allowed"
    for used_in in run.used_in.values():
        assert all(later - before > s.cooldown for before, later in itertools.pairwise(used_in)), "no cooldown"
        left = (len(run.batches) - 1 - used_in[0]) // (s.cooldown + 1)  # further uses that the run had time for
        assert s.priority or len(used_in) == 1 + min(s.K - 1, left), "in admission order all uses are made"
    stats = run.buffer.stats()
    assert stats.admitted == stats.groups_taken + stats.filtered + stats.failed, f"something was dropped: {stats}"
    assert stats.groups_taken == len(taken) == len(run.trained) // 2
    assert stats.filtered + stats.failed == len(run.lost)
    assert (stats.dropped_stale, stats.slots_in_use, stats.groups_ready) == (0, 0, 0)
    if s.num_batches is not None:
        assert [len(batch) for batch in run.batches] == [s.P] * s.num_batches
    else:
        assert stats.admitted == s.num_tasks, "tasks were left over"
        assert all(len(batch) == s.P for batch in run.batches[:-1])
    if s.L == 0:
        assert set(run.lags) <= {0}, "lockstep: every token is of exactly the version that uses it"


many = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate, Phase.shrink],
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [40, pytest.param(NUM_SCHEDULES, marks=pytest.mark.slow)])
def test_every_schedule_holds_the_bound_trains_everything_once_and_ends(number):
    seen: Counter[str] = Counter()

    @settings(many, max_examples=number)
    @given(schedules(), st.integers(0, 2**32))
    def holds(s: Schedule, seed: int) -> None:
        run = play(s, seed)
        check(s, run)
        seen["schedules"] += 1
        seen["issued again"] += run.issued_again > 0
        seen["lockstep"] += s.L == 0
        seen["groups of several versions"] += run.mixed > 0
        seen["used again"] += any(len(used_in) > 1 for used_in in run.used_in.values())
        seen["used again at the bound"] += s.K > 1 and max(run.lags, default=0) == s.L
        seen["of one version"] += s.one_version
        seen["operators elsewhere"] += s.operator_s is not None
        seen["all versions in use"] += s.one_version and run.most_versions == versions_in_flight(s.first_L, s.u, s.n)
        if s.W == 1 and s.T == s.L and s.enough_generators and s.reachable:
            seen["tight"] += 1
            seen["tight and reached"] += max(run.lags, default=0) == s.L

    holds()
    print(seen)
    assert seen["schedules"] >= number
    if number < NUM_SCHEDULES:  # too few to count what they were
        return
    # None of the properties above is empty, and a rule that is merely too careful does not pass. (Far below what is
    # drawn: Hypothesis takes constants from the modules that happen to be loaded, so counts differ between sessions.)
    assert seen["issued again"] > NUM_SCHEDULES // 20, seen
    assert seen["groups of several versions"] > NUM_SCHEDULES // 40, seen
    assert seen["operators elsewhere"] > NUM_SCHEDULES // 4, seen
    assert seen["lockstep"] > NUM_SCHEDULES // 40, seen
    assert seen["used again"] > NUM_SCHEDULES // 20, seen
    assert seen["used again at the bound"] > NUM_SCHEDULES // 80, seen
    assert seen["all versions in use"] > NUM_SCHEDULES // 160, seen
    assert seen["tight"] > NUM_SCHEDULES // 160, seen
    assert seen["tight and reached"] >= 0.8 * seen["tight"], seen


PLAIN = Schedule(
    P=3,
    u=1,
    n=1,
    W=1,
    T=2,
    L=2,
    num_batches=6,
    num_tasks=None,
    generators=(Generator(joins_s=0.0, lives_s=None, max_in_flight=40, lazy=True),),
    overlapped=True,
    group_s=0.05,
    long_tail=False,
    step_s=1.0,
    publish_s=0.1,
    pull_s=0.0,
    failed=0.0,
    retried=0.0,
    filtered=0.0,
)


def test_a_min_policy_version_one_too_low_would_be_seen(monkeypatch):
    real = AdmissionRule.min_policy_version
    monkeypatch.setattr(
        AdmissionRule, "min_policy_version", lambda self, queue_index: max(0, real(self, queue_index) - 1)
    )
    monkeypatch.setattr(AdmissionRule, "may_admit", lambda self, queue_index, *, published: True)
    with pytest.raises(AssertionError, match="bound 2"):
        play(PLAIN, 0)


def test_versions_that_groups_of_one_version_need_are_no_more_than_the_bound_allows(monkeypatch):
    """A generator that pulls as soon as it can, with groups that take longer than a step."""
    eager = Generator(joins_s=0.0, lives_s=None, max_in_flight=40, lazy=False)
    schedule = replace(PLAIN, W=3, T=3, L=3, one_version=True, generators=(eager,), group_s=9.0, long_tail=True)
    run = play(schedule, 0)
    check(schedule, run)
    assert run.mixed == 0
    assert max(run.lags) == 3
    assert run.most_versions == versions_in_flight(3, 1, 1) == 4


REUSED = replace(PLAIN, K=3, L=4, num_batches=8)


def test_a_first_use_that_leaves_no_room_for_the_others_would_be_seen(monkeypatch):
    run = play(REUSED, 0)
    check(REUSED, run)
    assert max(run.lags) == REUSED.L
    monkeypatch.setattr(ReusePool, "_in_bound", lambda self, used, batch: True)
    check(REUSED, play(REUSED, 0))  # by construction: the check at each use is never what holds it
    tighter = replace(REUSED, L=3, priority=True)  # with no more than PLAIN's room for the first use
    monkeypatch.setattr(Schedule, "first_L", property(lambda self: PLAIN.L))
    with pytest.raises(AssertionError, match="bound 3"):
        play(tighter, 0)


def test_a_group_that_is_used_once_too_often_would_be_seen(monkeypatch):
    real = ReusePool.__init__
    monkeypatch.setattr(ReusePool, "__init__", lambda self, **o: real(self, **o | {"max_uses": o["max_uses"] + 1}))
    roomy = replace(REUSED, L=9)  # where the bound does not forbid it
    with pytest.raises(AssertionError, match="more often than allowed"):
        check(roomy, play(roomy, 0))


def test_a_dead_generator_whose_groups_are_not_issued_again_would_be_seen(monkeypatch):
    dies = Generator(joins_s=0.0, lives_s=0.01, max_in_flight=8, lazy=True)
    stays = Generator(joins_s=5.0, lives_s=None, max_in_flight=8, lazy=True)
    schedule = replace(PLAIN, generators=(dies, stays))
    run = play(schedule, 0)
    check(schedule, run)
    assert run.issued_again == 6, "three batches may be under way at version 0, and 8 are free to start them"

    async def forget(self: ReplayBuffer, collector: str, reason: str) -> list[int]:
        return []

    monkeypatch.setattr(ReplayBuffer, "mark_dead", forget)
    with pytest.raises(TimeoutError, match="group 0 and 2 more that must be in batch 0"):
        play(schedule, 0)
