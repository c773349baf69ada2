"""What every engine that holds adapters is held to: one suite, run over each with a trainer of a small real model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leeway.collector.adapter_sync import AdapterSync
from leeway.collector.engine import EngineSettings
from leeway.config.inputs import LoraConfig
from leeway.config.learning import OptimizerConfig
from leeway.trainer.trainer import Trainer
from leeway.transports.object_store import ObjectStore
from leeway.types import Trajectory
from leeway.weights import Publication, Tolerance, WeightSyncError

from .trainers import batch_of, random_trajectories

LORA = LoraConfig(rank=4, alpha=8.0)
OPTIMIZER = OptimizerConfig(lr=0.03, max_skipped_steps=0)
PROMPT = [5, 9, 33, 2, 60]
LONG = 120
"""Tokens of an answer that lasts longer than a load."""


def step(trainer: Trainer) -> None:
    trainer.forward_backward(batch_of(random_trajectories(trainer.policy_version, 9)))
    trainer.optim_step()


def settings_for(path: Path, **changes: Any) -> EngineSettings:
    settings: dict[str, Any] = {
        "model_path": str(path),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "seed": 0,
        "options": {"max_num_seqs": 64},
        "cores": [],
        "kv_cache_gib": 0.1,
        "lora": LORA,
        "num_versions": 4,
    }
    return EngineSettings(**(settings | changes))


class Scene:
    """A trainer, its publications, and a real engine with its weight sync, driven from tests that are no coroutines."""

    def __init__(self, trainer: Trainer, engine: Any, runner: asyncio.Runner) -> None:
        self.trainer, self.engine, self._runner = trainer, engine, runner
        self.publications: list[Publication] = []
        self.syncs: list[AdapterSync] = []

    @property
    def base_bytes(self) -> int:
        return 4 * sum(p.numel() for name, p in self.trainer._model.named_parameters() if "lora_" not in name)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._runner.run(asyncio.wait_for(coroutine, 250))

    def publish(self) -> Publication:
        if self.publications:
            step(self.trainer)
        self.trainer.publish()
        self.publications.append(self.trainer.publication())
        return self.publications[-1]

    def sync(self, **changes: Any) -> AdapterSync:
        async def nothing(newer_than: int, timeout_s: float) -> None:
            await asyncio.sleep(timeout_s)

        settings: dict[str, Any] = {
            "in_flight": "recompute",
            "tolerance": Tolerance(1e-4),
            "pull_every": 1,
            "deadline_s": 60.0,
            "max_failures": 0,
            "on_quarantine": nothing,
            "paused": None,
            "max_versions": 4,
        }
        sync = AdapterSync(self.engine, nothing, ObjectStore.of_this_process(), **(settings | changes))
        self.syncs.append(sync)
        return sync

    async def forget(self) -> None:
        """All versions: another scene with the same engine begins."""
        for sync in self.syncs:
            sync.close()
            await sync.ended()

    async def generate(
        self, version: int | None, *, n: int = 1, seed: int = 3, max_tokens: int = 40, **how: Any
    ) -> list[Any]:
        return await self.engine.generate(
            PROMPT, n=n, temperature=1.0, max_tokens=max_tokens, stop_token_ids=[], seed=seed, version=version, **how
        )

    async def is_held(self, version: int) -> bool:
        try:
            (completion,) = await self.generate(version, max_tokens=1)
        except RuntimeError as error:
            if str(error).endswith(f"version {version}, which it does not hold"):
                return False
            raise
        return completion.policy_versions == [version]

    def gap(self, completion: Any) -> float:
        """Of the tokens' logprobs from those of the trainer, now, in nats."""
        tokens = completion.tokens
        trajectory = Trajectory(
            prompt_tokens=PROMPT,
            response_tokens=tokens,
            loss_mask=[True] * len(tokens),
            behavior_logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            reward=0.0,
            finish_reason="length",
            text="",
        )
        own = self.trainer.token_logprobs(batch_of([trajectory]))
        return float((own - torch.tensor(completion.logprobs)).abs().max())


