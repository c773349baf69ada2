"""Older versions back in the trainer: exactly theirs inside, exactly its own outside."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from leeway.trainer.audit import published_weights
from leeway.trainer.trainer import Trainer
from leeway.types import TrainBatch
from leeway.weights import Manifest, WeightSyncError

from ..trainers import (
    SHARDED,
    all_rows,
    batch_of,
    end_group,
    free_address,
    published,
    random_trajectories,
    save_model,
    settings_of,
)

VERSION = 1  # what is audited: neither the weights that the trainer began with nor those it ends with


@dataclasses.dataclass
class Scene:
    """A trainer at version 3, with a publication of version 1 and what version 1 said of a batch."""

    trainer: Trainer
    manifest: Manifest
    buckets: list[np.ndarray]
    batch: TrainBatch  # all of it of version 1, with exactly its logprobs

    def audit(self) -> dict[str, float]:
        return self.trainer.audit(self.batch, self.manifest, self.buckets)

    def own(self) -> dict[str, torch.Tensor]:
        """The trainer's weights, by name."""
        parameters = self.trainer._model.lm.named_parameters()
        return {n: all_rows(p).detach().clone() for n, p in parameters}


def scene_of(trainer: Trainer) -> Scene:
    training = batch_of(random_trajectories(7, 8))
    batch = batch_of(random_trajectories(0, 6, version=VERSION))
    step(trainer, training)
    manifest, buckets, _ = published(trainer)
    batch.behavior_logprobs = torch.where(batch.loss_mask, trainer.token_logprobs(batch), 0.0)
    for _ in range(2):
        step(trainer, training)
    return Scene(trainer, manifest, buckets, batch)


def step(trainer: Trainer, batch: TrainBatch) -> None:
    trainer.forward_backward(batch)
    trainer.optim_step()


