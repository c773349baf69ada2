"""Adapters from the trainer to the engine: what is trained, published, served and exported, and under which version."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import trainers
from tests.adapters import LORA, OPTIMIZER, AdapterContract, Scene, settings_for, step
from tests.trainers import (
    CANARY,
    all_rows,
    batch_of,
    end_group,
    free_address,
    one_rank_trainer,
    published,
    random_trajectories,
    save_model,
    settings_of,
)
from transformers import AutoModelForCausalLM

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.kl import KLPenalty
from leeway.algorithms.objective import PolicyObjective
from leeway.config import ConfigError, derive, find_recipe, load_config
from leeway.config.inputs import LoraConfig
from leeway.driver.memory import processes_of, trained_parameters
from leeway.driver.models import shape_of
from leeway.engines.hf_engine import HfEngine
from leeway.failures import Refused
from leeway.tasks.bootstrap import unbuilt_model
from leeway.trainer.checkpoint import CheckpointError
from leeway.trainer.convert import convert
from leeway.trainer.lora import ADAPTER_DIR, adapter_tensors, lora_targets
from leeway.trainer.trainer import Trainer
from leeway.weights import WeightSyncError


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def make(model_path: Path, group_of_one_rank: None) -> Callable[..., Trainer]:
    return functools.partial(
        one_rank_trainer, model_path, **{"lora": LORA, "optimizer": OPTIMIZER, "max_policy_lag": 100}
    )


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: all_rows(p).clone() for name, p in trainer._model.named_parameters()}


# ----------------------------------------------------------------------------------------------------- the trainer


@pytest.mark.slow
def test_adapters_alone_are_trained_and_published(make):
    trainer = make()
    before = weights_of(trainer)
    step(trainer)
    changed = {name for name, tensor in weights_of(trainer).items() if not torch.equal(tensor, before[name])}
    # A moves only once B is not zero.
    assert changed == {name for name in before if name.endswith("lora_B.weight")}
    trainer.publish()
    manifest = trainer.publication().manifest
    assert {e.name for e in manifest.entries} == {
        name.removeprefix("lm.") for name in before if ".lora_A." in name or ".lora_B." in name
    }
    assert len(manifest.entries) == 2 * 7 * 2
    whole = one_rank_trainer(trainer._settings.path_of(None))
    whole.publish()
    assert manifest.num_bytes < whole.publication().manifest.num_bytes


def test_a_new_adapter_changes_nothing(make, model_path):
    batch = batch_of(random_trajectories(0, 9))
    assert torch.equal(make().token_logprobs(batch), one_rank_trainer(model_path).token_logprobs(batch))


@pytest.mark.slow
def test_exports_are_what_peft_makes_of_the_adapter(make, model_path, tmp_path):
    peft = pytest.importorskip("peft")
    trainer = make()
    for _ in range(3):
        step(trainer)
    trainer.save(str(tmp_path / "hf"))
    load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(load(model_path), tmp_path / ADAPTER_DIR)
    merged, base = load(tmp_path / "hf"), load(model_path)
    assert "lora" not in str(merged)
    tokens = torch.tensor([CANARY.cached[0]])
    with torch.no_grad():
        expected = adapted(tokens).logits
        assert (merged(tokens).logits - expected).abs().max() < 1e-4
        assert (base(tokens).logits - expected).abs().max() > 0.1
    batch = batch_of(random_trajectories(0, 9))
    assert (one_rank_trainer(tmp_path / "hf").token_logprobs(batch) - trainer.token_logprobs(batch)).abs().max() < 1e-4


@pytest.mark.slow
def test_a_resumed_run_goes_on_exactly(make, tmp_path):
    first = make()
    for _ in range(2):
        step(first)
    first.save_state(str(tmp_path / "trainer"))
    second = make(seed=7)  # whose adapters begin with other numbers
    assert second.load_state(str(tmp_path / "trainer")) == 2
    for trainer in (first, second):
        step(trainer)
    for (name, a), (_, b) in zip(weights_of(first).items(), weights_of(second).items(), strict=True):
        assert torch.equal(a, b), name
    saved = sum(file.stat().st_size for file in (tmp_path / "trainer").glob("*.safetensors"))
    assert saved < 4 * sum(t.numel() for n, t in weights_of(first).items() if "lora" not in n), "it holds the base"


@pytest.mark.slow
def test_adapters_of_another_model_or_scaling_are_not_resumed(make, tmp_path):
    trainer = make()
    trainer.save_state(str(tmp_path / "trainer"))
    other = save_model(tmp_path / "other", tied=False)
    with pytest.raises(CheckpointError, match=r"adapters of another model .*model\.path"):
        one_rank_trainer(other, lora=LORA).load_state(str(tmp_path / "trainer"))
    with pytest.raises(CheckpointError, match=r"another scaling .scaling 2\.0, here 4\.0.*model\.lora\.alpha"):
        make(lora=LoraConfig(rank=4, alpha=16.0)).load_state(str(tmp_path / "trainer"))


def test_a_state_of_adapters_is_not_converted(make, tmp_path):
    make().save_state(str(tmp_path / "step-000001" / "trainer"))
    with pytest.raises(CheckpointError, match=r"holds adapters alone \(model\.lora\).*leeway resume"):
        list(convert(tmp_path))


def test_the_reference_is_the_model_without_its_adapter(make, model_path):
    loss = PPOClip(clip_low=0.2, clip_high=0.28)
    objective = PolicyObjective(policy_loss=loss, aggregation="seq_mean_token_mean", kl=KLPenalty(coef=0.1))
    trainer = make(objective=objective)
    assert trainer._reference is None
    batch = batch_of(random_trajectories(0, 9))
    expected = trainer.token_logprobs(batch)
    step(trainer)
    assert torch.equal(trainer._reference_logprobs(batch), expected)
    assert not torch.equal(trainer.token_logprobs(batch), expected), "the adapter is on again"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target_modules": ["q_porj"]}, r"got 'q_porj', expected some of .*; nearest: q_proj"),
        ({"target_modules": ["lm_head"]}, r"got 'lm_head', which is the output head \(tied to the embeddings\)"),
        ({"target_modules": ["embed_tokens"]}, r"got 'embed_tokens', which is the embedding \(tied"),
        ({"target_modules": ["mlp"]}, r"got 'mlp', a Qwen2MLP, expected linear layers"),
        ({"rank": 17}, r"model\.lora\.rank: got 17, expected at most 16, the smaller side of .*k_proj"),
    ],
)
def test_what_cannot_have_an_adapter_is_refused_in_one_line(make, change, said):
    with pytest.raises(Refused, match=said) as refused:
        make(lora=LORA.model_copy(update=change))
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------------------------------------ the engine


@pytest.fixture
def scene(make: Callable[..., Trainer], model_path: Path) -> Iterator[Scene]:
    with asyncio.Runner() as runner:
        scene = Scene(make(), HfEngine(settings_for(model_path)), runner)
        yield scene
        scene.engine.shutdown()


class TestHf(AdapterContract):
    pass


@pytest.mark.parametrize("what", ["adapter", "base"])
def test_what_a_pass_computes_with_is_read_back(scene, what):
    """One bit of an adapter, or of the weights under it, in the engine's own memory."""

    async def run() -> None:
        sync, engine = scene.sync(), scene.engine
        await sync._sync(scene.publish())
        if what == "base":
            weights = engine._decoder.model.lm.model.layers[1].mlp.up_proj.weight.data
            weights.view(torch.int32)[3, 3] ^= 1
        else:
            load = engine._adapters.load

            def damaged(staged: Any) -> None:
                load(staged)
                own = engine._adapters._versions[1]["model.layers.1.mlp.up_proj.lora_A.weight"]
                own.view(torch.int32)[0, 0] ^= 1

            engine._adapters.load = damaged
        with pytest.raises(WeightSyncError) as failed:
            await sync._sync(scene.publish())
        assert failed.value.check == ("base" if what == "base" else "load")
        assert ("up_proj.lora_A" in str(failed.value)) == (what == "adapter")
        # Nothing is right on a damaged base; a damaged adapter leaves the others.
        assert sync.verified_version == (-1 if what == "base" else 0)

    scene.run(run())


