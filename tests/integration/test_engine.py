"""One real engine against a trainer's publications: exact in flight, and every broken hand-over refused by name.

The trainer's side is the plain Hugging Face model in float32: its logprobs are the truth that the engine is held to.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from leeway.algorithms.objective import PolicyObjective
from leeway.collector import engine_worker_env
from leeway.collector.clock import ActivityClock, RolloutClock
from leeway.collector.engine import Engine, EngineSettings
from leeway.collector.hand_over import HandOver
from leeway.collector.progress import EngineHung
from leeway.tasks.tiny_tokenizer import build_tokenizer
from leeway.trainer.canary import score_canary
from leeway.trainer.convert import convert
from leeway.trainer.optimizer import OptimizerSettings
from leeway.trainer.trainer import Trainer, TrainerSettings
from leeway.types import TrainBatch, Trajectory, batch_trajectories
from leeway.weights import Canary, CanaryPrompts, HandOverError, Manifest, digest_of, plan_buckets, sha256_of

TOLERANCE = 1e-4
VOCABULARY = 96
pytestmark = pytest.mark.timeout(200)


class Publisher:
    """A float32 model that moves, and its publications."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen2",
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=128,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            initializer_range=0.1,
            eos_token_id=1,
        )
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.model.save_pretrained(folder)
        self.version = -1
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        generator = torch.Generator().manual_seed(1)
        draw = lambda n, t: torch.randint(2, VOCABULARY, (n, t), generator=generator).tolist()  # noqa: E731
        self.prompts = CanaryPrompts(scored=draw(4, 24), cached=draw(2, 80))

    @torch.no_grad()
    def next(self, scale: float = 0.02) -> tuple[Manifest, list[np.ndarray]]:
        """Move the weights, then publish them as the next version."""
        self.version += 1
        if self.version:
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)
        self.states[self.version] = copy.deepcopy(self.model.state_dict())
        return self.publication()

    @torch.no_grad()
    def publication(self) -> tuple[Manifest, list[np.ndarray]]:
        parameters = dict(self.model.named_parameters())
        tied = {"model.embed_tokens.weight": ["lm_head.weight"]}
        plans = plan_buckets((([n, *tied.get(n, [])], p.dtype, p.shape) for n, p in parameters.items()), 50_000)
        assert len(plans) > 3, "the stream must come in several pieces"
        entries, buckets = [], []
        for plan in plans:
            memory = plan.empty()
            for place in plan.places:
                place.tensor(memory).copy_(parameters[place.names[0]])
            entries += plan.entries(sha256_of(place.data(memory)) for place in plan.places)
            buckets.append(memory)
        manifest = Manifest(self.version, entries, len(buckets), 0, self.canary(), digest_of(entries))
        return manifest, [b.numpy() for b in buckets]

    @torch.no_grad()
    def canary(self) -> Canary:
        scored = [self.logprobs(s)[1:] for s in self.prompts.scored]
        best = [self.model(torch.tensor([s])).logits[0, -1].log_softmax(-1).max(-1) for s in self.prompts.cached]
        return Canary(self.prompts, scored, [int(b.indices) for b in best], [float(b.values) for b in best])

    @torch.no_grad()
    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Of each token given those before it; 0.0 for the first."""
        logits = self.model(torch.tensor([tokens])).logits[0] / temperature
        picked = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        return [0.0, *picked.tolist()]

    def logprobs_of(self, version: int, tokens: list[int], temperature: float) -> list[float]:
        now = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.states[version])
        try:
            return self.logprobs(tokens, temperature)
        finally:
            self.model.load_state_dict(now)


class Served:
    """An engine with its hand-over, driven from tests that are not coroutines."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self.folder = folder
        self.publisher = Publisher(folder)
        self.engine = Engine(_engine_settings(folder))

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(asyncio.wait_for(coroutine, 60))

    def close(self) -> None:
        self.engine.shutdown()
        self._runner.close()  # ends what the engine still has to do in this loop, and then the loop

    def hand_over(self, in_flight: str = "recompute", *, deadline_s: float = 30) -> HandOver:
        async def nothing(newer_than: int, timeout_s: float) -> None:
            await asyncio.sleep(timeout_s)

        return HandOver(
            self.engine,
            nothing,
            in_flight=in_flight,
            tolerance=TOLERANCE,
            pull_every=1,
            deadline_s=deadline_s,
            paused=lambda: ActivityClock().doing("pause"),
            on_quarantine=nothing,  # type: ignore[arg-type]  # never called: the first failure raises
            max_failures=0,
        )

    def give(self, manifest: Manifest, buckets: list[np.ndarray], in_flight: str = "recompute") -> float:
        """Hand over one publication with all checks; returns the gap. Raises HandOverError."""
        return self.run(self.give_async(manifest, buckets, in_flight))

    async def give_async(self, manifest: Manifest, buckets: list[np.ndarray], in_flight: str = "recompute") -> float:
        hand_over = self.hand_over(in_flight)
        await hand_over._take_over(manifest, _stream(buckets))
        return hand_over.drain_reports()[0].served_gap

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method of the engine's own process; see `engine_saboteur`."""
        return self.run(self.engine._llm.collective_rpc(method, args=args))[0]

    def recover(self) -> None:
        """After a refused hand-over the engine is paused and half loaded: a whole good version repairs it."""
        assert self.give(*self.publisher.next()) <= TOLERANCE


