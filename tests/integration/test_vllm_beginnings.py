"""Prompts that begin alike, on vLLM's real scheduler with our part, and with a cache that holds tokens for their keys.

No model: a pass writes each token that it was told to compute where its keys and values would lie, after the copies of
blocks that it was told to make. So a request that would read anything but its own tokens is found at once.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leeway.engines.vllm_groups import COUNTS, ENDED, GROUP, MEMBERS, PASS, REASONS, member_id

BLOCK = 16


class Engine:
    """`computed`: how many tokens of each request passes were told to compute. `ended`: by id, why."""

    def __init__(
        self, folder: Path, *, num_blocks: int = 400, asynchronous: bool = False, seats: int = 64, budget: int = 2048
    ) -> None:
        import torch
        from vllm import AsyncEngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from leeway.engines.vllm_scheduler import scheduler

        shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 5000, **shape}
        (folder / "config.json").write_text(json.dumps(llama))
        config = AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            scheduling_policy="priority",
            skip_tokenizer_init=True,
            block_size=BLOCK,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        self.scheduler: Any = scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._cache = np.full((num_blocks, BLOCK), -1)
        self._depth = 2 if asynchronous else 1
        self._under_way: deque[Any] = deque()
        self._num_asked = 0
        self.free = self.pool.get_num_free_blocks()
        self.computed: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.num_passes = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def ask(self, prompt: list[int], n: int = 4, *, max_tokens: int = 3, salt: str | None = None) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._num_asked += 1
        name = f"{GROUP}{self._num_asked}"
        params = SamplingParams(n=n, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            cache_salt=salt,
            arrival_time=float(self._num_asked),
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return name

    def abort(self, *names: str) -> list[str]:
        from vllm.v1.request import RequestStatus

        aborted = self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        self._end({request.request_id: "abort" for request in aborted})
        return [request.request_id for request in aborted]

    def work(self) -> None:
        """As vLLM's core does: a pass is scheduled while as many are computed as may be."""
        self.num_passes += 1
        assert self.num_passes < 5000, "it goes round without an end"
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._under_way.append((output, self._computed(output)))
            if len(self._under_way) < self._depth:
                return
        if self._under_way:
            self._note(self.scheduler.update_from_output(*self._under_way.popleft()))

    def finish(self) -> None:
        while self.scheduler.has_requests() or self._under_way:
            self.work()

    def drain(self) -> None:
        while self._under_way:
            self._note(self.scheduler.update_from_output(*self._under_way.popleft()))

    def _computed(self, output: Any) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        copies = [(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()]
        if copies:
            sources, targets = map(list, zip(*copies, strict=True))
            self._cache[targets] = self._cache[sources]
        tables = {}
        for name, num in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            assert num > 0
            self.computed[name] = self.computed.get(name, 0) + num
            prompt = [_key(request, token) for token in request.prompt_token_ids]
            tokens = np.array([*prompt, *(_sampled(name, i) for i in range(len(prompt), end))][:end])
            (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            slots = (np.repeat(ids, BLOCK)[:end], np.tile(np.arange(BLOCK), len(ids))[:end])
            self._cache[slots[0][end - num :], slots[1][end - num :]] = tokens[end - num :]
            tables[name] = slots, tokens
        for name, (slots, tokens) in tables.items():
            assert self._cache[slots].tolist() == tokens.tolist(), f"{name} reads what is not its own"
        names = list(output.num_scheduled_tokens)
        ends = [self.scheduler.requests[name].num_computed_tokens for name in names]
        done = [end >= self.scheduler.requests[name].num_prompt_tokens for name, end in zip(names, ends, strict=True)]
        sampled = [[_sampled(n, end)] if is_done else [] for n, end, is_done in zip(names, ends, done, strict=True)]
        rows = np.array([tokens or [0] for tokens in sampled]).reshape(-1, 1)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(rows, -rows / 1e4, np.zeros(len(names))),
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _note(self, outputs: dict[int, Any]) -> None:
        for of_client in outputs.values():
            for record in of_client.outputs:
                assert record.request_id == PASS
                said = record.kv_transfer_params
                at = said[MEMBERS]
                assert sum(said[COUNTS]) == len(record.new_token_ids)
                self._end({at[i]: why for i, why in zip(said[ENDED], said[REASONS], strict=True)})

    def _end(self, reasons: dict[str, str]) -> None:
        assert not reasons.keys() & self.ended.keys(), "told twice"
        self.ended |= reasons

    def check_that_nothing_is_left(self) -> None:
        assert self.scheduler.reset_prefix_cache()
        assert self.pool.get_num_free_blocks() == self.free, "blocks are still held"
        assert self.scheduler._left == {}
        own = self.scheduler._beginnings
        assert [own._held_back, own._computing, own._begins_with, own._kept] == [{}, set(), {}, {}]


def _key(request: Any, token: int) -> int:
    """What stands for the keys of a prompt's token: those of other weights are others."""
    return token + 100_000 * int(request.cache_salt or 0)


def _sampled(name: str, position: int) -> int:
    return 1000 + zlib.crc32(f"{name} {position}".encode()) % 4000


def tokens(seed: int, num: int) -> list[int]:
    return random.Random(seed).choices(range(1, 1000), k=num)


@pytest.fixture(params=[False, True], ids=["one pass at a time", "asynchronous"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, asynchronous=request.param)
    yield engine
    engine.finish()
    engine.check_that_nothing_is_left()


def members(name: str, n: int = 4) -> list[str]:
    return [member_id(name, i) for i in range(n)]


def test_the_others_of_a_group_compute_the_last_token_of_a_prompt_alone(engine: Engine) -> None:
    name = engine.ask(tokens(0, 28), max_tokens=1)
    engine.work()
    assert engine.computed == {members(name)[0]: 28}
    engine.finish()
    assert [engine.computed[member] for member in members(name)] == [28, 1, 1, 1]
    assert engine.ended == dict.fromkeys(members(name), "length")


def test_nobody_waits_for_an_end_of_few_tokens(engine: Engine) -> None:
    """17 and 20 tokens: a block, and none and three more before the last one."""
    names = [engine.ask(tokens(seed, num), max_tokens=1) for seed, num in ((0, 17), (1, 20))]
    engine.work()
    assert len(engine.computed) == 8
    engine.finish()
    assert [engine.computed[member] for member in members(names[0])] == [17, 1, 1, 1]
    assert [engine.computed[member] for member in members(names[1])] == [20, 4, 4, 4]


def test_of_a_prompt_that_is_computed_in_parts_the_others_wait_for_the_last_one(tmp_path: Path) -> None:
    engine = Engine(tmp_path, seats=8, budget=32)
    name = engine.ask(tokens(0, 60), max_tokens=1)
    engine.work()
    assert engine.computed == {members(name)[0]: 32}
    engine.finish()
    assert [engine.computed[member] for member in members(name)] == [60, 1, 1, 1]


def test_a_prompt_begins_where_it_differs_from_one_before_it(engine: Engine) -> None:
    system = tokens(0, 25)
    engine.ask([*system, *tokens(1, 13)])
    engine.finish()
    name = engine.ask([*system, *tokens(2, 13)], max_tokens=1)
    other = engine.ask([*system, *tokens(3, 13)], salt="1", max_tokens=1)
    engine.finish()
    assert [engine.computed[member] for member in members(name)] == [13, 1, 1, 1]
    assert [engine.computed[member] for member in members(other)] == [38, 1, 1, 1], "keys of other weights"


@pytest.mark.parametrize("resets", [False, True])
def test_after_a_pause_nothing_is_begun_with_what_was_computed_before_it(engine: Engine, resets: bool) -> None:
    """The weights may be others then. Whole blocks are vLLM's to forget."""
    from vllm.v1.core.sched.interface import PauseState

    name = engine.ask(tokens(0, 12), max_tokens=1)
    engine.work()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.drain()
    assert not resets or engine.scheduler.reset_prefix_cache(), "nothing holds a block"
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.finish()
    assert [engine.computed[member] for member in members(name)] == [12] * 4
    again = engine.ask(tokens(0, 12), max_tokens=1)
    engine.finish()
    assert engine.computed[members(again)[0]] == 1


def test_a_group_is_aborted_before_its_others_were_scheduled(engine: Engine) -> None:
    name, other = engine.ask(tokens(0, 28)), engine.ask(tokens(1, 28))
    assert sorted(engine.abort(name)) == members(name)
    engine.work()
    assert sorted(engine.abort(other)) == members(other)


def test_if_the_first_of_a_group_is_aborted_the_others_go_on(engine: Engine) -> None:
    name = engine.ask(tokens(0, 28), max_tokens=1)
    assert engine.abort(members(name)[0]) == members(name)[:1]
    engine.finish()
    assert [engine.ended[member] for member in members(name)] == ["abort", "length", "length", "length"]
    assert [engine.computed[member] for member in members(name)[1:]] == [28, 1, 1], "one of them is the first one now"


def test_a_prompt_that_is_asked_for_again_and_again_takes_one_place(engine: Engine) -> None:
    system = tokens(0, 25)
    engine.ask([*system, *tokens(1, 13)], max_tokens=1)
    engine.finish()
    for _ in range(10):
        engine.ask(tokens(2, 17), max_tokens=1)
        engine.finish()
    name = engine.ask([*system, *tokens(3, 13)], n=1, max_tokens=1)
    engine.finish()
    assert engine.computed[members(name)[0]] == 13


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_kept_makes_room_for_who_waits_for_it(tmp_path: Path, asynchronous: bool) -> None:
    """Of 19 blocks, four prompts of three are kept, and one answer runs: one of seven does not wait for its end."""
    engine = Engine(tmp_path, num_blocks=20, asynchronous=asynchronous)
    for seed in range(4):
        engine.ask(tokens(seed, 44), n=1, max_tokens=1)
    engine.finish()
    running = engine.ask(tokens(8, 20), n=1, max_tokens=30)
    engine.work()
    waiting = engine.ask(tokens(9, 110), n=1, max_tokens=1)
    engine.finish()
    assert list(engine.ended)[-2:] == [members(waiting)[0], members(running)[0]]


def test_all_are_aborted_at_once(engine: Engine) -> None:
    from vllm.v1.request import RequestStatus

    names = [engine.ask(tokens(seed, 28)) for seed in range(3)]
    engine.work()
    engine.ask(tokens(9, 28))
    ended = engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert len(ended) == 4 * (len(names) + 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cache_that_is_too_small_for_all_prompts_does_not_stop_the_engine(tmp_path: Path, asynchronous: bool) -> None:
    """Eight blocks: prompts of three, which are also kept for others, would leave no place for an answer."""
    engine = Engine(tmp_path, num_blocks=9, asynchronous=asynchronous)
    names = [engine.ask(tokens(seed, 40), max_tokens=30) for seed in range(8)]
    engine.finish()
    assert set(engine.ended) == {member for name in names for member in members(name)}
    assert set(engine.ended.values()) == {"length"}


@pytest.mark.parametrize("seed", range(12))
def test_everyone_reads_their_own_tokens(tmp_path: Path, seed: int) -> None:
    """Random prompts that begin alike, pauses of all kinds, aborts, caches of all sizes."""
    from vllm.v1.core.sched.interface import PauseState

    rng = random.Random(seed)
    engine = Engine(
        tmp_path, num_blocks=rng.choice([12, 30, 200]), asynchronous=seed % 2 == 1, seats=rng.choice([4, 32])
    )
    asked: list[str] = []
    version = 0
    for _ in range(150):
        if rng.random() < 0.4:
            system = tokens(rng.randrange(3), rng.choice([5, 20, 30]))
            prompt = [*system, *tokens(rng.randrange(100, 110), rng.randrange(2, 30))]
            n = rng.choice([1, 2, 5])
            name = engine.ask(prompt, n, max_tokens=rng.randrange(1, 30), salt=str(version))
            asked += members(name, n)
        if asked and rng.random() < 0.05:
            engine.abort(rng.choice([rng.choice(asked), rng.choice(asked).rpartition("/")[0]]))
        if rng.random() < 0.05:
            engine.scheduler.set_pause_state(rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
            for _ in range(rng.randrange(3)):
                engine.work()
            if rng.random() < 0.5:
                engine.drain()
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                version += 1
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.work()
    engine.finish()
    assert set(engine.ended) == set(asked)
    engine.check_that_nothing_is_left()