class AdapterContract:
    """A subclass has a fixture `scene`, with an engine of 64 places that holds no version yet, and up to 4 at once."""

    @pytest.mark.slow
    def test_rows_of_several_versions_are_what_each_is_alone(self, scene: Scene) -> None:
        """To the last bit, and as the trainer computes them."""

        async def run() -> None:
            async with contextlib.AsyncExitStack() as rollouts:
                await compare(rollouts)

        async def compare(rollouts: contextlib.AsyncExitStack) -> None:
            sync, alone = scene.sync(), {}
            for version in range(3):
                await sync._sync(scene.publish())
                assert sync.verified_version == version
                await rollouts.enter_async_context(sync.one_version())
                alone[version] = (await scene.generate(version))[0]
                assert len(alone[version].tokens) == 40
                assert scene.gap(alone[version]) < 1e-4
            assert alone[0].tokens != alone[2].tokens
            together = await asyncio.gather(*(scene.generate(version) for version in (2, 0, 1, 0, 2)))
            for version, (completion,) in zip((2, 0, 1, 0, 2), together, strict=True):
                assert completion == alone[version]
                assert set(completion.policy_versions) == {version}

        scene.run(run())

    @pytest.mark.slow
    def test_a_load_touches_nothing_that_is_under_way(self, scene: Scene) -> None:
        """A rollout of two requests goes on under its version while another one is loaded, proven and served."""

        async def run() -> None:
            sync = scene.sync()
            await sync._sync(scene.publish())
            expected = [await scene.generate(0, n=3, seed=seed, max_tokens=LONG) for seed in (3, 4)]
            async with sync.one_version() as version:
                assert version == 0
                publication = scene.publish()
                seen = scene.engine.progress.num_tokens
                first = asyncio.ensure_future(scene.generate(0, n=3, max_tokens=LONG))
                while scene.engine.progress.num_tokens < seen + 20:
                    await asyncio.sleep(0.001)
                await sync._sync(publication)
                assert not first.done()
                assert sync.verified_version == 1
                async with sync.one_version() as newer:
                    assert newer == 1
                    other = await scene.generate(1, n=3)
                assert {v for c in other for v in c.policy_versions} == {1}
                assert await first == expected[0]
                assert await scene.generate(version, n=3, seed=4, max_tokens=LONG) == expected[1]
            [_, report] = sync.drain_reports()
            assert report.pause_s == report.drain_s == 0.0
            assert report.num_bytes == publication.manifest.num_bytes < scene.base_bytes / 4

        scene.run(run())

    def test_whoever_listens_hears_of_which_version_a_token_is(self, scene: Scene) -> None:
        async def run() -> None:
            sync, heard = scene.sync(), []
            for _ in range(2):
                await sync._sync(scene.publish())

            def hear(index: int, tokens: list[int], logprobs: list[float], version: int) -> None:
                heard.extend((token, logprob, version) for token, logprob in zip(tokens, logprobs, strict=True))

            (answer,) = await scene.generate(0, max_tokens=8, heard=hear)
            assert heard == [*zip(answer.tokens, answer.logprobs, [0] * 8, strict=True)]

        scene.run(run())

    def test_a_version_that_fails_its_proof_is_never_served(self, scene: Scene) -> None:
        async def run() -> None:
            sync = scene.sync(max_failures=9)
            await sync._sync(scene.publish())
            good = scene.publish()
            # Right bytes, another function: the canary of the version before.
            wrong = dataclasses.replace(good.manifest, canary=scene.publications[0].manifest.canary)
            await sync._sync(Publication(wrong, good.bucket_refs))
            assert (sync.verified_version, sync.num_refused, sync.num_quarantines) == (0, 1, 0)
            assert not await scene.is_held(1)
            assert await scene.is_held(0)
            await sync._sync(good)
            assert sync.verified_version == 1

        scene.run(run())

    def test_a_version_that_comes_again_with_other_weights_meets_no_old_keys_and_values(self, scene: Scene) -> None:
        """As in another run on this engine, whose versions have the same numbers."""

        async def run() -> None:
            sync = scene.sync()
            await sync._sync(scene.publish())
            await sync._sync(scene.publish())
            for _ in range(3):
                step(scene.trainer)
            other = scene.publish()
            sync.close()
            await sync.ended()
            assert not await scene.is_held(1)
            again = scene.sync()
            await again._sync(Publication(dataclasses.replace(other.manifest, policy_version=1), other.bucket_refs))
            assert again.verified_version == 1
            assert scene.gap((await scene.generate(1))[0]) < 1e-4

        scene.run(run())

    @pytest.mark.parametrize("adapter", [True, False])
    def test_a_flipped_byte_never_reaches_the_engine(self, scene: Scene, adapter: bool) -> None:
        """In what arrives, or in the digest of the weights that it belongs to."""

        async def run() -> None:
            sync = scene.sync(max_failures=0)
            await sync._sync(scene.publish())
            good = scene.publish()
            entry = good.manifest.entries[3]
            if adapter:
                buckets = [bucket.copy() for bucket in await buckets_of(good)]
                buckets[entry.bucket][entry.offset + 5] ^= 4
                broken = Publication(good.manifest, buckets)
                said = f"failed the bytes check: tensor {entry.name} does not match its checksum"
            else:
                broken = Publication(dataclasses.replace(good.manifest, base="0" * 64), good.bucket_refs)
                said = "failed the base check: the adapter belongs to weights with the digest 0000000000000000"
            with pytest.raises(WeightSyncError, match=said):
                await sync._sync(broken)
            assert not await scene.is_held(1)

        scene.run(run())

    @pytest.mark.slow
    def test_an_old_version_is_dropped_when_its_last_rollout_has_ended(self, scene: Scene) -> None:
        async def run() -> None:
            sync = scene.sync(max_versions=2)
            await sync._sync(scene.publish())
            async with sync.one_version() as oldest:
                await sync._sync(scene.publish())
                waiting = asyncio.ensure_future(sync._sync(scene.publish()))
                for _ in range(20):
                    await asyncio.sleep(0.005)
                assert not waiting.done(), "there is no place for a third one"
                assert sync.verified_version == 1
                assert set((await scene.generate(oldest))[0].policy_versions) == {0}
            await waiting
            assert sync.verified_version == 2
            assert [await scene.is_held(v) for v in (0, 1, 2)] == [False, True, True]

        scene.run(run())

    @pytest.mark.slow
    def test_what_a_rollout_left_in_the_engine_goes_with_its_version(self, scene: Scene) -> None:
        """A rollout that was given up has ended before its requests are aborted."""

        async def run() -> None:
            sync = scene.sync()
            for _ in range(2):
                await sync._sync(scene.publish())
            seen = scene.engine.progress.num_tokens
            left = asyncio.ensure_future(scene.generate(0, n=3, max_tokens=LONG))
            while scene.engine.progress.num_tokens == seen:
                await asyncio.sleep(0.001)
            await scene.engine.drop(0)
            with pytest.raises(RuntimeError, match="version 0 was dropped"):
                await left
            assert set((await scene.generate(1))[0].policy_versions) == {1}, "the engine lives"

        scene.run(run())


async def buckets_of(publication: Publication) -> list[np.ndarray]:
    """What lies in the object store of this process."""
    return [np.asarray(bucket) for bucket in publication.bucket_refs]