def _streamed(publication: tuple[Manifest, list[np.ndarray]]) -> tuple[Manifest, AsyncIterator[np.ndarray]]:
    return publication[0], _stream(publication[1])


async def _stream(buckets: list[np.ndarray]) -> AsyncIterator[np.ndarray]:
    for bucket in buckets:
        yield bucket


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        # The engine's process runs our own extension with faults that can be armed; without one it is ours.
        patch.setattr(engine_worker_env, "WORKER_EXTENSION", "engine_saboteur.Saboteur")
        patch.syspath_prepend(here := str(Path(__file__).parent))
        patch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))
        served = Served(tmp_path_factory.mktemp("model"))
        served.recover()
        yield served
        served.close()


@pytest.mark.parametrize("scale", [1e-4, 0.02])
def test_clean_hand_overs_raise_no_alarm(served: Served, scale: float) -> None:
    gaps = [served.give(*served.publisher.next(scale)) for _ in range(20)]
    assert 0 < max(gaps) <= TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_in_flight_are_exact_for_their_own_version(served: Served, temperature: float) -> None:
    """Completions that live through three updates: each token's logprob is that of the weights its version names."""
    most, before, after = _in_flight(served, "recompute", temperature=temperature)
    assert most >= 3, "no completion lived through the updates"
    assert 0 < max(before, after) <= TOLERANCE


def test_an_update_that_keeps_the_cache_is_inexact_for_those_in_flight_only(served: Served) -> None:
    """Under "keep" a completion goes on over the keys and values of older weights. What comes after is exact again."""
    most, before, after = _in_flight(served, "keep", temperature=1.0)
    assert most >= 3, "no completion lived through the updates"
    assert before <= TOLERANCE < after


def _in_flight(served: Served, in_flight: str, *, temperature: float) -> tuple[int, float, float]:
    """Update three times while completions are under way.

    Returns the most versions in one of them, and the largest gaps of tokens from the weights that their versions name:
    of those before the first update of their completion, and of those after it.
    """

    async def rollouts_and_updates() -> list[Any]:
        prompts = [[2 + (7 * i + j) % 90 for j in range(12)] for i in range(12)]
        updates = [served.publisher.next() for _ in range(3)]  # ready, so that they come while generation lasts
        running = [
            asyncio.ensure_future(
                served.engine.generate(p, n=2, temperature=temperature, max_tokens=160, stop_token_ids=[])
            )
            for p in prompts
        ]
        for update in updates:
            await asyncio.sleep(0.05)
            await served.give_async(*update, in_flight=in_flight)
        return list(zip(prompts, await asyncio.gather(*running), strict=True))

    results = served.run(rollouts_and_updates())
    completions = [(p, c) for p, cs in results for c in cs]
    before = after = 0.0
    for prompt, completion in completions:
        tokens = [*prompt, *completion.tokens]
        for version in set(completion.policy_versions):
            truth = served.publisher.logprobs_of(version, tokens, temperature)[len(prompt) :]
            pairs = zip(completion.policy_versions, completion.logprobs, truth, strict=True)
            worst = max(abs(got - want) for v, got, want in pairs if v == version)
            if version == completion.policy_versions[0]:
                before = max(before, worst)
            else:
                after = max(after, worst)
    return max(len(set(c.policy_versions)) for _, c in completions), before, after


