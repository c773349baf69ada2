"""Runs that use groups several times, killed and gone on from a checkpoint: no use is lost, and none is made twice."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leeway.config import load_config
from leeway.driver.checkpoints import Checkpoints, newest_state, saved_position
from leeway.replay import actor as replay_actor
from leeway.replay.actor import ReplayBufferActor
from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.position import Position
from leeway.replay.reuse import ReusePool
from leeway.replay.saved_groups import groups_as_text, groups_from_text
from leeway.runtime.supervisor import Supervisor
from leeway.types import Admission, Group, Offer, Task, Turn

from ..fakes import FakeRank
from .test_reuse import group, steady

P, L = 6, 9


@pytest.fixture
def config(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """config(**reuse settings); what would go into the object store stays as it is."""
    monkeypatch.setattr(replay_actor.ray, "put", lambda value: value)
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(10, 60))
    )
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: {model_path}}}\ntask: {{path: {tmp_path}/t.jsonl}}\nenv: {{reward: exact_match}}\n"
        f"cluster: {{device: cpu}}\ntrain: {{steps: 99, groups_per_step: {P}}}\nalgorithm: {{group_size: 2}}\n"
        f"staleness: {{max_policy_lag: {L}}}\n"
    )

    def build(*overrides: str) -> Any:
        return load_config(str(tmp_path / "c.yaml"), list(overrides))

    return build


@dataclass(frozen=True)
class Use:
    """One group in one batch: which rollout it is (no two have the same), and what was trained on."""

    rollout: int
    batch: int
    oldest_version: int
    logprobs: tuple[float, ...]


@dataclass
class Run:
    """What the driver and its collectors do around a replay actor, one batch ahead, as `recipes.async_rl` is."""

    config: Any
    log_file: Path
    rng: random.Random
    start: str | None = None
    uses: list[Use] = field(default_factory=list)
    saved: str = ""

    def __post_init__(self) -> None:
        start = json.loads(self.start) if self.start else None
        self.actor = ReplayBufferActor(self.config, role="replay", log_file=self.log_file, start=start)
        self.version = start["num_batches"] if start else 0
        self.held: list[Admission] = []
        self.uses = [use for use in self.uses if use.batch < self.version]  # later ones went with their weights
        self.upcoming: Any = None

    async def step(self, rollouts: Any) -> None:
        await self.actor.published(self.version)
        batch = self.upcoming or await self._take(rollouts)
        self.upcoming = await self._take(rollouts) if self.rng.random() < 0.7 else None
        self.uses += [use for share in batch.steps[0] for use in self._read(share, batch.index)]
        self.version += 1
        position = await self.actor.position(self.version)
        assert position is not None
        self.saved = json.dumps(position)
        await self.actor.trained(batch.group_ids)

    async def _take(self, rollouts: Any) -> Any:
        """Deliver in any order until the next batch is complete."""
        buffer = self.actor._buffer
        while buffer._window.missing_for_batch(last=False) is not None:
            if buffer._num_free_slots():
                self.held += await self.actor.admit(100, 5, "generator")
            admission = self.held.pop(self.rng.randrange(len(self.held)))
            version = max(admission.min_policy_version, self.version - self.rng.randint(0, 1))
            await self.actor.put([rolled_out(admission, next(rollouts), version, self.rng)])
        return await self.actor.take_batch(5)

    def _read(self, share: Any, batch: int) -> list[Use]:
        rows = []
        tokens, versions = share.response_tokens.view(-1, 4).tolist(), share.policy_versions.view(-1, 4)
        logprobs = share.behavior_logprobs.view(-1, 4).tolist()
        for i in range(0, len(tokens), 2):  # a group of two answers
            assert tokens[i][1] == tokens[i + 1][1]
            found = tuple(logprobs[i] + logprobs[i + 1])
            rows.append(Use(tokens[i][1], batch, int(versions[i : i + 2].min()), found))
        return rows


def rolled_out(admission: Admission, rollout: int, version: int, rng: random.Random) -> Group:
    """Two answers of four tokens; the second token says which rollout they are of."""
    first = group(admission.group_id, version=version).trajectories()
    trajectories = [
        dataclasses.replace(
            t,
            response_tokens=[2, rollout, 3, 0],
            loss_mask=[True] * 4,
            policy_versions=[version] * 4,
            behavior_logprobs=[-rng.random() for _ in range(4)],
        )
        for t in first
    ]
    return Group.of(group_id=admission.group_id, task_id=admission.task.task_id, trajectories=trajectories)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [(2, 0, 1), (3, 0, 2), (2, 1, 3), (3, 1, 1), (6, 0, 1), (2, 2, 2)])
@pytest.mark.parametrize("killed", [False, True])
def test_every_group_is_used_so_often_and_no_more_whatever_is_killed_in_between(
    config, tmp_path: Path, reuse: tuple[int, int, int], killed: bool
) -> None:
    max_uses, cooldown, window = reuse
    settings = config(
        f"replay.max_uses={max_uses}", f"replay.cooldown={cooldown}", f"staleness.reorder_window={window}"
    )
    num_batches, rollouts, rng = 24, itertools.count(10), random.Random(max_uses * 100 + cooldown * 10 + window)

    async def scenario() -> list[Use]:
        run = Run(settings, tmp_path / "log", rng)
        checkpoint = ""
        while run.version < num_batches:
            await run.step(rollouts)
            if rng.random() < 0.6:
                checkpoint = run.saved
            if killed and checkpoint and rng.random() < 0.4:
                run = Run(settings, tmp_path / "log", rng, start=checkpoint, uses=run.uses)
        return run.uses

    uses = asyncio.run(scenario())
    by_rollout: dict[int, list[Use]] = {}
    for use in uses:
        by_rollout.setdefault(use.rollout, []).append(use)
    for of_one in by_rollout.values():
        batches = [use.batch for use in of_one]
        assert batches == [batches[0] + (cooldown + 1) * i for i in range(len(batches))], (
            "each time its cooldown is over"
        )
        expected = len(range(batches[0], num_batches, cooldown + 1))
        assert len(batches) == min(max_uses, expected), "in admission order none is left out, and none comes too often"
        assert all(use.batch - use.oldest_version <= L for use in of_one)
        assert len({use.logprobs for use in of_one}) == 1, "the same numbers, bit for bit"
    sizes = [sum(use.batch == batch for use in uses) for batch in range(num_batches)]
    full = (max_uses - 1) * (cooldown + 1)
    assert sizes[full:] == [P] * (num_batches - full), "a run that goes on has no smaller batches"
    assert set(sizes[: cooldown + 1]) == {P // max_uses}


def test_what_is_drawn_while_a_checkpoint_is_saved_is_drawn_again_after_it(config, tmp_path: Path) -> None:
    """A train job removes old files in between."""
    drawn = threading.Event()

    async def admitted(actor: ReplayBufferActor) -> list[tuple[int, str]]:
        await actor.published(0)
        return [(a.group_id, a.task.task_id) for a in await actor.admit(4, 5, "generator")]

    async def scenario() -> None:
        actor, log = ReplayBufferActor(config(), role="replay", log_file=tmp_path / "log"), tmp_path / "log"
        actor._store = cast(Any, SimpleNamespace(forget_before=lambda batch: drawn.wait(60)))
        actor._needed_from = 0
        saving = asyncio.ensure_future(actor.position(0))
        await asyncio.sleep(0)
        first = await admitted(actor)
        drawn.set()
        start = json.loads(json.dumps(await saving))
        assert await admitted(ReplayBufferActor(config(), role="replay", log_file=log, start=start)) == first

    asyncio.run(scenario())


def test_groups_of_an_earlier_life_keep_their_ids_and_new_ones_get_others() -> None:
    """Explorers' own tasks take ids and no draws, so that nothing but the groups themselves says which are taken."""
    options: dict[str, Any] = {"max_uses": 2, "max_reused": 2, "updates_per_batch": 1, "max_lag": 4}
    rule = AdmissionRule(
        groups_per_batch=2, updates_per_batch=1, publish_every=1, reorder_window=1, target_lag=3, max_lag=3
    )

    async def begun(pool: ReusePool, start: Position | None, version: int) -> tuple[ReplayBuffer, list[Admission]]:
        buffer = ReplayBuffer(
            tasks=iter([Task(task_id="t", prompt="")]),
            **{"rule": rule, "num_batches": 9, "capacity": 40, "reuse": pool, "start": start, "num_collectors": 0},
        )
        await buffer.published(version)
        first, _ = buffer.where("a")
        own = deque((first + i, Task(task_id=f"own-{first + i}", prompt="")) for i in range(4))
        return buffer, await buffer.admit(2, timeout_s=5, collector="a", offer=Offer("a", own))

    async def scenario() -> None:
        pool = ReusePool(**options)
        buffer, admissions = await begun(pool, None, 0)
        await buffer.put([group(a.group_id) for a in admissions])
        served = await buffer.take_batch(timeout_s=5)
        assert served is not None
        await buffer.trained(served.group_ids)
        used = pool.after(1)
        assert len(used) == 2
        _, later = await begun(ReusePool(**options, start=used, num_batches=1), buffer.position(1), 1)
        assert len({a.group_id for a in later} | {u.group.group_id for u in used}) == 4

    asyncio.run(scenario())


