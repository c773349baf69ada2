"""The buffer as torchrl's: storage, sampler, writer, transform and collate do the work, and can be exchanged."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from torchrl.envs.transforms import RewardScaling, Transform

from leeway.algorithms.presets import ADVANTAGES
from leeway.replay.admission import AdmissionRule
from leeway.replay.assemble import Assembler
from leeway.replay.buffer import ReplayBuffer, ServedBatch
from leeway.replay.reuse import ReusePool, spread
from leeway.types import Group, Task, TrainBatch

from ..segment_trees import provide_trees
from ..trainers import random_trajectories

P, W, T = 2, 5, 4


def tasks_after(count: int, total: int) -> Iterator[Task]:
    return (Task(task_id=f"t{i}", prompt="", info={"n": i}) for i in range(count, total))


def buffer_of(*, after: int = 0, total: int = 60, **extra: Any) -> ReplayBuffer:
    return ReplayBuffer(
        tasks=tasks_after(after, total),
        rule=AdmissionRule(
            groups_per_batch=P, updates_per_batch=1, publish_every=1, reorder_window=W, target_lag=T, max_lag=T
        ),
        num_batches=None,
        capacity=64,
        **extra,
    )


def group_of(group_id: int, *, task_id: str = "t", version: int = 0, attempt: int = 0) -> Group:
    """The larger the id, the larger the spread of the rewards."""
    made = random_trajectories(group_id, 4, version=version)
    made = [replace(t, reward=r) for t, r in zip(made, (0.0, 0.0, 1.0, 1.0 + group_id), strict=True)]
    return Group.of(made, group_id=group_id, task_id=task_id, attempt=attempt)


class Run:
    """Plays collectors and trainer. What is delivered depends on the group alone; its order on `seed`."""

    def __init__(self, buffer: ReplayBuffer, *, seed: int, version: int = 0) -> None:
        self.buffer, self.rng, self.version = buffer, random.Random(seed), version
        self.held: dict[int, Any] = {}
        self.taken: list[tuple[list[int], list[str]]] = []

    async def step(self, *, then_trained: bool = True) -> ServedBatch | None:
        """Admit what may start, deliver in any order until a batch is complete, take it and train."""
        buffer = self.buffer
        while True:
            for admission in await self.admit():
                self.held[admission.group_id] = admission
            if buffer._batch_is_due():
                break
            admission = self.held.pop(self.rng.choice(sorted(self.held)))
            await buffer.put([self.delivered(admission)])
        batch = await buffer.take_batch(timeout_s=200)
        if batch is not None and then_trained:
            await self.trained(batch)
        return batch

    async def admit(self) -> list[Any]:
        asking = asyncio.ensure_future(self.buffer.admit(64, timeout_s=200, collector="generator-0"))
        for _ in range(5):
            await asyncio.sleep(0)
        if asking.done():
            return asking.result()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return []

    def delivered(self, admission: Any) -> Group:
        return group_of(
            admission.group_id,
            task_id=admission.task.task_id,
            version=admission.min_policy_version,
            attempt=admission.attempt,
        )

    async def trained(self, batch: ServedBatch) -> None:
        for group in [*batch.groups, *batch.reused]:
            assert self.version - group.policy_versions()[0] <= T, "the bound"
        self.taken.append((batch.group_ids, [g.task_id for g in batch.groups]))
        await self.buffer.trained(batch.group_ids)
        self.version += 1
        await self.buffer.published(self.version)


# ----------------------------------------------------------------------------------------------------- saved and loaded


def by_files(saved: ReplayBuffer, into: ReplayBuffer, folder: Path) -> None:
    saved.dumps(folder / "buffer")
    assert {f.suffix for f in folder.rglob("*") if f.is_file()} == {".json", ".safetensors"}, "nothing is pickled"
    into.loads(folder / "buffer")


def by_state_dict(saved: ReplayBuffer, into: ReplayBuffer, folder: Path) -> None:
    into.load_state_dict(copy.deepcopy(saved.state_dict()))


Way = Callable[[ReplayBuffer, ReplayBuffer, Path], None]


@pytest.mark.parametrize("way", [by_files, by_state_dict])
@pytest.mark.parametrize("max_uses", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_copy_goes_on_where_it_was_saved(way: Way, steps: int, max_uses: int, tmp_path: Path) -> None:
    """In the middle of everything: groups waiting, in flight, served; every group exactly once, within the bound."""

    def reuse() -> ReusePool:
        return ReusePool(max_uses=max_uses, max_reused=1 if max_uses > 1 else 0, updates_per_batch=1, max_lag=T)

    async def scenario() -> None:
        run = Run(buffer_of(total=24, reuse=reuse()), seed=1)
        await run.buffer.published(0)
        for _ in range(steps):
            await run.step()
        served = await run.step(then_trained=False)
        assert served is not None
        drawn = run.buffer._last_draw + 2  # one is drawn ahead
        other = Run(buffer_of(after=drawn, total=24, reuse=reuse()), seed=2, version=run.version)
        way(run.buffer, other.buffer, tmp_path)
        in_flight, stats = sorted(run.held), run.buffer.stats()
        assert other.buffer.stats().slots_in_use == stats.slots_in_use
        assert other.buffer.stats().groups_ready == stats.groups_ready
        await other.trained(served)
        again = {a.group_id: a for a in await other.admit()}
        assert in_flight == [g for g in sorted(again) if again[g].attempt == 1], "issued again, before new ones"
        other.held = again
        late = run.held[in_flight[0]] if in_flight else None
        if late is not None:
            await other.buffer.put([run.delivered(late)])  # from a collector of the old buffer
        while await other.step() is not None:
            pass
        ids = [g for taken in (run.taken, other.taken) for ids, new in taken for g in ids[: len(new)]]
        assert sorted(ids) == list(range(24)), "each group exactly once"
        names = [name for taken in (run.taken, other.taken) for _, new in taken for name in new]
        assert sorted(names) == sorted(f"t{i}" for i in range(24)), "each task exactly once"

    asyncio.run(scenario())


def test_groups_come_back_from_files_bit_for_bit(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(buffer_of(), seed=0)
        await run.buffer.published(0)
        held = await run.admit()
        groups = [run.delivered(a) for a in held[:4]]
        await run.buffer.put(groups)
        run.buffer.dumps(tmp_path)
        other = buffer_of(after=run.buffer._last_draw + 2)
        other.loads(tmp_path)
        batch = await other.take_batch(timeout_s=200)
        assert batch is not None
        assert batch.groups == groups[:2]
        assert json.loads((tmp_path / "run.json").read_text())["published"] == 0

    asyncio.run(scenario())


def test_only_a_fresh_buffer_is_loaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(buffer_of(), seed=0)
        await run.buffer.published(0)
        await run.admit()
        run.buffer.dumps(tmp_path)
        with pytest.raises(RuntimeError, match="only before it has admitted a group"):
            run.buffer.loads(tmp_path)

    asyncio.run(scenario())


# --------------------------------------------------------------------------------------------------- other parts in it


@pytest.mark.parametrize(
    "sampler", [None, RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(64, alpha=1.0, beta=1.0)]
)
@pytest.mark.parametrize("storage", [None, lambda: LazyStackStorage(64)])
def test_any_sampler_and_storage_keep_every_guarantee(
    sampler: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide_trees(monkeypatch)
    np.random.seed(0)
    torch.manual_seed(0)

    async def scenario() -> list[int]:
        own = {"sampler": sampler and sampler(), "storage": storage and storage()}
        run = Run(buffer_of(total=40, **own), seed=3)
        await run.buffer.published(0)
        while await run.step() is not None:
            pass
        ids = [g for ids, _ in run.taken for g in ids]
        assert sorted(ids) == list(range(40))
        return ids

    ids = asyncio.run(scenario())
    assert (ids == sorted(ids)) is False, "or there was nothing to choose"


def test_a_prioritized_sampler_takes_the_best_that_the_window_leaves_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of five finished groups the window asks for none by name: the two with the largest spread are taken."""
    provide_trees(monkeypatch)
    np.random.seed(0)

    async def scenario(**own: Any) -> list[int]:
        run = Run(buffer_of(priority=spread, **own), seed=0)
        await run.buffer.published(0)
        await run.buffer.put([run.delivered(a) for a in (await run.admit())[:5]])
        batch = await run.buffer.take_batch(timeout_s=200)
        assert batch is not None
        return batch.group_ids

    assert asyncio.run(scenario(sampler=PrioritizedSampler(64, alpha=20.0, beta=1.0))) == [3, 4]


