"""Adapters on vLLM, under the contract of every engine that holds several, and against what can go wrong inside it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leeway.engines import vllm_worker_env
from leeway.engines.vllm_engine import VllmEngine
from leeway.failures import Refused
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.weights import WeightSyncError

from ..adapters import LORA, OPTIMIZER, AdapterContract, Scene, settings_for
from ..engine_contract import Publisher
from ..trainers import end_group, one_rank_trainer
from .test_engine import VLLM_OPTIONS

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    publisher = Publisher(tmp_path_factory.mktemp("model"))
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(publisher.folder)
    return publisher


@pytest.fixture(scope="module")
def engine(publisher: Publisher) -> Iterator[tuple[Any, asyncio.Runner]]:
    """Its processes run our own extension with faults that can be armed; without one it is ours."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(vllm_worker_env, "WORKER_EXTENSION", "engine_saboteur.Saboteur")
        patch.syspath_prepend(here := str(Path(__file__).parent))
        patch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))
        settings = settings_for(publisher.folder, options=VLLM_OPTIONS, max_model_len=256, seeded=True)
        engine = runner.run(VllmEngine.start(settings))
        yield engine, runner
        engine.shutdown()


@pytest.fixture
def scene(engine: tuple[Any, asyncio.Runner], publisher: Publisher) -> Iterator[Scene]:
    trainer = one_rank_trainer(
        publisher.folder, lora=LORA, optimizer=OPTIMIZER, max_policy_lag=100, canary=publisher.prompts
    )
    scene = Scene(trainer, *engine)
    yield scene
    scene.run(scene.forget())
    trainer.close()
    end_group()


class TestVllm(AdapterContract):
    pass


async def rpc(scene: Scene, method: str, *args: Any) -> Any:
    """Call a method of the engine's own process."""
    [answer] = await scene.engine._llm.collective_rpc(method, args=args)
    return answer


SELF, MLP = "model.layers.0.self_attn", "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("layer", "which", "slice_", "index", "named"),
    [
        (f"{SELF}.qkv_proj", "a", 0, 0, f"{SELF}.q_proj.lora_A.weight"),
        (f"{SELF}.qkv_proj", "b", 2, 9, f"{SELF}.v_proj.lora_B.weight"),
        (f"{MLP}.gate_up_proj", "b", 1, 17, f"{MLP}.up_proj.lora_B.weight"),
        (f"{MLP}.down_proj", "a", 0, 3 * 128 + 5, f"{MLP}.down_proj.lora_A.weight"),
        (f"{MLP}.down_proj", "b", 0, 7, f"{MLP}.down_proj.lora_B.weight"),  # beyond its rank of 4: a slot has 8
    ],
)
def test_one_bit_of_an_adapter_in_the_engines_memory_is_refused_by_name(
    scene: Scene, layer: str, which: str, slice_: int, index: int, named: str
) -> None:
    async def run() -> None:
        sync = scene.sync()
        await sync._sync(scene.publish())
        await rpc(scene, "arm_adapter", layer, which, slice_, index)
        with pytest.raises(WeightSyncError, match=f"load check: .* differ from those published in {named}$"):
            await sync._sync(scene.publish())
        await rpc(scene, "disarm")
        assert sync.verified_version == 0
        assert [await scene.is_held(v) for v in (0, 1)] == [True, False]

    scene.run(run())


@pytest.mark.parametrize(
    ("module", "index", "bit", "named"),
    [
        (f"{SELF}.qkv_proj.base_layer", 1000, 0, "model.layers.0"),
        (f"{MLP}.down_proj.base_layer", 4000, 30, "model.layers.1"),
        ("model.embed_tokens", 3, 30, "model.embed_tokens"),  # token 0: in no canary prompt
        ("lm_head", 77, 0, "lm_head"),  # the last bit of one weight, which no canary can see
        ("model.norm", 9, 31, "model.norm"),
    ],
)
def test_one_bit_of_the_weights_under_the_adapters_quarantines_the_engine(
    scene: Scene, module: str, index: int, bit: int, named: str
) -> None:
    async def run() -> None:
        sync = scene.sync()
        await sync._sync(scene.publish())
        await rpc(scene, "flip", module, index, bit)
        with pytest.raises(WeightSyncError, match=f"base check: .* differ from the model's files in {named}$"):
            await sync._sync(scene.publish())
        await rpc(scene, "flip", module, index, bit)
        assert sync.verified_version == -1

    scene.run(run())


def test_an_adapter_in_another_slot_is_another_function(scene: Scene) -> None:
    """What is read back is what is computed with: a weight of B there changes the tokens' logprobs."""

    async def run() -> None:
        sync = scene.sync()
        for _ in range(2):
            await sync._sync(scene.publish())
        before = await scene.generate(1)
        await rpc(scene, "flip_adapter", f"{MLP}.down_proj", "b", 0, 2, 30)
        assert await scene.generate(1) != before
        await rpc(scene, "flip_adapter", f"{MLP}.down_proj", "b", 0, 2, 30)
        assert await scene.generate(1) == before

    scene.run(run())


def test_a_target_that_vllm_has_no_layer_for_is_refused_by_name(
    scene: Scene, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an engine starts, whose processes are asked for places before they get the first version."""
    monkeypatch.setattr(scene.engine, "_targets", [*scene.engine._targets, "model.layers.1.mlp.router"])
    with pytest.raises(Refused, match=r"got model\.layers\.1\.mlp\.router and 0 others .* rollout\.engine\.name=hf$"):
        scene.run(scene.engine._hold_adapters(LORA, str(publisher.folder)))


def test_an_engine_that_refuses_its_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[VllmEngine] = []

    async def refuses(*_: Any) -> None:
        raise Refused("no place for an adapter")

    monkeypatch.setattr(VllmEngine, "__init__", lambda *_: None)
    monkeypatch.setattr(VllmEngine, "_hold_adapters", refuses)
    monkeypatch.setattr(VllmEngine, "shutdown", lambda engine: ended.append(engine))
    with pytest.raises(Refused, match="no place for an adapter"):
        asyncio.run(VllmEngine.start(settings_for(Path("model"), options=VLLM_OPTIONS, lora=LORA)))
    assert len(ended) == 1
