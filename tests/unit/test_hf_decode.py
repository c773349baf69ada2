"""Models of several kinds, generated token by token: exact, or refused in a line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.collector.engine import EngineLost, EngineSettings, StagedWeights
from leeway.config.inputs import LoraConfig
from leeway.engines.hf_decode import load_decoder
from leeway.engines.hf_engine import HfEngine
from leeway.engines.hf_lora import Adapters
from leeway.engines.hf_threads import PassThreads
from leeway.engines.hf_weights import ModelTensors, load, read_back
from leeway.failures import Refused
from leeway.trainer.families import load_model
from leeway.weights import Canary, CanaryPrompts, Manifest, WeightSyncError, checksum_of, digest_of, plan_buckets

from ..engine_contract import engine_settings
from .test_packing import SIZES

GENERATED = {
    "qwen2": {"num_key_value_heads": 2},  # heads that share keys
    "mistral": {"sliding_window": 6},  # fewer tokens seen than there are
    "gemma2": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "sliding_window": 6},
    "opt": {},  # positions are learned
    "mixtral": {"num_local_experts": 4},
}


def save(folder: Path, kind: str, **options: Any) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | options))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def settings_of(folder: str, **changes: Any) -> EngineSettings:
    return engine_settings(Path(folder), **({"max_model_len": 64, "initial_version": 0} | changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", GENERATED)
def test_tokens_have_the_logprobs_of_one_pass_over_the_whole_sequence(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / kind, kind, **GENERATED[kind])
    engine = HfEngine(settings_of(folder))
    prompts = [[3], [5, 9, 4, 12, 7, 3, 8, 11, 10], [6, 2]]

    async def generate() -> list[Any]:
        asked = (engine.generate(p, n=3, temperature=0.8, max_tokens=30, stop_token_ids=[1]) for p in prompts)
        return await asyncio.gather(*asked)

    answers = asyncio.run(generate())
    engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, completions in zip(prompts, answers, strict=True):
        for c in completions:
            tokens = torch.tensor([prompt + c.tokens])
            with torch.no_grad():
                logprobs = (model(tokens).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
            expected = logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=0, atol=5e-5)
            assert set(c.policy_versions) == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "heads", "kv_heads", "longest", "kind", "adapted"),
    [
        (1, 4, 4, 45, "qwen2", False),
        (2, 4, 4, 45, "qwen2", False),
        (3, 7, 1, 400, "qwen2", False),
        (2, 4, 2, 45, "qwen2", False),
        (1, 4, 4, 45, "qwen2", True),
        (2, 4, 4, 45, "mixtral", False),
    ],
)
def test_the_numbers_of_a_row_are_its_own_on_any_number_of_threads(
    number: int, heads: int, kv_heads: int, longest: int, kind: str, adapted: bool, tmp_path: Path
) -> None:
    """To the last bit, in float32: alone, and among a hundred others of other lengths. `adapted`: with layers that may
    have adapters."""
    sizes = {"hidden_size": 192, "intermediate_size": 768, "head_dim": 48, "vocab_size": 304}
    folder = save(
        tmp_path / "model",
        kind,
        **(sizes | GENERATED[kind] | {"num_key_value_heads": kv_heads}),
        num_attention_heads=heads,
        max_position_embeddings=512,
    )
    sequences = [[3 + (7 * i + t * t) % 40 for t in range(6 + 7 * i % (longest - 6))] for i in range(101)]
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with PassThreads(number) as threads, torch.inference_mode():
            cpu = torch.device("cpu")
            with torch.inference_mode(False):
                decoder = load_decoder(folder, max_length=512, device=cpu, dtype=torch.float32, threads=threads)
                if adapted:
                    decoder.adapters = Adapters(decoder.model.lm, LoraConfig(rank=4, alpha=8.0), dtype=torch.float32)

            def logits_of(sequences: list[list[int]]) -> torch.Tensor:
                own = decoder.beside()
                rows = own.prefill([s[:-2] for s in sequences])
                passes = []
                for at in (-2, -1):
                    last = [s[at] for s in sequences], [len(s) + at for s in sequences]
                    passes.append(torch.stack(own.step(rows, *last, then=lambda logits, _: list(logits))))
                return torch.stack(passes, 1)

            together = logits_of(sequences)
            for i in range(0, len(sequences), 3):
                assert torch.equal(together[i], logits_of(sequences[i : i + 1])[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_row_that_is_not_a_number_spoils_no_other_one(tmp_path: Path) -> None:
    folder, cpu = save(tmp_path / "model", "qwen2"), torch.device("cpu")
    decoder = load_decoder(folder, max_length=64, device=cpu, dtype=torch.float32, threads=PassThreads(1))
    sequences = [list(range(3, 43)), [5, 6, 7]]

    def logits_of(spoil: bool) -> list[torch.Tensor]:
        rows = decoder.prefill(sequences)
        for layer in rows[0].pool._layers if spoil else []:
            for x in layer:
                x[rows[0].blocks] = float("nan")
        logits = decoder.step(rows, [9, 9], [40, 3], then=lambda logits, _: list(logits))
        decoder.free(rows)
        return logits

    with torch.inference_mode():
        whole, spoiled, again = logits_of(False), logits_of(True), logits_of(False)
    assert spoiled[0].isnan().all()
    assert torch.equal(spoiled[1], whole[1])
    assert torch.equal(again[0], whole[0]), "what was freed is forgotten"


@pytest.mark.slow
def test_a_model_with_a_state_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"rollout.engine.name: got hf for the model .* use vllm") as refused:
        HfEngine(settings_of(save(tmp_path / "model", "mamba", state_size=4)))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_cache_that_holds_no_whole_sequence_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2")
    with pytest.raises(Refused, match=r"cluster.kv_cache_gib: got 1e-06, which holds \d+ tokens"):
        HfEngine(settings_of(folder, kv_cache_gib=1e-6))


@pytest.mark.slow
def test_sequences_wait_for_memory_and_all_are_answered(tmp_path: Path) -> None:
    """Room for two sequences of the longest kind, asked for ten."""
    folder = save(tmp_path / "model", "qwen2")
    probe = HfEngine(settings_of(folder))
    bytes_per_token = probe._decoder.bytes_per_token
    probe.shutdown()
    engine = HfEngine(settings_of(folder, kv_cache_gib=(2 * 64 + 1) * bytes_per_token / 2**30))
    most = 0
    step = engine._decoder.step

    def counted(rows: Any, *others: Any, **more: Any) -> Any:
        nonlocal most
        most = max(most, len(rows))
        return step(rows, *others, **more)

    engine._decoder.step = counted  # type: ignore[method-assign]
    asked = engine.generate([4, 5], n=10, temperature=1.0, max_tokens=62, stop_token_ids=[2, 3])
    assert len(asyncio.run(asked)) == 10
    assert most == 2
    engine.shutdown()


@pytest.mark.slow
def test_a_pass_that_fails_ends_every_request_by_its_reason(tmp_path: Path) -> None:
    engine = HfEngine(settings_of(save(tmp_path / "model", "qwen2")))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory left")

    engine._decoder.step = fails  # type: ignore[method-assign]

    async def ask() -> None:
        for _ in range(2):  # the second one meets an engine that is dead already
            with pytest.raises(EngineLost, match="the inference engine died: RuntimeError: no memory left"):
                await engine.generate([4], n=2, temperature=1.0, max_tokens=4, stop_token_ids=[])
        engine.shutdown()
        with pytest.raises(EngineLost, match="shut down"):
            await engine.generate([4], n=2, temperature=1.0, max_tokens=4, stop_token_ids=[])

    asyncio.run(ask())
    assert engine.progress.num_sequences == 0


@pytest.mark.slow
def test_experts_are_joined_from_their_parts_and_each_part_is_needed(tmp_path: Path) -> None:
    model = load_model(save(tmp_path / "model", "mixtral", num_local_experts=4))
    model.requires_grad_(False)
    tensors = ModelTensors(model.lm)
    before = {name: tensor.clone() for name, tensor in tensors.tensors.items()}
    parts = [part for name, tensor in before.items() for part in tensors.names.split(name, tensor).items()]
    (plan,) = plan_buckets((([name], t.dtype, t.shape) for name, t in parts), 2**30)
    memory = plan.empty()
    for span, (_, tensor) in zip(plan.spans, parts, strict=True):
        span.tensor(memory).copy_(tensor)
    entries = plan.entries(checksum_of(span.data(memory).numpy(), "xxh3_128") for span in plan.spans)
    for tensor in tensors.tensors.values():
        tensor.zero_()

    def loaded(chosen: list[Any]) -> StagedWeights:
        canary = Canary(CanaryPrompts(scored=[], cached=[]), [], [], [])
        manifest = Manifest(3, chosen, [plan.num_bytes], canary, digest_of(chosen))
        load(staged := StagedWeights(manifest, [memory.numpy()]), tensors)
        return staged

    assert len(list(read_back(loaded(entries), tensors))) == len(entries)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.tensors.items())
    expert = next(e.name for e in entries if "experts.2." in e.name)
    with pytest.raises(WeightSyncError, match=r"no published tensor reached .*experts"):
        loaded([e for e in entries if e.name != expert])
    changed = loaded(entries)
    tensors.tensors[tensors.owner[expert]].view(-1)[-1] += 1
    with pytest.raises(WeightSyncError, match=r"after the load, weights differ from those published in .*experts"):
        list(read_back(changed, tensors))


@pytest.mark.slow
@torch.inference_mode()
def test_reading_ends_where_the_last_layer_has_its_keys_and_values(tmp_path: Path) -> None:
    """The layer's own result is of no use to anybody. That the numbers are right is for the tests above."""
    folder = save(tmp_path / "model", "qwen2")
    with torch.inference_mode(False):
        options: Any = {"device": torch.device("cpu"), "dtype": torch.float32, "threads": PassThreads(1)}
        decoder = load_decoder(folder, max_length=64, **options)
    decoder.free(decoder.prefill([[1]]))  # the first pass says how many layers there are
    layers = decoder.model.lm.model.layers
    computed: list[int] = []
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: computed.append(number))
    decoder.prefill([[3, 5, 7], [4, 6, 8]])
    assert computed == list(range(len(layers) - 1))
    decoder.score([[3, 5, 7]])
    assert computed[-1] == len(layers) - 1
