"""What every inference engine is held to: one suite, run over each of them with a small real model.

The trainer's side is the plain Hugging Face model in float32: its logprobs are the truth that an engine is held to.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leeway.collector.clock import ActivityClock, RolloutClock
from leeway.collector.engine import Engine, EngineSettings
from leeway.collector.weight_sync import WeightSync
from leeway.transports.device_ipc import DeviceIpc
from leeway.transports.device_memory import HostMemory
from leeway.transports.object_store import ObjectStore
from leeway.weights import (
    Canary,
    CanaryPrompts,
    Manifest,
    Publication,
    Tolerance,
    WeightSyncError,
    checksum_of,
    digest_of,
    plan_buckets,
)

TOLERANCE = 1e-4
VOCABULARY = 96
OTHER_TEMPERATURE = "the same at a temperature at which logprobs are not divided"


class Publisher:
    """A float32 model that moves, and its publications."""

    def __init__(self, folder: Path, hidden_size: int = 64) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = folder
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen2",
            vocab_size=VOCABULARY,
            hidden_size=hidden_size,
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
        self._moves = torch.Generator().manual_seed(2)  # its own: equal moves in each test would add up
        generator = torch.Generator().manual_seed(1)
        draw = lambda n, t: torch.randint(2, VOCABULARY, (n, t), generator=generator).tolist()  # noqa: E731
        self.prompts = CanaryPrompts(scored=draw(4, 24), cached=draw(2, 80))

    @torch.no_grad()
    def next(self, scale: float = 0.02) -> tuple[Manifest, list[np.ndarray]]:
        """Move the weights, then publish them as the next version."""
        self.version += 1
        if self.version:
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self._moves) * scale)
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
            for span in plan.spans:
                span.tensor(memory).copy_(parameters[span.names[0]])
            entries += plan.entries(checksum_of(span.data(memory).numpy(), "xxh3_128") for span in plan.spans)
            buckets.append(memory)
        sizes = [memory.nbytes for memory in buckets]
        manifest = Manifest(self.version, entries, sizes, self.canary(), digest_of(entries))
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
    """An engine with its weight sync, driven from tests that are not coroutines."""

    def __init__(self, folder: Path, start: Callable[[EngineSettings], Engine], *, hidden_size: int = 64) -> None:
        self._runner = asyncio.Runner()
        self.folder = folder
        self.publisher = Publisher(folder, hidden_size)
        self.engine: Any = start(engine_settings(folder))

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(asyncio.wait_for(coroutine, 250))

    def close(self) -> None:
        self.engine.shutdown()
        self._runner.close()  # ends what the engine still has to do in this loop, and then the loop

    def weight_sync(
        self, in_flight: str = "recompute", *, deadline_s: float = 200, transport: Any = None
    ) -> WeightSync:
        async def nothing(newer_than: int, timeout_s: float) -> None:
            await asyncio.sleep(timeout_s)

        return WeightSync(
            self.engine,
            nothing,
            transport or ObjectStore.of_this_process(),
            in_flight=in_flight,
            tolerance=Tolerance(TOLERANCE),
            pull_every=1,
            deadline_s=deadline_s,
            paused=lambda: ActivityClock().doing("pause"),
            on_quarantine=nothing,  # type: ignore[arg-type]  # never called: the first failure raises
            max_failures=0,
        )

    def give(self, manifest: Manifest, buckets: list[np.ndarray], in_flight: str = "recompute") -> float:
        """Sync one publication with all checks; returns the gap. Raises WeightSyncError."""
        return self.run(self.give_async(manifest, buckets, in_flight))

    async def give_async(self, manifest: Manifest, buckets: list[np.ndarray], in_flight: str = "recompute") -> float:
        weight_sync = self.weight_sync(in_flight)
        await sync(weight_sync, manifest, buckets)
        return weight_sync.drain_reports()[0].served_gap.largest

    def recover(self) -> None:
        """After a refused weight sync the engine is paused and half loaded: a whole good version repairs it."""
        assert self.give(*self.publisher.next()) <= TOLERANCE


async def sync(weight_sync: WeightSync, manifest: Manifest, buckets: list[np.ndarray]) -> None:
    """One version through all phases."""
    staged, fetched_bytes = await weight_sync._staged(Publication(manifest, buckets))
    try:
        await weight_sync._load_and_verify(staged, 0.0, fetched_bytes)
    finally:
        staged.release()


def engine_settings(folder: Path, **changes: Any) -> EngineSettings:
    settings = EngineSettings(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=256,
        seed=0,
        options={"max_num_seqs": 64},
        cores=[],
        kv_cache_gib=1.0,
        sleep_level=2,
    )
    return replace(settings, **changes)


def check_masks(served: Served, *, temperature: float = 0.7) -> None:
    """Logprobs are those of what was left to draw from, the engine says what that was, and no answer is too short."""
    publisher, prompt, stops = served.publisher, [3, 17, 40, 5], [1, 7, 20]
    asked: list[tuple[dict[str, Any], int, float, int]] = [
        ({"top_k": 5}, 5, 1.0, 0),
        ({"top_k": 9, "top_p": 0.6}, 9, 0.6, 0),
        ({"min_tokens": 6}, VOCABULARY, 1.0, 6),
        ({"top_k": 4, "min_tokens": 6}, 4, 1.0, 6),
    ]

    async def all_at_once() -> list[Any]:
        """Beside a canary, which asks in another way."""
        how: dict[str, Any] = {"n": 8, "temperature": temperature, "max_tokens": 12, "stop_token_ids": stops}
        calls = [served.engine.generate(prompt, **how, **own) for own, *_ in asked]
        *answers, gap = await asyncio.gather(*calls, served.engine.score(publisher.canary()))
        assert gap.largest <= TOLERANCE
        return answers

    for (own, top_k, top_p, min_tokens), completions in zip(asked, served.run(all_at_once()), strict=True):
        for c in completions:
            assert len(c.tokens) >= min_tokens
            logits = publisher.model(torch.tensor([prompt + c.tokens])).logits[0, len(prompt) - 1 : -1] / temperature
            for i, (token, row) in enumerate(zip(c.tokens, logits.detach(), strict=True)):
                if i < min_tokens:
                    assert token not in stops
                    row[stops] = float("-inf")
                order = row.argsort(descending=True)[:top_k]
                mass = row[order].softmax(-1)
                left = set(order[(mass.cumsum(-1) - mass) < top_p].tolist())
                if "top_k" in own:
                    assert set(c.kept[i]) == left, (own, i)
                chosen = sorted(left)
                expected = row[chosen].log_softmax(-1)[chosen.index(token)].item()
                assert c.logprobs[i] == pytest.approx(expected, abs=TOLERANCE)
        assert all(sorted(c.barred) == stops for c in completions) if min_tokens else True
        assert all((c.kept is None) == ("top_k" not in own) for c in completions)


def _in_flight(served: Served, in_flight: str, *, temperature: float, asleep: bool = False) -> tuple[int, float, float]:
    """Update three times while completions are under way; `asleep`: the engine sleeps before each update.

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
            seen = served.engine.progress.num_tokens
            # Ten tokens more in each completion; on a busy machine all may have ended by then.
            while served.engine.progress.num_tokens < seen + 240 and not all(task.done() for task in running):
                await asyncio.sleep(0.002)
            if asleep:
                assert await served.engine.sleep(in_flight=in_flight) > 0
                seen = served.engine.progress.num_tokens
                await asyncio.sleep(0.1)
                assert served.engine.progress.num_tokens == seen, "it generates in its sleep"
            await served.give_async(*update, in_flight=in_flight)
        return list(zip(prompts, await asyncio.gather(*running), strict=True))

    for _ in range(4):
        completions = [(p, c) for p, cs in served.run(rollouts_and_updates()) for c in cs]
        if (most := max(len(set(c.policy_versions)) for _, c in completions)) >= 3:
            break
    before = after = 0.0
    for prompt, completion in completions:
        tokens = [*prompt, *completion.tokens]
        for version in set(completion.policy_versions):
            truth = served.publisher.logprobs_of(version, tokens, temperature)[len(prompt) :]
            pairs = zip(completion.policy_versions, completion.logprobs, truth, strict=True)
            worst = max(abs(got - want) for v, got, want in pairs if v == version)
            assert math.isfinite(worst)
            if version == completion.policy_versions[0]:
                before = max(before, worst)
            else:
                after = max(after, worst)
    return most, before, after


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