@pytest.mark.slow
def test_torchrls_prioritized_sampler_and_a_transform_train(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrl's parts in our buffer, our trainer behind it: rewards arrive scaled, weights move, nothing is lost."""
    provide_trees(monkeypatch)
    np.random.seed(0)
    seen: list[TensorDictBase] = []

    class Looks(Transform):
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            seen.append(tensordict)
            return tensordict

    trainer = make()
    before = {name: p.detach().clone() for name, p in trainer._model.named_parameters()}
    assembler = Assembler(
        advantage=ADVANTAGES["grpo"](), updates_per_batch=1, num_ranks=1, skip_zero_advantage=True, rollouts_per_step=0
    )

    async def scenario() -> None:
        scaling = RewardScaling(loc=0.0, scale=0.5, in_keys=["rewards"])
        buffer = buffer_of(sampler=PrioritizedSampler(64, alpha=0.7, beta=0.5), transform=scaling, priority=spread)
        buffer.append_transform(Looks())
        run = Run(buffer, seed=0)
        await buffer.published(0)
        for step in range(3):
            batch = await run.step(then_trained=False)
            assert batch is not None
            for group in batch.groups:
                assert group.rewards == [0.0, 0.0, 0.5, 0.5 + group.group_id / 2]
            (share,) = assembler(batch.index, batch.groups).steps[0]
            assert isinstance(share, TrainBatch)
            metrics = trainer.forward_backward(share) | trainer.optim_step()
            assert np.isfinite(metrics["train/grad_norm"])
            assert trainer.policy_version == step + 1
            await run.trained(batch)

    asyncio.run(scenario())
    assert len(seen) == 3
    assert set(seen[0].keys()) >= {"response_tokens", "behavior_logprobs", "policy_versions", "rewards", "group_id"}
    assert any(not p.equal(before[name]) for name, p in trainer._model.named_parameters())


def test_a_transform_that_changes_which_groups_they_are_is_refused() -> None:
    class Swaps(Transform):
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict[:1]

    async def scenario() -> None:
        run = Run(buffer_of(transform=Swaps()), seed=0)
        await run.buffer.published(0)
        await run.buffer.put([run.delivered(a) for a in (await run.admit())[:5]])
        with pytest.raises(RuntimeError, match="a transform of the buffer made other groups"):
            await run.buffer.take_batch(timeout_s=200)

    asyncio.run(scenario())