def _flip_a_byte(manifest: Manifest, buckets: list[np.ndarray]) -> tuple[Manifest, list[np.ndarray]]:
    broken = [b.copy() for b in buckets]
    broken[1][100] ^= 0x10
    return manifest, broken


def _without(name: str) -> Callable[[Manifest, list[np.ndarray]], tuple[Manifest, list[np.ndarray]]]:
    def mutate(manifest: Manifest, buckets: list[np.ndarray]) -> tuple[Manifest, list[np.ndarray]]:
        entries = [e for e in manifest.entries if e.name != name]
        assert len(entries) == len(manifest.entries) - 1
        return replace(manifest, entries=entries, digest=digest_of(entries)), buckets

    return mutate


def _swap_two(manifest: Manifest, buckets: list[np.ndarray]) -> tuple[Manifest, list[np.ndarray]]:
    """Two tensors of one shape change names, consistently: no hash can see it."""
    a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    names = {a: b, b: a}
    entries = [replace(e, name=names.get(e.name, e.name)) for e in manifest.entries]
    return replace(manifest, entries=entries, digest=digest_of(entries)), buckets


def _lose_a_bucket(manifest: Manifest, buckets: list[np.ndarray]) -> tuple[Manifest, list[np.ndarray]]:
    return manifest, buckets[:-1]


def _lose_an_entry(manifest: Manifest, buckets: list[np.ndarray]) -> tuple[Manifest, list[np.ndarray]]:
    return replace(manifest, entries=manifest.entries[1:]), buckets


@pytest.mark.parametrize(
    ("mutate", "check", "names"),
    [
        (_flip_a_byte, "bytes", "SHA-256"),
        (_lose_a_bucket, "bytes", "buckets"),
        (_lose_an_entry, "bytes", "digest"),
        (_without("model.layers.1.mlp.down_proj.weight"), "load", "model.layers.1.mlp.down_proj"),
        (_without("lm_head.weight"), "load", "lm_head"),
        (_swap_two, "compute", "canary"),
    ],
    ids=["byte flipped", "bucket lost", "entry lost", "tensor left out", "tied head left out", "tensors swapped"],
)
def test_a_broken_hand_over_is_refused_by_name(served: Served, mutate: Any, check: str, names: str) -> None:
    manifest, buckets = served.publisher.next()
    with pytest.raises(HandOverError) as refused:
        served.give(*mutate(manifest, buckets))
    assert refused.value.check == check
    assert refused.value.policy_version == manifest.policy_version
    assert names in str(refused.value)
    served.recover()


MLP = "model.layers.0.mlp.gate_proj.weight"
UP, OTHER_LAYER = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("fault", "module", "index", "bit", "check", "names"),
    [
        ("flip", "model.embed_tokens", 3, 30, "load", "model.embed_tokens"),  # token 0: in no canary prompt
        ("flip", "model.embed_tokens", 40 * 64, 31, "load", "model.embed_tokens"),
        ("flip", "lm_head", 95 * 64 + 1, 31, "load", "lm_head"),
        ("flip", "lm_head", 77, 0, "load", "lm_head"),  # the last bit of one weight, which no canary can see
        ("flip", "model.norm", 9, 31, "load", "model.norm"),
        ("flip", "model.layers.1.input_layernorm", 0, 23, "load", "model.layers.1"),
        ("flip", "model.layers.0.self_attn.qkv_proj", 1000, 26, "load", "model.layers.0"),
        ("flip", "model.layers.1.self_attn.o_proj", 2000, 31, "load", "model.layers.1"),
        ("flip", "model.layers.0.mlp.gate_up_proj", 3000, 10, "load", "model.layers.0"),
        ("flip", "model.layers.1.mlp.down_proj", 4000, 30, "load", "model.layers.1"),
        ("half", "model.layers.1.mlp.down_proj", 0, 0, "load", "model.layers.1"),
        ("half", "model.embed_tokens", 0, 0, "load", "model.embed_tokens"),
        ("half", "lm_head", 0, 0, "load", "lm_head"),
        ("swap", f"{MLP} {OTHER_LAYER}", 0, 0, "load", "model.layers.0, model.layers.1"),
        ("swap", f"{MLP} {UP}", 0, 0, "compute", "scored prompts"),  # within a layer: sums are equal, the function not
    ],
)
def test_a_load_that_went_wrong_inside_the_engine_is_refused_by_name(
    served: Served, fault: str, module: str, index: int, bit: int, check: str, names: str
) -> None:
    served.rpc("arm", fault, module, index, bit)
    manifest, buckets = served.publisher.next()
    with pytest.raises(HandOverError) as refused:
        served.give(manifest, buckets)
    served.rpc("disarm")
    assert (refused.value.check, refused.value.policy_version) == (check, manifest.policy_version)
    assert names in str(refused.value)
    served.recover()


