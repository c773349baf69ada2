"""Publishing beside the next step: whole or not at all, bit for bit from any number of ranks, from one copy aside."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.trainer.export import HFWriter
from leeway.trainer.tensors import saved_tensors
from leeway.trainer.trainer import Trainer
from leeway.transports.object_store import ObjectStore
from leeway.types import TrainBatch
from leeway.weights import BucketPlan, Manifest, check_bucket, digest_of, read_bucket

from ..trainers import (
    all_rows,
    batch_of,
    free_address,
    published,
    random_trajectories,
    reference_model,
    save_model,
    settings_of,
)

SMALL = 4096


class Bucket:
    """Stands for a reference into an object store: its memory goes when nobody holds it."""


class Store:
    """`broken`: which puts fail. What is put is counted, in and out."""

    def __init__(self, *, broken: set[int] | None = None, seconds: float = 0.0) -> None:
        self.broken, self.seconds = broken or set(), seconds
        self.refs: list[weakref.ref[Bucket]] = []
        self.num_puts = self.num_done = 0
        self.threads: set[int] = set()

    def __call__(self, bucket: np.ndarray) -> Bucket:
        self.threads.add(threading.get_ident())
        self.num_puts += 1
        time.sleep(self.seconds)
        if self.num_puts in self.broken:
            raise OSError("the object store is full")
        ref = Bucket()
        self.refs.append(weakref.ref(ref))
        self.num_done += 1
        return ref

    def num_alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.refs)


@pytest.fixture
def trainer_with(model_path, group_of_one_rank):
    """trainer_with(put) -> a trainer."""

    def build(put: Any) -> Trainer:
        settings, transport = settings_of(model_path, bucket_bytes=SMALL), ObjectStore(put, put)
        return Trainer(settings, rank=0, init_method=free_address(), transport=transport)

    return build


def counted_memory(monkeypatch) -> list[int]:
    """Gets the size of each part of a bucket for which memory is made."""
    made: list[int] = []
    empty = BucketPlan.empty

    def counted(plan: BucketPlan, *, pinned: bool = False) -> torch.Tensor:
        made.append(plan.num_bytes)
        return empty(plan, pinned=pinned)

    monkeypatch.setattr(BucketPlan, "empty", counted)
    return made


def test_every_version_is_copied_into_the_same_memory(trainer_with, monkeypatch):
    store = Store()
    trainer = trainer_with(store)
    made = counted_memory(monkeypatch)
    for _ in range(3):
        metrics = trainer.begin_publish()
        trainer.score_canary()
    manifest = trainer.publication().manifest
    assert len(made) == len(manifest.bucket_bytes) > 10, "the copy, once; a rank that is alone needs nothing more"
    assert metrics == {"train/publish_memory_gib": manifest.num_bytes / 2**30}
    assert threading.get_ident() not in store.threads


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Those of now, whole."""
    named = saved_tensors(trainer._model.lm).items()
    return {n: all_rows(t).detach().clone() for n, t in named}


def step(trainer: Trainer, batch: TrainBatch) -> None:
    trainer.forward_backward(batch)
    trainer.optim_step()


