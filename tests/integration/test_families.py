"""Every family of models: a real engine agrees with the real trainer after two weight syncs, token by token."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.collector.clock import ActivityClock
from leeway.collector.engine import EngineSettings
from leeway.collector.weight_sync import WeightSync
from leeway.engines import vllm_worker_env
from leeway.engines.vllm_engine import VllmEngine
from leeway.trainer.tensors import saved_tensors
from leeway.trainer.trainer import Trainer
from leeway.transports.object_store import ObjectStore
from leeway.types import Trajectory, batch_trajectories
from leeway.weights import CanaryPrompts, Tolerance, WeightSyncError

from ..trainers import OPTIMIZER, batch_of, end_group, free_address, random_trajectories, settings_of

TOLERANCE = 1e-4
TEMPERATURE = 0.8
VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "llama tied": {"tie_word_embeddings": True},
    "gemma": {},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    # With buffers: what corrects a router's scores, or scales a layer.
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 256,
        "pad_token_id": 0,
    },
}
EXPERTS = {"mixtral": "block_sparse_moe.experts", "qwen3_moe": "mlp.experts"}
WITH_BUFFERS = ("glm4_moe", "gemma4_text")
# The tied Qwen2 is in test_engine.py.
pytestmark = [pytest.mark.timeout(600), pytest.mark.long("an engine for each family")]


RANKS = [("qwen2", 4), ("mixtral", 2), ("qwen3_moe", 2)]
"""Engines of several processes, each with its part of every matrix, and of every expert."""
OF_FOUR = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def save_model(folder: Path, family: str, ranks: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **(SIZES | FAMILIES[family] | (OF_FOUR if ranks == 4 else {})))
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    change_buffers(lm)
    lm.save_pretrained(folder)


def change_buffers(lm: torch.nn.Module) -> int:
    """Give persistent buffers other values: at their first ones nothing shows. Returns how many there are."""
    buffers = [t for t in saved_tensors(lm).values() if not isinstance(t, torch.nn.Parameter)]
    for buffer in buffers:
        buffer.normal_(1.0, 0.5)
    return len(buffers)


def canary_prompts() -> CanaryPrompts:
    generator = torch.Generator().manual_seed(1)
    draw = lambda n, t: torch.randint(2, VOCABULARY, (n, t), generator=generator).tolist()  # noqa: E731
    return CanaryPrompts(scored=draw(3, 24), cached=draw(2, 80))


def start_engine(folder: Path, ranks: int) -> VllmEngine:
    return VllmEngine(
        EngineSettings(
            model_path=str(folder),
            dtype="float32",
            device="cpu",
            max_model_len=256,
            seed=0,
            options={"enforce_eager": True, "max_num_seqs": 16, "tensor_parallel_size": ranks},
            cores=[],
            kv_cache_gib=0.5,
        )
    )


async def weight_sync(engine: VllmEngine, trainer: Trainer) -> float:
    """Give the trainer's weights to the engine with all checks; returns the gap on the canary."""

    async def nothing(*_: Any) -> None:
        raise AssertionError("nobody pulls, nothing fails")

    trainer.publish()
    publication = trainer.publication()
    receiver = WeightSync(
        engine,
        nothing,
        ObjectStore.of_this_process(),
        in_flight="recompute",
        tolerance=Tolerance(TOLERANCE),
        pull_every=1,
        deadline_s=200,
        paused=lambda: ActivityClock().doing("pause"),
        on_quarantine=nothing,
        max_failures=0,
    )
    staged, fetched_bytes = await receiver._staged(publication)
    await receiver._load_and_verify(staged, 0.0, fetched_bytes)
    staged.release()
    return receiver.drain_reports()[0].served_gap.largest


async def sampled(engine: VllmEngine, version: int) -> list[Trajectory]:
    trajectories = []
    for i in range(3):
        prompt = [2 + (7 * i + j) % 90 for j in range(10 + i)]
        for completion in await engine.generate(prompt, n=2, temperature=TEMPERATURE, max_tokens=24, stop_token_ids=[]):
            assert set(completion.policy_versions) == {version}
            trajectories.append(
                Trajectory(
                    prompt_tokens=prompt,
                    response_tokens=list(completion.tokens),
                    loss_mask=[True] * len(completion.tokens),
                    behavior_logprobs=list(completion.logprobs),
                    policy_versions=list(completion.policy_versions),
                    reward=0.0,
                    finish_reason="length",
                    text="",
                )
            )
    return trajectories


@pytest.mark.parametrize(("family", "ranks"), [*((family, 1) for family in FAMILIES), *RANKS])
def test_engine_and_trainer_agree_after_weight_syncs(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker_env, "WORKER_EXTENSION", "engine_saboteur.Saboteur")
    monkeypatch.syspath_prepend(here := str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))
    save_model(tmp_path, family, ranks)
    runner, threads = asyncio.Runner(), torch.get_num_threads()
    settings = settings_of(tmp_path, canary=canary_prompts(), bucket_bytes=50_000)
    trainer = Trainer(settings, rank=0, init_method=free_address())
    engine = start_engine(tmp_path, ranks)
    try:
        for version in (1, 2):
            trainer.forward_backward(batch_of(random_trajectories(version, 8, version=version - 1)))
            assert trainer.optim_step()["train/lr"] == OPTIMIZER.lr
            # Nobody trains them, but what was resumed may have others than the engine's files.
            assert bool(change_buffers(trainer._model.lm)) == (family in WITH_BUFFERS)
            gap = runner.run(asyncio.wait_for(weight_sync(engine, trainer), 200))
            assert 0 < gap <= TOLERANCE
            trajectories = runner.run(asyncio.wait_for(sampled(engine, version), 200))
            batch = batch_trajectories(
                trajectories, [0.0] * len(trajectories), num_sequences=1, num_tokens=1, temperature=TEMPERATURE
            )
            worst = (trainer.token_logprobs(batch) - batch.behavior_logprobs).abs().max().item()
            print(f"{family}, version {version}: canary {gap:.1e}, {len(batch.response_tokens)} tokens {worst:.1e}")
            assert 0 < worst <= TOLERANCE
        if experts := EXPERTS.get(family):
            # The last bit of one weight, which no canary can see: experts are read back too.
            rpc = engine._llm.collective_rpc("arm_expert", args=(f"model.layers.1.{experts}.routed_experts", 2, 100))
            runner.run(asyncio.wait_for(rpc, 200))
            with pytest.raises(WeightSyncError, match=r"the load check.*differ.* in model\.layers\.1\.experts\.2$"):
                runner.run(asyncio.wait_for(weight_sync(engine, trainer), 200))
            assert runner.run(asyncio.wait_for(weight_sync(engine, trainer), 200)) <= TOLERANCE
    finally:
        engine.shutdown()
        runner.close()  # ends what the engine still has to do in this loop, and then the loop
        end_group()
        torch.set_num_threads(threads)