# ------------------------------------------------------------------------------------------------------- two ranks

RANK_1 = """
from pathlib import Path
from leeway.trainer.trainer import Trainer
settings, address, batches, state, out = work
trainer = Trainer(settings, rank=1, init_method=address)
trainer.load_state(state)
for batch in batches:
    trainer.forward_backward(batch)
    trainer.optim_step()
trainer.publish()
trainer.save(out)
result = trainer.token_logprobs(batches[0]).tolist()
trainer.close()
"""


@pytest.mark.slow
def test_two_ranks_train_publish_and_export_what_one_does(make, model_path, other_ranks, tmp_path):
    trajectories = random_trajectories(0, 9)
    batches = {rank: [batch_of(trajectories, share=share)] * 2 for rank, share in enumerate((slice(0, 4), slice(4, 9)))}
    alone = make(optimizer=trainers.OPTIMIZER)  # whose steps are nearly proportional to the gradient
    alone.save_state(str(tmp_path / "trainer"))
    for _ in range(2):
        alone.forward_backward(batch_of(trajectories))
        alone.optim_step()
    expected = alone.token_logprobs(batch_of(trajectories))
    one, _, one_tensors = published(alone)
    alone.save(str(tmp_path / "one" / "hf"))
    end_group()
    settings = settings_of(model_path, lora=LORA, max_policy_lag=100, num_ranks=2)
    address, state, out = free_address(), str(tmp_path / "trainer"), str(tmp_path / "two" / "hf")
    other_ranks.begin(RANK_1, {1: (settings, address, batches[1], state, out)})
    trainer = Trainer(settings, rank=0, init_method=address)
    trainer.load_state(state)
    for batch in batches[0]:
        trainer.forward_backward(batch)
        trainer.optim_step()
    two, _, two_tensors = published(trainer)
    trainer.save(out)
    logprobs = trainer.token_logprobs(batches[0][0]).tolist()
    end_group()
    [others] = other_ranks.results()
    assert torch.tensor(logprobs + others) == pytest.approx(expected, abs=1e-4)
    assert (two.base, two.num_bytes) == (one.base, one.num_bytes)
    for name, tensor in one_tensors.items():
        assert (two_tensors[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-6, name
    load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    merged = zip(load(tmp_path / "one" / "hf").parameters(), load(tmp_path / "two" / "hf").parameters(), strict=True)
    assert all((a - b).abs().max() < 1e-4 for a, b in merged)


# -------------------------------------------------------------------------------------------------------- settings


def config_of(**changes: Any) -> Any:
    return load_config("quickstart", ["model.lora.rank=8", *(f"{key}={value}" for key, value in changes.items())])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rollout.engine.name": "leeway.engines.address_engine:AddressEngine"},
            r"got '?leeway.*AddressEngine.*expected vllm, hf where model\.lora is set",
        ),
        (
            {"rollout.engine.tensor_parallel_size": 2},
            r"tensor_parallel_size: got 2, expected 1 where model\.lora is set",
        ),
        ({"rollout.engine.double_buffer": "false"}, r"double_buffer: got False, expected nothing where model\.lora"),
        ({"rollout.engine.max_loras": 2}, r"max_loras: got 2.*use model\.lora\.max_versions"),
        ({"model.lora.rank": 513}, r"model\.lora\.rank: got 513, expected at most 512.*rollout\.engine\.name=hf"),
        ({"staleness.in_flight": "keep"}, r"staleness\.in_flight: got '?keep"),
        ({"param_server.delta": "true"}, r"param_server\.delta: got True"),
        ({"cluster.placement": "turns"}, r"cluster\.placement: got '?turns"),
        ({"model.lora.max_versions": "1"}, r"model\.lora\.max_versions"),
        ({"model.lora.dropout": "0.1"}, r"model\.lora\.dropout"),
    ],
)
def test_settings_that_adapters_exclude_are_refused_in_one_line(changes, said):
    with pytest.raises(ConfigError, match=said) as refused:
        config_of(**changes)
    assert "\n" not in str(refused.value)