class Closed(Store):
    """Keeps copies of its buckets, but takes none before it is opened."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.opened = threading.Event()
        self.buckets: list[np.ndarray] = []

    def __call__(self, bucket: np.ndarray) -> Bucket:
        assert self.opened.wait(30)
        self.buckets.append(bucket.copy())
        return super().__call__(bucket)

    def tensors(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        tensors = {}
        for index, bucket in enumerate(self.buckets[-len(manifest.bucket_bytes) :]):
            check_bucket(manifest, index, bucket)
            tensors |= dict(read_bucket(manifest, index, torch.from_numpy(bucket)))
        return tensors


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


@pytest.mark.slow
def test_a_version_is_what_it_was_though_steps_are_taken_before_a_byte_has_left(trainer_with):
    store, batch = Closed(), batch_of(random_trajectories(0, 8))
    trainer = trainer_with(store)
    step(trainer, batch)
    expected, logprobs = weights(trainer), trainer.token_logprobs(batch)
    trainer.publish()
    step(trainer, batch)
    step(trainer, batch)
    assert store.num_puts == 0
    assert not torch.equal(trainer.token_logprobs(batch), logprobs)
    claimed = trainer.claim_publication()
    store.opened.set()
    publication = claimed.result(30)
    assert publication is not None
    assert publication.manifest.policy_version == 1
    assert_same(store.tensors(publication.manifest), expected)


@pytest.mark.slow
def test_the_next_version_waits_until_the_last_one_has_left_the_copy(trainer_with):
    store = Closed()
    trainer = trainer_with(store)
    trainer.publish()
    first = trainer.claim_publication()
    expected = weights(trainer)
    step(trainer, batch_of(random_trajectories(0, 8)))
    with ThreadPoolExecutor(1) as compute:
        second = compute.submit(trainer.publish)
        time.sleep(0.2)
        assert not second.done()
        store.opened.set()
        second.result(30)
    publication = first.result(30)
    assert publication is not None
    trainer.publication()
    store.buckets = store.buckets[: len(publication.bucket_refs)]
    assert_same(store.tensors(publication.manifest), expected)


def test_a_version_that_does_not_leave_in_time_ends_the_next_one_by_name(model_path, group_of_one_rank):
    store = Closed()
    transport = ObjectStore(store, store)  # type: ignore[arg-type]
    settings = settings_of(model_path, step_timeout_s=0.2)
    trainer = Trainer(settings, rank=0, init_method=free_address(), transport=transport)
    trainer.publish()
    with pytest.raises(TimeoutError, match=r"version 0 .* within 0.2 s \(cluster.step_timeout_s\)"):
        trainer.publish()
    store.opened.set()


@pytest.mark.slow
def test_a_canary_that_fails_is_the_publications_failure_and_leaves_nothing(trainer_with, monkeypatch):
    store = Store()
    trainer = trainer_with(store)

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr("leeway.trainer.trainer.score_canary", fails)
        trainer.publish()
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.publication()
    assert store.num_alive() == 0
    trainer.publish()
    publication = trainer.publication()
    assert store.num_alive() == len(publication.bucket_refs)


@pytest.mark.slow
def test_what_was_published_is_held_by_whoever_asked_for_it_alone(trainer_with):
    store = Store()
    trainer = trainer_with(store)
    trainer.publish()
    publication = trainer.publication()
    num_buckets = len(publication.manifest.bucket_bytes)
    assert store.num_alive() == len(publication.bucket_refs) == num_buckets
    del publication
    assert store.num_alive() == 0
    trainer.publish()  # nobody asks for this one
    trainer.publish()
    trainer.publication()
    assert store.num_alive() == 0


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["first", "middle", "last"])
def test_a_publication_that_fails_leaves_nothing_and_the_next_one_is_whole(trainer_with, broken):
    whole = trainer_with(Store())
    whole.publish()
    expected = whole.publication().manifest
    number = {"first": 1, "middle": len(expected.bucket_bytes) // 2, "last": len(expected.bucket_bytes)}[broken]
    store = Store(broken={number})
    trainer = trainer_with(store)

    def publish() -> None:
        trainer.publish()
        trainer.publication()

    with pytest.raises(OSError, match="the object store is full"):
        publish()
    assert store.num_alive() == 0
    with pytest.raises(AssertionError):
        trainer.publication()
    trainer.publish()
    publication = trainer.publication()
    assert publication.manifest.digest == expected.digest == digest_of(publication.manifest.entries)
    assert store.num_alive() == len(expected.bucket_bytes)


# ----------------------------------------------------------------------------------------------- two, three ranks

OTHER = """
from leeway.trainer.trainer import Trainer
settings, address, rank, batch, folder = work
trainer = Trainer(settings, rank=rank, init_method=address)
trainer.publish()
first = trainer.claim_publication()
if folder:
    for _ in range(2):
        trainer.forward_backward(batch), trainer.optim_step()
    trainer.save(folder)
else:
    trainer.publish()
trainer.close()
result = first.result(30)
"""


@pytest.mark.slow
def test_ranks_send_a_version_beside_the_collectives_of_the_next_steps(model_path, tmp_path, other_ranks, monkeypatch):
    """Every bucket waits until two steps are taken and saved: what arrives is what was copied."""
    settings, address = settings_of(model_path, num_ranks=2, bucket_bytes=SMALL), free_address()
    trajectories = random_trajectories(0, 8)
    own, others = batch_of(trajectories, share=slice(0, 5)), batch_of(trajectories, share=slice(5, None))
    other_ranks.begin(OTHER, {1: (settings, address, 1, others, str(tmp_path / "hf"))})
    store = Closed()
    trainer = Trainer(settings, rank=0, init_method=address, transport=ObjectStore(store, store))  # type: ignore[arg-type]
    expected = reference_model(model_path).state_dict()
    made = counted_memory(monkeypatch)
    trainer.publish()
    claimed = trainer.claim_publication()
    step(trainer, own)
    step(trainer, own)
    trainer.save(str(tmp_path / "hf"))
    assert store.num_puts == 0
    store.opened.set()
    publication = claimed.result(30)
    trainer.close()
    saved = reference_model(tmp_path / "hf").state_dict()
    assert [name for name in expected if torch.equal(saved[name], expected[name])] == [], "the last step's"
    assert publication is not None
    num_buckets = len(publication.manifest.bucket_bytes)
    assert num_buckets > 10
    assert len(made) == 2 * num_buckets, "the copy, and what was saved; all buckets lie in one memory, in turn"
    assert publication.manifest.policy_version == 0
    assert_same(store.tensors(publication.manifest), expected)
    assert other_ranks.results() == [None]


@pytest.mark.slow
def test_a_bucket_that_cannot_be_uploaded_fails_the_version_and_leaves_no_rank_waiting(model_path, other_ranks):
    settings, address = settings_of(model_path, num_ranks=2, bucket_bytes=SMALL), free_address()
    batch = batch_of(random_trajectories(0, 8))
    other_ranks.begin(OTHER, {1: (settings, address, 1, batch, None)})
    store = Store(broken={2})
    trainer = Trainer(settings, rank=0, init_method=address, transport=ObjectStore(store, store))  # type: ignore[arg-type]
    trainer.publish()
    with pytest.raises(OSError, match="the object store is full"):
        trainer.publication()
    assert store.num_alive() == 0
    trainer.publish()
    publication = trainer.publication()
    assert store.num_alive() == len(publication.bucket_refs)
    trainer.close()
    assert other_ranks.results() == [None]


CHILD = """
from leeway.trainer.trainer import Trainer
settings, address, rank, folder = work
trainer = Trainer(settings, rank=rank, init_method=address)
trainer.publish()
trainer.save(folder)
trainer.close()
"""


@pytest.mark.slow
def test_shards_of_any_size_meet_in_their_place(tmp_path, other_ranks):
    """Three ranks: rows that do not divide by three, and tensors of four rows, of which the third rank has none."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=65,
        hidden_size=32,
        intermediate_size=65,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    save_model(tmp_path / "model", tied=True)  # for the tokenizer
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    settings = settings_of(tmp_path / "model", num_ranks=3, bucket_bytes=SMALL, dtype="bfloat16")
    address = free_address()
    other_ranks.begin(CHILD, {rank: (settings, address, rank, str(tmp_path / "hf")) for rank in (1, 2)})
    trainer = Trainer(settings, rank=0, init_method=address)
    manifest, _, tensors = published(trainer)
    trainer.save(str(tmp_path / "hf"))
    trainer.close()
    other_ranks.results()
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert expected["model.layers.0.self_attn.k_proj.weight"].shape[0] == 4
    assert len(manifest.bucket_bytes) > 3
    saved = reference_model(tmp_path / "hf").state_dict()
    assert tensors.keys() == expected.keys() == saved.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
        assert torch.equal(saved[name].bfloat16(), tensor), name