@pytest.mark.slow
def test_it_goes_through_the_files_of_a_checkpoint(config, tmp_path: Path) -> None:
    settings = config("replay.max_uses=2", "checkpoint.every=1")

    async def scenario() -> None:
        rollouts, rank = itertools.count(10), FakeRank()
        run = Run(settings, tmp_path / "log", random.Random(0))
        for _ in range(3):
            await run.step(rollouts)
        checkpoints = Checkpoints(
            tmp_path / "saved",
            config=settings,
            trainers=[rank],
            supervisor=Supervisor(),
            position=run.actor.position,
        )
        rank.step = run.version
        await checkpoints.at_end()
        folder = newest_state(tmp_path / "saved")
        assert folder is not None
        start = saved_position(folder)
        assert start == json.loads(run.saved)
        again = Run(settings, tmp_path / "log", random.Random(1), start=json.dumps(start))
        await again.step(rollouts)
        assert {use.rollout for use in again.uses} & {use.rollout for use in run.uses if use.batch == 2}

    asyncio.run(scenario())


def test_a_checkpoint_holds_what_was_there_when_its_last_batch_was_served() -> None:
    options: dict[str, Any] = {"max_uses": 3, "max_reused": 4, "updates_per_batch": 1, "max_lag": 2}
    pool, batches = ReusePool(**options), steady(6)
    for i, fresh in enumerate(batches[:4]):
        pool.serve(i, fresh)
    for num_batches in (1, 2, 3, 4):  # asked when batches up to 3 have been served
        again = ReusePool(**options, start=pool.after(num_batches), num_batches=num_batches)
        other = ReusePool(**options)
        for i, fresh in enumerate(batches[:num_batches]):
            other.serve(i, fresh)
        for i, fresh in enumerate(batches[num_batches:], start=num_batches):
            got, expected = again.serve(i, fresh), other.serve(i, fresh)
            assert [g.task_id for g in got] == [g.task_id for g in expected]
            assert all(g.group_id < 0 or g.group_id == int(g.task_id) for g in got), "no number is given twice"
    pool.forget_before(3)
    assert sorted(pool._after) == [3, 4]


def test_groups_come_back_from_text_as_they_were() -> None:
    pool = ReusePool(max_uses=2, max_reused=2, updates_per_batch=1, max_lag=9, priority=lambda g: 0.1 + g.group_id)
    plain, rich = group(0, version=3), group(7, rewards=(0.1, 1 / 3))
    attempts = rich.trajectories()
    other = attempts[1]
    turns = [Turn(start=0, stop=1, state="a", reward=0.5)]
    attempts[0] = dataclasses.replace(
        attempts[0], other_conversations=[other], turns=turns, metrics={"exact_match": 0.1}, text="é\n"
    )
    rich = Group.of(attempts, group_id=7, task_id="7")
    pool.serve(0, [plain, dataclasses.replace(rich, greedy_reward=0.7, attempt=2)])
    text = groups_as_text(pool.after(1))
    assert text.isascii()
    assert groups_from_text(text) == pool.after(1)
    assert groups_from_text(json.loads(json.dumps(text))) == pool.after(1)