def test_a_model_that_is_not_built_yet_has_targets_too():
    model = config_of(**{"rollout.engine.name": "hf"}).model
    assert len(lora_targets(unbuilt_model(model.init), model.lora)) == 2 * 7


def test_memory_is_counted_for_what_is_trained(make, model_path):
    trainer = make()
    shape = shape_of(json.loads((model_path / "config.json").read_text()))
    assert shape is not None
    config = config_of(**{"rollout.engine.name": "hf"})
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": LORA})})
    own = sum(tensor.numel() for tensor in adapter_tensors(trainer._model.lm).values())
    assert trained_parameters(config, shape) == own
    whole = config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})
    recipe = find_recipe("async_rl")
    (rank, engine, _), (all_rank, all_engine, _) = (processes_of(c, recipe, shape) for c in (config, whole))
    assert rank.device["optimizer"] == 8 * own < all_rank.device["optimizer"]
    assert engine.device["next version"] == 4 * own < all_engine.device["next version"]


def test_an_adapter_takes_the_memory_of_the_slot_that_it_lies_in(model_path):
    shape = shape_of(json.loads((model_path / "config.json").read_text()))
    assert shape is not None
    recipe = find_recipe("async_rl")
    sizes = {}
    for engine in ("hf", "vllm"):
        for rank in (8, 9, 16):
            config = config_of(**{"rollout.engine.name": engine, "model.lora.rank": rank})
            sizes[engine, rank] = processes_of(config, recipe, shape)[1].device["adapters"]
    assert sizes["hf", 8] < sizes["hf", 9] < sizes["hf", 16]
    assert sizes["vllm", 8] < sizes["vllm", 9] == sizes["vllm", 16] == sizes["hf", 16]


def test_an_engine_holds_as_many_versions_as_the_bound_can_need():
    hf = {"rollout.engine.name": "hf", "rollout.pull_every": 1}
    assert derive(config_of(**hf, **{"staleness.max_policy_lag": 2})).adapter_versions == 3
    assert derive(config_of(**hf, **{"staleness.max_policy_lag": 8})).adapter_versions == 9
    assert derive(config_of(**hf, **{"staleness.max_policy_lag": 0})).adapter_versions == 2
    every_second = {"staleness.max_policy_lag": 8, "rollout.pull_every": 2}
    assert derive(config_of(**hf | every_second)).adapter_versions == 5, "no other is published"
    assert derive(config_of(**hf, **{"model.lora.max_versions": 6})).adapter_versions == 6
    assert derive(config_of(**hf)).seeded_requests
