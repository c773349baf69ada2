"""Later turns of a conversation: what was computed is not computed again, and memory decides no number."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.collector.clock import RolloutClock
from leeway.collector.engine import StagedWeights
from leeway.engines import hf_conversations, hf_engine
from leeway.engines.hf_cache import BlockPool
from leeway.engines.hf_conversations import Conversation, Conversations
from leeway.engines.hf_engine import HfEngine
from leeway.weights import Canary, CanaryPrompts, Manifest

from .test_hf_decode import save, settings_of

REPLY = [7, 11, 5]


class Talks:
    """Conversations of three turns with one engine; counts the tokens that are read."""

    def __init__(self, folder: str, **changes: Any) -> None:
        self.engine = HfEngine(settings_of(folder, **({"max_model_len": 256} | changes)))
        self.num_read = 0
        read = self.engine._decoder.read

        def counted(rows: Any, sequences: Any, starts: Any, *others: Any) -> None:
            self.num_read += sum(len(s) for s in sequences) - sum(starts)
            read(rows, sequences, starts, *others)

        self.engine._decoder.read = counted  # type: ignore[method-assign]

    async def talk(self, number: int, *, seeded: bool = True, forget: bool = False) -> tuple[list[int], list[float]]:
        """All tokens, and the logprobs of the answers. `forget`: no keys and values are left after a turn."""
        tokens, logprobs = [3 + number, 4, 9] * (1 + 9 * (number % 3)), []
        for turn in range(3):
            [answer] = await self.engine.generate(
                tokens,
                n=1,
                temperature=1.0,
                max_tokens=20 + number,
                stop_token_ids=[1],
                seed=100 * number + turn if seeded else None,
            )
            tokens = tokens + answer.tokens + REPLY
            logprobs += answer.logprobs
            if forget:
                await self.engine._call(self._forget)
        return tokens, logprobs

    def _forget(self) -> None:
        engine = self.engine
        engine._decoder.free([*engine._conversations.make_room(0), *engine._beginnings.drop(None)])

    def talks(self, numbers: range, **how: Any) -> list[tuple[list[int], list[float]]]:
        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(self.talk(number, **how) for number in numbers))

        self.num_read = 0
        return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return save(tmp_path_factory.mktemp("conversations") / "model", "qwen2", **sizes)


@pytest.mark.slow
def test_a_later_turn_reads_what_is_new_and_its_logprobs_are_those_of_the_whole(folder: str) -> None:
    talks = Talks(folder)
    ended = talks.talks(range(9))
    prompts = sum(3 * (1 + 9 * (number % 3)) - 1 for number in range(9))
    # Of a turn that goes on: the last token of the answer before it, and the reply but for its last token.
    assert talks.num_read == prompts + 9 * 2 * len(REPLY)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for number, (tokens, logprobs) in enumerate(ended):
        whole = torch.tensor([tokens])
        with torch.no_grad():
            all_of_it = model(whole).logits[0].log_softmax(-1)
        expected = all_of_it[:-1].gather(-1, whole[0, 1:, None])[:, 0].tolist()
        answers = iter(logprobs)
        at = 3 * (1 + 9 * (number % 3))
        for _ in range(3):
            for _ in range(20 + number):
                assert next(answers) == pytest.approx(expected[at - 1], abs=5e-5)
                at += 1
                if tokens[at - 1] == 1:
                    break
            at += len(REPLY)
        assert at == len(tokens)
    talks.engine.shutdown()


@pytest.mark.slow
def test_a_seeded_conversation_that_made_room_goes_on_to_the_last_bit(folder: str) -> None:
    talks = Talks(folder)
    together = talks.talks(range(9))
    read = talks.num_read
    asyncio.run(talks.engine._call(talks._forget))
    assert talks.talks(range(9), forget=True) == together
    assert talks.num_read > 2 * read, "otherwise nothing was forgotten"
    assert [talks.talks(range(n, n + 1))[0] for n in range(9)] == together
    talks.engine.shutdown()
    # Little memory: one sequence at a time, and next to none for those that wait.
    kv_cache_gib = 2 * 256 * talks.engine._decoder.bytes_per_token / 2**30
    small = Talks(folder, kv_cache_gib=kv_cache_gib)
    assert small.talks(range(9)) == together
    assert small.num_read > read
    decoder = small.engine._decoder
    assert sum(pool.room for pool in (*decoder._pools, decoder._waiting)) <= 1.5 * small.engine.cache_tokens / 32
    small.engine.shutdown()


@pytest.mark.slow
def test_two_that_go_on_from_one_conversation_do_not_change_each_other(folder: str) -> None:
    talks = Talks(folder)

    def asked(prompt: list[int], seed: int) -> Any:
        return talks.engine.generate(prompt, n=1, temperature=1.0, max_tokens=9, stop_token_ids=[1], seed=seed)

    async def branch() -> list[Any]:
        [first] = await asked([5, 6, 7], 1)
        prompt = [5, 6, 7, *first.tokens, *REPLY]
        return await asyncio.gather(asked(prompt, 2), asked(prompt, 3), asked(prompt, 2))

    two, three, again = asyncio.run(branch())
    assert two == again != three
    talks.engine.shutdown()


@pytest.mark.slow
def test_one_without_a_seed_is_read_anew_once_it_made_room(folder: str) -> None:
    talks = Talks(folder)
    ended = talks.talks(range(3), seeded=False, forget=True)
    assert not talks.engine._conversations._kept.keys() - {s for s in talks.engine._conversations._with_rows}
    lengths = [len(tokens) for tokens, _ in ended]
    assert talks.num_read > sum(lengths)
    talks.engine.shutdown()


@pytest.mark.slow
def test_a_rollout_goes_on_from_its_own_conversations_alone(folder: str) -> None:
    """What another one said by then would be a matter of time, and has other last bits than what is read."""
    talks = Talks(folder)

    async def asked(prompt: list[int], rollout: RolloutClock) -> Any:
        [answer] = await talks.engine.generate(
            prompt, n=1, temperature=1.0, max_tokens=20, stop_token_ids=[1], seed=4, clock=rollout
        )
        return answer

    async def both() -> tuple[int, int, int]:
        one, other = RolloutClock(), RolloutClock()
        prompt = [5, 6, 7]
        with one, other:
            prompt += (await asked(prompt, one)).tokens + REPLY
            talks.num_read = 0
            await asked(prompt, other)
            read_by_other, talks.num_read = talks.num_read, 0
            await asked(prompt, one)
        return read_by_other, talks.num_read, len(prompt)

    read_by_other, read_by_one, length = asyncio.run(both())
    assert read_by_other == length - 1
    assert read_by_one == len(REPLY)
    talks.engine.shutdown()


@pytest.mark.slow
def test_keys_and_values_of_an_earlier_version_are_not_gone_on_from(folder: str) -> None:
    talks = Talks(folder)
    engine = talks.engine

    async def over_a_load() -> list[int]:
        asked = engine.generate([5, 6, 7], n=1, temperature=1.0, max_tokens=200, stop_token_ids=[], seed=3)
        request = asyncio.ensure_future(asked)
        while not await engine._call(lambda: bool(engine._running)):
            await asyncio.sleep(0)
        # As a load does that keeps the cache.
        await engine._call(lambda: engine._load_staged(staged, "keep"))
        [answer] = await request
        return answer.tokens

    staged = StagedWeights(Manifest(7, [], [], Canary(CanaryPrompts([], []), [], [], []), ""), [])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hf_engine, "load", lambda *_: None)
        tokens = asyncio.run(over_a_load())
    assert engine._conversations.taken([5, 6, 7, *tokens, 9], None) is None
    assert engine._decoder._waiting.num_used == 0
    engine.shutdown()


def test_what_is_remembered_is_limited_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_conversations, "MOST_TOKENS", 100)
    pool, conversations = BlockPool(), Conversations()
    rows = pool.add([40] * 4)
    for n, row in enumerate(rows[:3]):
        assert conversations.keep([n] * 40, Conversation([(4, 40)], row, True), None) == ([rows[0]] if n == 2 else [])
    assert conversations.taken([0] * 41, None) is None, "the first one had to go"
    taken = conversations.taken([1] * 41, None)
    assert taken is not None
    assert (taken.row, taken.turns) == (rows[1], [(4, 40)])
    again = conversations.taken([1] * 50, None)
    assert again is not None
    assert again.row is None
    assert conversations.taken([1] * 40, None) is None, "nothing is new there"
    assert conversations.taken([2] * 41, 5) is None, "another version"
    assert conversations.keep([2] * 40, Conversation([(4, 40)], rows[3], False), None) == [rows[2]]
    assert conversations.make_room(2) == []
    assert conversations.make_room(1) == [rows[3]]
    assert conversations.taken([2] * 41, None) is None, "without a seed nothing of it is of use"
    assert conversations.keep([3] * 40, Conversation([(4, 40)], rows[3], True), 7) == []
    assert conversations.drop(7) == [rows[3]]
    assert conversations._num_blocks == 0