class EngineContract:
    """A subclass has a fixture `served`, of its module: an engine with 64 places that serves version 0 at least."""

    @pytest.mark.parametrize("scale", [1e-4, 0.02])
    def test_clean_weight_syncs_raise_no_alarm(self, served: Served, scale: float) -> None:
        gaps = [served.give(*served.publisher.next(scale)) for _ in range(5)]
        assert all(gap <= TOLERANCE for gap in gaps)

    @pytest.mark.parametrize(("n", "temperature"), [(2, 1.0), (1, 0.0)])
    def test_whoever_listens_hears_each_token_as_it_is_answered(
        self, served: Served, n: int, temperature: float
    ) -> None:
        heard: list[list[tuple[int, float, int]]] = [[] for _ in range(n)]
        calls: list[int] = []

        def hear(index: int, tokens: list[int], logprobs: list[float], version: int) -> None:
            calls.append(index)
            heard[index] += [(*pair, version) for pair in zip(tokens, logprobs, strict=True)]

        answers = served.run(
            served.engine.generate(
                [5, 6, 7], n=n, temperature=temperature, max_tokens=12, stop_token_ids=[], heard=hear
            )
        )
        assert [[*zip(a.tokens, a.logprobs, a.policy_versions, strict=True)] for a in answers] == heard
        assert len(calls) > n, "all at once is no stream"

    @pytest.mark.slow
    @pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.long(OTHER_TEMPERATURE)), 0.7])
    def test_tokens_in_flight_are_exact_for_their_own_version(self, served: Served, temperature: float) -> None:
        """They live through three updates: each token's logprob is that of the weights that its version names."""
        most, before, after = _in_flight(served, "recompute", temperature=temperature)
        assert most >= 3, "no completion lived through the updates"
        assert max(before, after) <= TOLERANCE

    @pytest.mark.slow
    def test_an_engine_that_has_slept_goes_on_exactly(self, served: Served) -> None:
        most, before, after = _in_flight(served, "recompute", temperature=1.0, asleep=True)
        assert most >= 3, "no completion lived through the updates"
        assert max(before, after) <= TOLERANCE

    def test_an_engine_that_wakes_by_half_a_version_is_refused_by_name(self, served: Served) -> None:
        """What it held before its sleep is gone: a weight that is not loaded is nobody's."""
        manifest, buckets = _without("model.layers.0.mlp.up_proj.weight")(*served.publisher.next())
        served.run(served.engine.sleep(in_flight="recompute"))
        with pytest.raises(WeightSyncError, match=r"load check: .*model\.layers\.0\.mlp"):
            served.give(manifest, buckets)
        served.recover()

    @pytest.mark.slow
    def test_an_update_that_keeps_the_cache_is_inexact_for_those_in_flight_only(self, served: Served) -> None:
        """Under "keep" a completion goes on over the keys and values of older weights; new ones are exact again."""
        most, before, after = _in_flight(served, "keep", temperature=1.0)
        assert most >= 3, "no completion lived through the updates"
        assert before <= TOLERANCE < after

    @pytest.mark.parametrize(
        ("mutate", "check", "names"),
        [
            (_flip_a_byte, "bytes", "checksum"),
            (_lose_a_bucket, "transfer", "bucket"),
            (_lose_an_entry, "bytes", "digest"),
            (_without("model.layers.1.mlp.down_proj.weight"), "load", "model.layers.1.mlp.down_proj"),
            (_without("lm_head.weight"), "load", "lm_head"),
            (_swap_two, "compute", "canary"),
        ],
        ids=["byte flipped", "bucket lost", "entry lost", "tensor left out", "tied head left out", "tensors swapped"],
    )
    def test_a_broken_weight_sync_is_refused_by_name(self, served: Served, mutate: Any, check: str, names: str) -> None:
        manifest, buckets = served.publisher.next()
        with pytest.raises(WeightSyncError) as refused:
            served.give(*mutate(manifest, buckets))
        assert refused.value.check == check
        assert refused.value.policy_version == manifest.policy_version
        assert names in str(refused.value)
        served.recover()

    def test_a_version_in_memory_of_its_device_passes_the_same_checks(self, served: Served, tmp_path: Path) -> None:
        here = DeviceIpc(HostMemory, longest_s=-1.0, parent=tmp_path)
        sync = served.weight_sync(transport=here)

        def published() -> Publication:
            manifest, buckets = served.publisher.next()
            outgoing = here.begin(manifest.policy_version)
            for bucket in buckets:
                outgoing.put(bucket)
            return outgoing.commit(manifest)

        async def give(publication: Publication, meanwhile: Callable[[], Any] = lambda: None) -> None:
            staged, fetched_bytes = await sync._staged(publication)
            assert fetched_bytes == 0
            meanwhile()
            try:
                await sync._load_and_verify(staged, 0.0, fetched_bytes)
            finally:
                staged.release()

        def flipped() -> Publication:
            publication = published()
            with open(publication.bucket_refs[1].handle, "r+b") as file:
                file.seek(100)
                byte = file.read(1)[0]
                file.seek(100)
                file.write(bytes([byte ^ 0x10]))
            return publication

        served.run(give(published()))
        assert sync.drain_reports()[0].served_gap.largest <= TOLERANCE
        with pytest.raises(WeightSyncError, match="bytes check"):
            served.run(give(flipped()))
        with pytest.raises(WeightSyncError, match=r"load check: .* by now"):  # it stood still for too long
            served.run(give(published(), lambda: (published(), published())))
        served.recover()
        here.close()

    @pytest.mark.slow
    def test_an_engine_says_what_it_works_on_and_what_waits(self, served: Served) -> None:
        """More sequences than places: those that wait are counted, and their rollout's clock stands meanwhile."""
        engine, progress = served.engine, served.engine.progress
        assert engine.places == 64
        assert engine.cache_tokens > 64 * 256
        most_inside = most_waiting = 0
        clocks = [RolloutClock() for _ in range(12)]

        async def rollouts() -> list[float]:
            """How long each of them took."""
            nonlocal most_inside, most_waiting
            begun = time.monotonic()

            async def ask(clock: RolloutClock) -> float:
                with clock:
                    await engine.generate(
                        [5] * 40, n=8, temperature=1.0, max_tokens=100, stop_token_ids=[], clock=clock
                    )
                return time.monotonic() - begun

            asking = [asyncio.ensure_future(ask(clock)) for clock in clocks]
            while not all(a.done() for a in asking):
                most_inside = max(most_inside, progress.num_sequences)
                most_waiting = max(most_waiting, progress.num_waiting if progress.num_tokens else 0)
                await asyncio.sleep(0.01)
            return [a.result() for a in asking]

        took = served.run(rollouts())
        assert most_inside == 96
        assert most_waiting >= 32
        assert (progress.num_sequences, progress.num_waiting, progress.num_tokens) == (0, 0, 0)
        worked = [clock.counted_s - clock.idle_s for clock in clocks]
        last = took.index(max(took))
        assert all(0 < w <= took[last] for w in worked)
        assert took[last] - worked[last] > 0.5 * min(took), "it waited for the first ones' places"

    def test_an_engine_started_again_with_old_weights_serves_no_newer_group(self, served: Served) -> None:
        """What it holds is not believed: it starts a group only after a proven load that is new enough for it."""
        weight_sync = served.weight_sync(deadline_s=0.2)  # of a collector that has just started on this engine
        with pytest.raises(TimeoutError, match=f"weights of version {served.publisher.version} .* serves version -1"):
            served.run(weight_sync.until_verified(served.publisher.version))
        weight_sync._deadline_s = 200.0
        served.run(sync(weight_sync, *served.publisher.publication()))  # the same, proven
        weight_sync._deadline_s = 0.2
        needed = served.publisher.version + 1
        with pytest.raises(TimeoutError, match=f"weights of version {needed} .* serves version {needed - 1}"):
            served.run(weight_sync.until_verified(needed))

    @pytest.mark.slow
    def test_where_the_cache_is_kept_a_version_that_failed_can_be_loaded_again(self, served: Served) -> None:
        """What the failed load left in a prefix cache, the canary's contexts among it, is never looked at again."""
        served.give(*served.publisher.next(), in_flight="keep")
        manifest, buckets = served.publisher.next()
        for _ in range(2):
            with pytest.raises(WeightSyncError, match="compute check"):
                served.give(*_swap_two(manifest, buckets), in_flight="keep")
            assert served.give(manifest, buckets, in_flight="keep") <= TOLERANCE
        served.recover()

    @pytest.mark.slow
    def test_a_seed_decides_what_is_sampled_whatever_else_is_generated(self, served: Served) -> None:
        """The same tokens and the very same logprobs, alone and among others that come and go."""
        engine = served.engine

        def seeded() -> Any:
            return engine.generate([9, 8, 7, 6], n=3, temperature=0.9, max_tokens=40, stop_token_ids=[5], seed=11)

        async def among_others() -> list[Any]:
            others = [
                asyncio.ensure_future(
                    engine.generate(
                        [3 + i] * (5 * i + 1), n=2, temperature=1.0, max_tokens=9 * i + 3, stop_token_ids=[]
                    )
                )
                for i in range(7)
            ]
            await asyncio.sleep(0.01)
            again, *_ = await asyncio.gather(seeded(), *others)
            return again

        alone = served.run(seeded())
        assert served.run(among_others()) == alone
        assert len({tuple(c.tokens) for c in alone}) == 3, "each completion of a request draws its own"

    def test_a_completion_ends_with_a_stop_token_or_at_its_limit(self, served: Served) -> None:
        stop = list(range(2, 12))
        prompt = [20, 21, 22]
        sampled = served.run(served.engine.generate(prompt, n=32, temperature=1.0, max_tokens=8, stop_token_ids=stop))
        for c in sampled:
            assert len(c.tokens) == len(c.logprobs) == len(c.policy_versions)
            assert not set(c.tokens[:-1]) & set(stop)
            assert (c.finish_reason, len(c.tokens)) == ("length", 8) or c.finish_reason == "stop"
            assert (c.tokens[-1] in stop) == (c.finish_reason == "stop")
        assert {c.finish_reason for c in sampled} == {"stop", "length"}

    def test_the_likeliest_tokens_are_sampled_at_temperature_0(self, served: Served) -> None:
        prompt = [30, 31]
        one, two = served.run(served.engine.generate(prompt, n=2, temperature=0.0, max_tokens=12, stop_token_ids=[]))
        assert one == two
        tokens = [*prompt, *one.tokens]
        with torch.no_grad():
            best = served.publisher.model(torch.tensor([tokens])).logits[0, 1:-1].log_softmax(-1).max(-1)
        assert one.tokens == best.indices.tolist()
        assert one.logprobs == pytest.approx(best.values.tolist(), abs=TOLERANCE)

    def test_of_a_nucleus_no_token_outside_is_sampled_and_the_others_are_normalised(self, served: Served) -> None:
        prompt, top_p = [40, 41, 42], 0.6
        with torch.no_grad():
            probabilities = served.publisher.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        ordered = probabilities.sort(descending=True)
        inside = ordered.indices[ordered.values.cumsum(0) - ordered.values < top_p]
        expected = probabilities[inside] / probabilities[inside].sum()
        asked = served.engine.generate(prompt, n=48, temperature=1.0, max_tokens=1, stop_token_ids=[], top_p=top_p)
        for c in served.run(asked):
            assert c.tokens[0] in inside.tolist()
            place = inside.tolist().index(c.tokens[0])
            assert c.logprobs[0] == pytest.approx(float(expected[place].log()), abs=TOLERANCE)

    @pytest.mark.slow
    def test_a_call_that_is_cancelled_is_aborted_and_the_others_go_on(self, served: Served) -> None:
        engine = served.engine

        async def cancel_one() -> list[Any]:
            def ask(prompt: list[int]) -> asyncio.Future[Any]:
                asked = engine.generate(prompt, n=4, temperature=1.0, max_tokens=150, stop_token_ids=[])
                return asyncio.ensure_future(asked)

            kept, given_up = ask([50, 51]), ask([52])
            while not engine.progress.num_tokens:
                await asyncio.sleep(0.002)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            assert engine.progress.num_sequences == 4
            return await kept

        assert [len(c.tokens) for c in served.run(cancel_one())] == [150] * 4
        assert engine.progress.num_sequences == 0

    @pytest.mark.slow
    def test_under_off_what_is_in_flight_finishes_before_the_load(self, served: Served) -> None:
        """And what is asked for meanwhile waits for the new weights."""
        engine, before = served.engine, served.publisher.version

        async def load_under_way() -> list[Any]:
            update = served.publisher.next()

            def ask() -> asyncio.Future[Any]:
                asked = engine.generate([60, 61], n=4, temperature=1.0, max_tokens=60, stop_token_ids=[])
                return asyncio.ensure_future(asked)

            asked = [ask()]
            while not engine.progress.num_tokens or engine.progress.num_waiting:  # until all four have begun
                await asyncio.sleep(0.002)
            loading = asyncio.ensure_future(served.give_async(*update, in_flight="off"))
            while not loading.done():
                await asyncio.sleep(0.01)
                if len(asked) < 40:
                    asked.append(ask())
            await loading
            return await asyncio.gather(*asked)

        # Of each completion: a request that comes while a load begins may have some before it, and some after it.
        versions = [[{*c.policy_versions} for c in completions] for completions in served.run(load_under_way())]
        assert versions[0] == [{before}] * 4
        assert versions[-1] == [{before + 1}] * 4
        assert all(len(v) == 1 for completions in versions for v in completions), "none lived through the load"
