"""Answers that begin alike are computed once, and are to the last bit what each of them is alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.collector.clock import RolloutClock
from leeway.collector.engine import SampledTokens, StagedWeights
from leeway.engines import hf_engine
from leeway.engines.hf_engine import HfEngine
from leeway.weights import Canary, CanaryPrompts, Manifest

from .test_hf_decode import save, settings_of

PROMPT = [5, 9, 4, 12, 7]
STOP = [2, 3, 8]


class Counted:
    """An engine that counts rows, over all passes, and tokens that are read.

    Requests that are made at once are in its first pass together.
    """

    def __init__(self, folder: str) -> None:
        self.engine = HfEngine(settings_of(folder, max_model_len=128))
        self.rows: list[int] = []
        self.read: list[int] = []
        self.at_pass: dict[int, Callable[[], None]] = {}
        step, read, one_pass = self.engine._decoder.step, self.engine._decoder.read, self.engine._pass

        def counted(rows: Any, *others: Any, **more: Any) -> Any:
            assert len(set(map(id, rows))) == len(rows)
            self.rows.append(len(rows))
            return step(rows, *others, **more)

        def counted_read(rows: Any, sequences: Sequence[Sequence[int]], starts: Sequence[int], *others: Any) -> None:
            assert len(set(map(id, rows))) == len(rows)
            self.read.append(sum(map(len, sequences)) - sum(starts))
            read(rows, sequences, starts, *others)

        def noted() -> None:
            self.at_pass.pop(len(self.rows), lambda: None)()
            one_pass()

        self.engine._decoder.step = counted  # type: ignore[method-assign]
        self.engine._decoder.read = counted_read  # type: ignore[method-assign]
        self.engine._pass = noted  # type: ignore[method-assign]

    async def asked(
        self, seed: int, *, n: int = 1, prompt: Sequence[int] = PROMPT, max_tokens: int = 40, **how: Any
    ) -> list[SampledTokens]:
        given = {"temperature": 0.3, "stop_token_ids": STOP} | how
        return await self.engine.generate(prompt, n=n, max_tokens=max_tokens, seed=seed, **given)

    async def _together(self, asked: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        self.rows.clear()
        self.read.clear()
        still = await self.engine._call(lambda: self.engine._pause(False))
        await asyncio.wrap_future(still)
        tasks = [asyncio.ensure_future(each) for each in asked]
        while await self.engine._call(lambda: len({id(s.request) for s in self.engine._waiting})) < len(tasks):
            pass
        await self.engine._call(lambda: setattr(self.engine, "_paused", False))
        return await asyncio.gather(*tasks)

    def together(self, *asked: Coroutine[Any, Any, Any]) -> list[Any]:
        return asyncio.run(self._together(asked))

    def alone(self, *asked: Coroutine[Any, Any, Any]) -> list[Any]:
        return [self.together(each)[0] for each in asked]


def counted_in(folder: Path) -> Iterator[Counted]:
    """With a model whose heads share keys."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
    counted = Counted(save(folder / "model", "qwen2", **sizes))
    yield counted
    counted.engine.shutdown()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    yield from counted_in(tmp_path_factory.mktemp("shared"))


def num_different(answers: Sequence[SampledTokens]) -> int:
    """Passes of one row that it takes to draw these: one for each beginning that some of them go on from."""
    return len({tuple(a.tokens[:k]) for a in answers for k in range(len(a.tokens))})


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.9, "min_tokens": 4}])
def test_answers_are_one_row_until_they_differ_and_what_each_is_alone(counted: Counted, how: dict[str, Any]) -> None:
    [answers] = counted.together(counted.asked(10, n=8, **how))
    assert sum(counted.rows) == num_different(answers)
    assert counted.rows[0] == 1
    assert num_different(answers) < 0.8 * sum(len(a.tokens) for a in answers), "they hardly begin alike"
    assert len({tuple(a.tokens) for a in answers}) > 2, "they are all the same"
    assert answers == [answer for [answer] in counted.alone(*(counted.asked(10 + i, **how) for i in range(8)))]


