"""The training loop of async_rl over a real trainer actor whose steps take no time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from leeway.driver.kept import KeptPublications
from leeway.recipes.async_rl import AsyncRL
from leeway.replay.actor import TakeRefs
from leeway.runtime.supervisor import Supervisor
from leeway.trainer.actor import TrainerActor
from leeway.trainer.publish import Publisher
from leeway.weights import Canary, CanaryPrompts, Publication, plan_buckets

STEPS, UPDATES = 200, 4


class NoTime:
    """A trainer that computes nothing and publishes its version."""

    def __init__(self) -> None:
        self.policy_version = 0
        (plan,) = plan_buckets([(("w",), torch.int64, (1,))], 64)

        def buckets() -> list[Any]:
            memory = plan.empty()
            plan.spans[0].tensor(memory).fill_(self.policy_version)
            return [(plan, memory)]

        gatherer = SimpleNamespace(buckets=buckets, as_published=lambda plan, memory: (plan, memory))
        self._publisher = Publisher(gatherer, put=np.copy)  # type: ignore[arg-type]

    def forward_backward(self, batch: Any) -> dict[str, float]:
        return {}

    def optim_step(self) -> dict[str, float]:
        self.policy_version += 1
        return {}

    def publish(self) -> None:
        canary = Canary(CanaryPrompts(scored=[], cached=[]), [], [], [])
        self._publisher.publish(self.policy_version, lambda: canary)

    def claim_publication(self) -> Callable[[], Publication]:
        return self._publisher.claim()


class Remote:
    """Calls of an actor as Ray makes them: each begins in the order in which it was made."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(getattr(self._actor, name)(*args)))


class Driver(SimpleNamespace):
    """Everything else: answers at once."""

    async def take(self, timeout_s: float) -> TakeRefs:
        return TakeRefs(index=0, group_ids=[0], batches=[["batch"]] * UPDATES, metrics={}, rollouts=[])

    async def trained(self, group_ids: Any) -> dict[str, float]:
        return {}

    async def published(self, version: int) -> None:
        self.versions.append(version)

    async def publish(self, publication: Publication) -> None:
        held = publication.bucket_refs[0].view(np.int64)[0]
        assert held == publication.manifest.policy_version, "the weights of another version"


def test_steps_that_take_no_time_are_all_published_each_with_its_own_weights(tmp_path: Path) -> None:
    async def run() -> list[int]:
        actor = TrainerActor(role="trainer-0", log_file=tmp_path / "log", log_level="ERROR", cores=[])
        actor._trainer = NoTime()  # type: ignore[assignment]
        driver = Driver(versions=[])

        async def nothing(*_: Any) -> dict[str, float]:
            return {}

        job: Any = AsyncRL.__new__(AsyncRL)
        job._supervisor, job._timeout_s, job._total_steps = Supervisor(), 60.0, STEPS
        job._version, job._published, job._train_s, job._publishing = 0, -1, 0.0, None
        job._stepping = job._under_way = None
        job._config = SimpleNamespace(param_server=SimpleNamespace(publish_every=1))
        job._parts = SimpleNamespace(
            trainers=[Remote(actor)],
            buffer=Remote(driver),
            param_server=Remote(driver),
        )
        job._kept = KeptPublications(every=0, reach=0)
        job._report = SimpleNamespace(put=nothing)
        job._checkpoints = SimpleNamespace(after_step=nothing)
        job._audit = job._begin_take = job._maybe_evaluate = nothing
        await job._train_loop()
        return driver.versions

    assert asyncio.run(run()) == list(range(1, STEPS + 1))