def test_what_is_read_back_is_what_the_engine_computes_with(served: Served) -> None:
    """A weight changed where the read-back looks changes the function: it does not look at a copy."""
    token = served.publisher.prompts.scored[0][2]
    canary = served.publisher.canary()
    assert served.run(served.engine.score(canary)).within(TOLERANCE)
    modules = {"model.embed_tokens": token * 64, "lm_head": token * 64, "model.norm": 1}
    for module, index in {**modules, **dict.fromkeys(PACKED, 100)}.items():
        served.rpc("flip", module, index, 31)
        assert not served.run(served.engine.score(canary)).within(TOLERANCE), module
        served.rpc("flip", module, index, 31)
    assert served.run(served.engine.score(canary)).within(TOLERANCE)


PACKED = [
    f"model.layers.{i}.{part}"
    for i in (0, 1)
    for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


def test_an_engine_says_what_it_works_on_and_what_waits(served: Served) -> None:
    """More sequences than places: those that wait are counted as such, and their rollout's clock stands meanwhile."""
    engine, progress = served.engine, served.engine.progress
    assert engine.places == 64
    assert engine.cache_tokens > 64 * 256
    most_inside = most_waiting = 0

    async def rollouts() -> list[RolloutClock]:
        nonlocal most_inside, most_waiting
        clocks = [RolloutClock() for _ in range(12)]

        async def ask(clock: RolloutClock) -> None:
            with clock:
                await engine.generate([5] * 40, n=8, temperature=1.0, max_tokens=100, stop_token_ids=[], clock=clock)

        asking = [asyncio.ensure_future(ask(clock)) for clock in clocks]
        while not all(a.done() for a in asking):
            most_inside = max(most_inside, progress.num_sequences)
            most_waiting = max(most_waiting, progress.num_waiting if progress.num_tokens else 0)
            await asyncio.sleep(0.01)
        return clocks

    begun = time.monotonic()
    clocks = served.run(rollouts())
    wall_s = time.monotonic() - begun
    assert most_inside == 96
    assert most_waiting >= 32
    assert (progress.num_sequences, progress.num_waiting, progress.num_tokens) == (0, 0, 0)
    worked = [clock.counted_s - clock.idle_s for clock in clocks]
    assert all(0 < w <= wall_s for w in worked)
    assert max(worked) < 0.9 * wall_s, "the last ones waited for the first ones' places"


def test_an_engine_that_stands_still_is_found_out_and_may_go_on(served: Served) -> None:
    process = psutil.Process(served.rpc("process_id"))
    progress = served.engine.progress

    async def hang() -> None:
        watching = asyncio.create_task(progress.watch(1.0))
        asking = asyncio.create_task(
            served.engine.generate([5] * 4, n=2, temperature=1.0, max_tokens=200, stop_token_ids=[])
        )
        await asyncio.sleep(0.1)
        process.suspend()
        try:
            with pytest.raises(EngineHung, match="it has 2 sequences to answer"):
                await watching
        finally:
            process.resume()
        await asking
        assert progress.silent_s() == 0

    served.run(hang())


def test_an_engine_started_again_with_old_weights_serves_no_newer_group(served: Served) -> None:
    """What it holds is not believed: it starts a group only after a proven load of at least the group's floor."""
    hand_over = served.hand_over(deadline_s=0.2)  # of a collector that has just started on this engine
    with pytest.raises(TimeoutError, match=f"weights of version {served.publisher.version}; .* serves version -1"):
        served.run(hand_over.until_verified(served.publisher.version))
    served.run(hand_over._take_over(*_streamed(served.publisher.publication())))  # the same old version, proven
    floor = served.publisher.version + 1
    with pytest.raises(TimeoutError, match=f"weights of version {floor}; .* serves version {floor - 1}"):
        served.run(hand_over.until_verified(floor))


def test_a_prefix_cache_kept_across_versions_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary's second route: prompt logprobs never read the cache, the continuation of a cached context does."""
    served.recover()  # leaves the canary's contexts in the prefix cache
    llm = served.engine._llm
    pause = llm.pause_generation
    monkeypatch.setattr(llm, "pause_generation", lambda mode, clear_cache: pause(mode=mode, clear_cache=False))
    with pytest.raises(HandOverError, match=r"compute check: .* \d\.?\d*e-\d+ nats on scored .* prefix cache"):
        served.give(*served.publisher.next())
    monkeypatch.undo()
    served.recover()


def test_where_the_cache_is_kept_a_version_that_failed_can_be_loaded_again(served: Served) -> None:
    """What the failed load left in the prefix cache, the canary's own contexts among it, is never looked at again."""
    served.give(*served.publisher.next(), in_flight="keep")
    manifest, buckets = served.publisher.next()
    for _ in range(2):
        with pytest.raises(HandOverError, match="compute check"):
            served.give(*_swap_two(manifest, buckets), in_flight="keep")
        assert served.give(manifest, buckets, in_flight="keep") <= TOLERANCE
    served.recover()


def test_a_converted_checkpoint_is_served_from_disk_and_agrees_with_the_trainer(served: Served, tmp_path: Path) -> None:
    """Trained, saved in shards, converted, loaded by an engine that starts: it computes what the trainer does."""
    base = served.folder
    build_tokenizer(["12 + 34 = 46"]).save_pretrained(base)
    trainer = Trainer(_settings(base, served.publisher.prompts), rank=0, init_method=_free_address())
    try:
        for step in range(3):
            trainer.forward_backward(_batch(step))
            trainer.optim_step()
        trainer.save_state(str(tmp_path / "run/checkpoints/step-000003/trainer"))
        canary = score_canary(trainer._model, served.publisher.prompts, torch.device("cpu"))
    finally:
        trainer.close()
    assert not served.run(served.engine.score(canary)).within(TOLERANCE), "these are other weights"
    ((folder, written),) = convert(tmp_path / "run", base_model=str(base))
    assert written
    # An engine of its own: where the head is tied, loading anew into one that runs is not what loading at its start is.
    # And a process of its own, because two engines in one do not always end.
    work = tmp_path / "work.json"
    work.write_text(json.dumps([asdict(_engine_settings(folder, load_weights=True)), asdict(canary)]))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCORE, str(work)], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    gap = float(done.stdout.split()[-1])
    assert 0 < gap <= TOLERANCE