def test_requests_that_begin_alike_share_rows_but_not_what_they_ask_for(counted: Counted) -> None:
    how: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 1, "temperature": 1.0},
        {"seed": 1, "temperature": 0.0},
        {"seed": 2, "min_tokens": 6},
        {"seed": 3, "max_tokens": 5},
        {"seed": 3, "prompt": [*PROMPT[:-1], 11]},
    ]
    answers = counted.together(*(counted.asked(**each) for each in how))
    assert counted.rows[0] == 2
    assert [len(answer.tokens) for [answer] in answers[4:5]] == [5]
    assert answers == counted.alone(*(counted.asked(**each) for each in how))


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_they_are_what_each_is_alone_when_weights_come_meanwhile(
    counted: Counted, in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = counted.engine
    weights = [p.clone() for p in engine._decoder.model.parameters()]
    staged = StagedWeights(Manifest(7, [], [], Canary(CanaryPrompts([], []), [], [], []), ""), [])

    def change(*_: Any) -> None:
        for p in engine._decoder.model.parameters():
            p.mul_(1 + 0.2 * torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())))

    def asked(*seeds: int, n: int = 1) -> list[Any]:
        for p, old in zip(engine._decoder.model.parameters(), weights, strict=True):
            p.data.copy_(old)
        engine._version = 0
        # Nothing is asked for in between, so that the pass before which they come is always the third.
        counted.rows.clear()
        counted.at_pass = {3: lambda: engine._load_staged(staged, in_flight)}
        return counted.together(*(counted.asked(seed, n=n, stop_token_ids=[]) for seed in seeds))

    monkeypatch.setattr(hf_engine, "load", change)
    [answers] = asked(10, n=8)
    assert sum(counted.rows) < 8 * len(counted.rows)
    assert counted.rows[3] < 8, "by then, none was like another one"
    assert {tuple(a.policy_versions[:4]) for a in answers} == {(0, 0, 0, 7)}
    again = [] if in_flight == "keep" else [len(PROMPT) - 1, 3 * len({tuple(a.tokens[:3]) for a in answers})]
    assert counted.read == [len(PROMPT) - 1, *again], "the prompt, which all have alike, is read once"
    assert answers == [asked(10 + i)[0][0] for i in range(8)]
    for p, old in zip(engine._decoder.model.parameters(), weights, strict=True):
        p.data.copy_(old)


def test_one_that_is_given_up_takes_nothing_from_the_others(counted: Counted) -> None:
    expected = counted.alone(counted.asked(5, n=4), counted.asked(7, n=4))

    async def given_up() -> None:
        asked = asyncio.ensure_future(counted.asked(6, n=4, stop_token_ids=[]))
        await gone.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    async def all_three() -> list[Any]:
        nonlocal gone
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()

        def give_up() -> None:
            loop.call_soon_threadsafe(gone.set)
            shared = [s.row for s in counted.engine._running]
            assert len(set(shared)) < len(shared)
            counted.engine._abort(next(s.request for s in counted.engine._running if not s.request.stop))

        counted.at_pass = {2: give_up}
        return await counted._together([counted.asked(5, n=4), given_up(), counted.asked(7, n=4)])

    gone: asyncio.Event
    answers = asyncio.run(all_three())
    assert counted.at_pass == {}
    assert [answers[0], answers[2]] == expected


def test_conversations_that_began_alike_go_on_from_rows_of_their_own(counted: Counted) -> None:
    async def talk(seed: int) -> list[Any]:
        tokens, said, clock = [*PROMPT], [], RolloutClock()
        with clock:
            for turn in range(3):
                [answer] = await counted.asked(100 * turn + seed, prompt=tokens, max_tokens=8, clock=clock)
                tokens = [*tokens, *answer.tokens, 20 + seed, 11]
                said.append(answer)
        return said

    together = counted.together(*map(talk, range(6)))
    assert counted.rows[0] == 1
    first = [tuple(said[0].tokens) for said in together]
    assert len(set(first)) < len(first), "none said the same, so that none ended in one row"
    assert together == counted.alone(*map(talk, range(6)))


def test_a_conversation_whose_answer_was_read_again_is_the_same_once_it_made_room(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt and what there was of the answer were read one after the other; so they are again."""
    engine = counted.engine
    staged = StagedWeights(Manifest(7, [], [], Canary(CanaryPrompts([], []), [], [], []), ""), [])
    monkeypatch.setattr(hf_engine, "load", lambda *_: None)

    async def talk(make_room: bool) -> list[Any]:
        tokens, said, clock = PROMPT * 12, [], RolloutClock()
        with clock:
            for turn in range(2):
                counted.at_pass = {} if turn else {10: lambda: engine._load_staged(staged, "recompute")}
                asked = counted.asked(turn, prompt=tokens, max_tokens=30, stop_token_ids=[], clock=clock)
                [[answer]] = await counted._together([asked])
                assert not counted.at_pass
                tokens = [*tokens, *answer.tokens, 11]
                said.append(answer)
                if make_room:
                    await engine._call(lambda: engine._decoder.free(engine._conversations.make_room(0)))
        return [*said, sum(counted.read)]

    *kept, read = asyncio.run(talk(False))
    *made_room, read_again = asyncio.run(talk(True))
    assert read_again > read
    assert made_room == kept


def test_the_engine_is_empty_again(counted: Counted) -> None:
    decoder, kept = counted.engine._decoder, counted.engine._conversations
    counted.together(counted.asked(3, n=8))
    left = set(itertools.chain(*(pool.rows for pool in (*decoder._pools, decoder._waiting))))
    assert left == {*kept._with_rows.values(), *counted.engine._beginnings._kept.values()}
    assert counted.engine._running == []