# ------------------------------------------------------------------------------------------------------- exports


def parts_of(state: dict[str, torch.Tensor], number: int) -> list[dict[str, torch.Tensor]]:
    names = list(state)
    return [{name: state[name] for name in names[i::number]} for i in range(number)]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_folder_written_in_parts_is_one_model(model_path, tmp_path, parts):
    state = dict(reference_model(model_path).named_parameters())
    writer = HFWriter(str(model_path), tmp_path / "hf", dtype=torch.float32)
    for part in parts_of(state, parts):
        writer.add({name: p.detach() for name, p in part.items()})
        assert not (tmp_path / "hf").exists()
    writer.finish()
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors*"))
    if parts == 1:
        assert files == ["model.safetensors"]
    else:
        assert files == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]
        index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(state)
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in state.values())
    for name, tensor in reference_model(tmp_path / "hf").named_parameters():
        assert torch.equal(tensor, state[name]), name
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "float32"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.slow
def test_an_export_that_ends_half_way_leaves_the_one_before(model_path, tmp_path):
    state = {name: p.detach() for name, p in reference_model(model_path).named_parameters()}
    whole = HFWriter(str(model_path), tmp_path / "hf", dtype=torch.float32)
    whole.add(state)
    whole.finish()
    HFWriter(str(model_path), tmp_path / "hf", dtype=torch.float32).add(parts_of(state, 2)[0])
    assert reference_model(tmp_path / "hf").state_dict().keys() >= state.keys()
    again = HFWriter(str(model_path), tmp_path / "hf", dtype=torch.float32)
    again.add(state)
    again.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.slow
def test_experts_are_written_as_the_models_own_files_have_them(model_path, tmp_path):
    """In memory all experts of a layer are one tensor; in the files each has its own."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(tmp_path / "base", tied=True)  # for the tokenizer
    model.save_pretrained(tmp_path / "base")
    state = {name: p.detach() for name, p in model.named_parameters()}
    writer = HFWriter(str(tmp_path / "base"), tmp_path / "hf", dtype=torch.float32)
    for part in parts_of(state, 3):
        writer.add(part)
    writer.finish()
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in index["weight_map"]
    for name, tensor in reference_model(tmp_path / "hf").named_parameters():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.slow
def test_side_files_come_along_from_a_folder_and_from_the_hub(tmp_path, monkeypatch):
    """The next stage's stop tokens stand in generation_config.json; other programs read the rest."""
    snapshot = tmp_path / "hub/models--org--tiny/snapshots/abc"
    snapshot.mkdir(parents=True)
    save_model(snapshot, tied=True)
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.7}))
    (snapshot / "preprocessor_config.json").write_text('{"size": 7}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    state = {name: p.detach() for name, p in reference_model(snapshot).named_parameters()}
    for base in ("org/tiny", str(snapshot)):
        writer = HFWriter(base, tmp_path / "hf", dtype=torch.float32)
        writer.add(state)
        writer.finish()
        for name in ("generation_config.json", "preprocessor_config.json"):
            assert (tmp_path / "hf" / name).read_text() == (snapshot / name).read_text(), (base, name)
        assert not (tmp_path / "hf/processor_config.json").exists()