SCORE = """
import asyncio, json, os, sys
from leeway.collector.engine import Engine, EngineSettings
from leeway.weights import Canary, CanaryPrompts
settings, canary = json.load(open(sys.argv[1]))
engine = Engine(EngineSettings(**settings))
gap = asyncio.run(engine.score(Canary(**canary | {"prompts": CanaryPrompts(**canary["prompts"])})))
engine.shutdown()
print(gap.largest, flush=True)
os._exit(0)
"""


def _engine_settings(folder: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=256,
        seed=0,
        options={"enforce_eager": True, "block_size": 32, "max_num_seqs": 64},
        cores=[],
        kv_cache_gib=1.0,
        **changes,
    )


def _settings(path: Path, prompts: CanaryPrompts) -> TrainerSettings:
    return TrainerSettings(
        model_path=str(path),
        objective=PolicyObjective(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
        optimizer=OptimizerSettings(
            lr=0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            schedule="constant",
            warmup_steps=0,
            min_lr_frac=0.0,
            max_grad_norm=1.0,
            total_steps=3,
        ),
        num_ranks=1,
        device="cpu",
        compute_dtype="float32",
        publish_dtype="float32",
        attn="sdpa",
        temperature=1.0,
        max_policy_lag=None,
        max_tokens_per_microbatch=1000,
        gradient_checkpointing=False,
        bucket_bytes=1 << 20,
        canary=prompts,
        num_threads=1,
        seed=0,
        timeout_s=60.0,
    )


def _batch(step: int) -> TrainBatch:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(2, VOCABULARY, (4, 20), generator=draw).tolist()
    trajectories = [
        Trajectory(
            prompt_tokens=row[:8],
            response_tokens=row[8:],
            loss_mask=[True] * 12,
            behavior_logprobs=[-4.5] * 12,
            policy_versions=[0] * 12,
            reward=0.0,
            finish_reason="stop",
            text="",
        )
        for row in tokens
    ]
    return batch_trajectories(trajectories, [1.0, -1.0, 0.5, -0.5], num_sequences=4, num_tokens=48)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