def assert_same(now: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    assert now.keys() == before.keys()
    assert [name for name in before if not torch.equal(now[name], before[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_an_older_version_give_exactly_its_logprobs(make, tmp_path, tied):
    scene = scene_of(make(save_model(tmp_path, tied=tied), bucket_bytes=4096, max_policy_lag=3))
    before = scene.own()
    gap = (scene.trainer.token_logprobs(scene.batch) - scene.batch.behavior_logprobs)[scene.batch.loss_mask]
    assert gap.abs().max() > 0.01, "the weights of now say something else, or this test says nothing"
    assert scene.audit() == {"sum": 0.0, "max": 0.0, "tokens": float(scene.batch.loss_mask.sum())}
    assert_same(scene.own(), before)
    assert scene.trainer.policy_version == 3


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, SHARDED])
@pytest.mark.parametrize("after_publishing", [False, True])
def test_training_goes_on_as_if_there_had_been_no_audit(make, after_publishing, settings):
    """Whether or not a forward pass came before it, of which FSDP may still hold gathered weights."""
    results = []
    for audits in (0, 2):
        scene = scene_of(make(max_policy_lag=9, **settings))
        if after_publishing:
            published(scene.trainer)
        for _ in range(audits):
            assert scene.audit()["max"] == 0.0
        batch = batch_of(random_trajectories(8, 8))
        logprobs = scene.trainer.token_logprobs(batch).tolist()
        step(scene.trainer, batch)
        results.append((logprobs, published(scene.trainer)[0].digest))
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_wrong_logprob_is_that_gap(make):
    scene = scene_of(make())
    first, last = scene.batch.loss_mask.nonzero()[[0, -1], 0].tolist()
    scene.batch.behavior_logprobs[first] -= 0.5
    scene.batch.behavior_logprobs[last] += 0.125
    got = scene.audit()
    assert got["max"] == pytest.approx(0.5, abs=1e-5)
    assert got["sum"] == pytest.approx(0.625, abs=1e-5)


@pytest.mark.slow
def test_only_sampled_tokens_of_that_version_count(make):
    scene = scene_of(make())
    batch = scene.batch
    sampled = batch.loss_mask.nonzero()[:, 0].tolist()
    others, counted = sampled[: len(sampled) // 2], sampled[len(sampled) // 2 :]
    for i, place in enumerate(others):
        batch.policy_versions[place] = (0, 2, 3)[i % 3]
    batch.behavior_logprobs[others] -= 100.0
    assert not batch.loss_mask.all(), "some tokens are the environment's"
    batch.behavior_logprobs[~batch.loss_mask] -= 100.0
    batch.policy_versions[~batch.loss_mask] = VERSION
    assert scene.audit() == {"sum": 0.0, "max": 0.0, "tokens": float(len(counted))}
    batch.policy_versions[:] = 2
    assert scene.audit() == {"sum": 0.0, "max": 0.0, "tokens": 0.0}


@pytest.mark.slow
def test_the_own_weights_come_back_when_the_body_fails(make):
    scene = scene_of(make())
    before = scene.own()
    seen = []

    def fail_inside() -> None:
        with published_weights(scene.trainer._model, scene.trainer._gatherer.names, scene.manifest, scene.buckets):
            seen.append(scene.own())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert all(not torch.equal(seen[0][name], before[name]) for name in before), "inside, all of them are older"
    assert_same(scene.own(), before)


@pytest.mark.slow
def test_a_publication_with_a_flipped_byte_is_refused_and_the_own_weights_stay(make):
    scene = scene_of(make(bucket_bytes=4096))
    before = scene.own()
    last = scene.manifest.entries[-1]
    assert last.bucket == len(scene.buckets) - 1 > 0, "others are in the model by then"
    scene.buckets[last.bucket] = scene.buckets[last.bucket].copy()
    scene.buckets[last.bucket][last.offset + last.num_bytes - 1] ^= 1
    with pytest.raises(WeightSyncError, match=last.name) as caught:
        scene.audit()
    assert (caught.value.check, caught.value.policy_version) == ("bytes", VERSION)
    assert_same(scene.own(), before)


# ----------------------------------------------------------------------------------------------------- two ranks

RANK_1 = """
import torch.distributed as dist
from leeway.trainer.trainer import Trainer
settings, address, training, batch = work
trainer = Trainer(settings, rank=1, init_method=address)
trainer.forward_backward(training), trainer.optim_step(), trainer.publish()
batch.behavior_logprobs = trainer.token_logprobs(batch)
batch.behavior_logprobs[-1] += 0.5
trainer.forward_backward(training), trainer.optim_step(), trainer.publish()
shared = [None]
dist.broadcast_object_list(shared, src=0)
result = trainer.audit(batch, *shared[0])
trainer.publish()
trainer.close()
"""


@pytest.mark.slow
def test_two_ranks_audit_their_shares_together(make, model_path, other_ranks):
    settings, address = settings_of(model_path, num_ranks=2, bucket_bytes=4096), free_address()
    trained, audited = random_trajectories(7, 8), random_trajectories(0, 6, version=VERSION)
    audited = [t for t in audited if all(t.loss_mask)]
    other_ranks.begin(RANK_1, {1: (settings, address, batch_of(trained, share=slice(5, None)), batch_of(audited[1:]))})
    trainer = Trainer(settings, rank=0, init_method=address)
    own, batch = batch_of(trained, share=slice(0, 5)), batch_of(audited[:1])
    step(trainer, own)
    manifest, buckets, _ = published(trainer)
    batch.behavior_logprobs = trainer.token_logprobs(batch)
    step(trainer, own)
    digest = published(trainer)[0].digest
    dist.broadcast_object_list([(manifest, buckets)], src=0)
    got = trainer.audit(batch, manifest, buckets)
    assert got["max"] == pytest.approx(0.5, abs=1e-5), "a gap on the other rank"
    assert got["sum"] == pytest.approx(0.5, abs=1e-5)
    assert got["tokens"] == sum(len(t.response_tokens) for t in audited)
    assert published(trainer)[0].digest == digest
    end_group()
    assert other_ranks.results() == [got]
