"""What prompts begin with alike is read once under each version, and decides no number."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from leeway.collector.engine import StagedWeights
from leeway.engines import hf_beginnings, hf_engine
from leeway.engines.hf_beginnings import Beginnings
from leeway.engines.hf_cache import BLOCK, BlockPool
from leeway.weights import Canary, CanaryPrompts, Manifest

from .test_hf_shared_rows import Counted, counted_in

SYSTEM = [5, 9, 4, 12, 7, 6, 10, 13, 3, 8] * 4
QUESTIONS = [[20, 21, 22], [20, 23], [24], [25] * 30, [20, 21, 22, 26]]
"""Of which the second and third begin like the first but for their last token, and the last but for two."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    yield from counted_in(tmp_path_factory.mktemp("beginnings"))


def asked(counted: Counted, question: list[int], **how: Any) -> Any:
    return counted.asked(1, prompt=[*SYSTEM, *question], max_tokens=8, stop_token_ids=[], **how)


def forget(counted: Counted) -> None:
    engine = counted.engine
    asyncio.run(engine._call(lambda: engine._decoder.free(engine._beginnings.drop(None))))


def alone(counted: Counted, question: list[int], **how: Any) -> Any:
    forget(counted)
    [answers] = counted.together(asked(counted, question, **how))
    assert counted.read == [len(SYSTEM) + len(question) - 1]
    return answers


def test_it_is_read_once_by_those_that_come_together_and_by_none_that_come_later(counted: Counted) -> None:
    expected = [alone(counted, question, n=3) for question in QUESTIONS]
    forget(counted)
    assert counted.together(*(asked(counted, question, n=3) for question in QUESTIONS)) == expected
    # The last token of a prompt is not read: it goes through a pass.
    assert counted.read == [len(SYSTEM) + 2, 0 + 0 + 29 + 1]
    for question, answers in zip(QUESTIONS, expected, strict=True):
        assert counted.together(asked(counted, question, n=3)) == [answers]
        assert sum(counted.read) <= len(question) - 1


@pytest.mark.parametrize("first", [0, 1])
def test_it_decides_no_number_however_many_blocks_the_prompts_have(counted: Counted, first: int) -> None:
    prompts = [[*SYSTEM[: BLOCK - 8], 20, 21], [*SYSTEM[: BLOCK - 8], *[25, 26] * BLOCK]]
    expected = []
    for prompt in prompts:
        forget(counted)
        expected.append(counted.together(counted.asked(1, prompt=prompt, max_tokens=8, stop_token_ids=[], n=3)))
    forget(counted)
    for i in (first, 1 - first):
        answers = counted.together(counted.asked(1, prompt=prompts[i], max_tokens=8, stop_token_ids=[], n=3))
        assert answers == expected[i]
    assert sum(counted.read) < len(prompts[1 - first]) - BLOCK // 2, "it began with what was there"


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_it_is_read_anew_under_other_weights(counted: Counted, in_flight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = counted.engine
    staged = StagedWeights(Manifest(7, [], [], Canary(CanaryPrompts([], []), [], [], []), ""), [])
    old = alone(counted, [20])
    weights = [p.clone() for p in engine._decoder.model.parameters()]

    def change(*_: Any) -> None:
        for p in engine._decoder.model.parameters():
            p.mul_(1 + 0.2 * torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())))

    monkeypatch.setattr(hf_engine, "load", change)
    asyncio.run(engine._call(lambda: engine._load_staged(staged, in_flight)))
    [answers] = counted.together(asked(counted, [20]))
    assert counted.read == [len(SYSTEM)]
    assert answers[0].logprobs != old[0].logprobs
    assert answers == alone(counted, [20])
    for p, weight in zip(engine._decoder.model.parameters(), weights, strict=True):
        p.data.copy_(weight)


def test_answers_in_flight_read_it_once_after_a_load(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = counted.engine
    staged = StagedWeights(Manifest(7, [], [], Canary(CanaryPrompts([], []), [], [], []), ""), [])
    monkeypatch.setattr(hf_engine, "load", lambda *_: None)
    expected = [alone(counted, question, n=4, temperature=1.0) for question in QUESTIONS[:3]]
    forget(counted)
    counted.at_pass = {3: lambda: engine._load_staged(staged, "recompute")}
    answers = counted.together(*(asked(counted, question, n=4, temperature=1.0) for question in QUESTIONS[:3]))
    assert [[a.tokens for a in own] for own in answers] == [[a.tokens for a in own] for own in expected]
    different = sum(len({tuple(a.tokens[:3]) for a in own}) for own in answers)
    assert counted.read == [len(SYSTEM) + 2, len(SYSTEM) + 2, 3 * different]


def test_what_is_kept_is_nothing_that_passes_go_over(counted: Counted) -> None:
    alone(counted, [20], n=3)
    decoder, beginnings = counted.engine._decoder, counted.engine._beginnings
    assert beginnings.num_blocks == decoder._waiting.num_used == 2
    assert all(pool.num_used == 0 for pool in decoder._pools)


def test_prompts_that_have_most_in_common_with_another_are_not_kept() -> None:
    pool, beginnings = BlockPool(), Beginnings(most_blocks=4)
    [row, *rows] = pool.add([20] * 10)
    assert beginnings.longest((*range(20),), None) == (None, 0)
    assert beginnings.keep((*range(20),), None, row) == []
    assert beginnings.longest((*range(12), 50, 51), None) == (row, 12)
    assert beginnings.longest((*range(7), 50, 51), None) == (None, 0)
    assert beginnings.longest((*range(20),), 3) == (None, 0)
    assert (beginnings.wanted(20, 10), beginnings.wanted(21, 10), beginnings.wanted(7, 0)) == (0, 21, 0)
    assert beginnings.wanted(4 * 32 + 1, 0) == 4 * 32, "what there is room for"
    assert Beginnings(most_blocks=0).wanted(100, 0) == 0
    for number in range(3):
        assert beginnings.keep((100 + number,) * 20, None, rows[number]) == []
    assert beginnings.longest((*range(20),), None) == (row, 20)
    # Four blocks are full: the one that was used least of late makes room.
    assert beginnings.keep((200,) * 20, None, rows[3]) == [rows[0]]
    assert beginnings.keep((200,) * 20, None, rows[4]) == [rows[3]]
    assert beginnings.num_blocks == 4
    assert set(beginnings.drop(None)) == {row, rows[1], rows[2], rows[4]}
    assert beginnings.num_blocks == 0


def test_only_so_many_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_beginnings, "MOST_PROMPTS", 2)
    pool, beginnings = BlockPool(), Beginnings(most_blocks=100)
    rows = pool.add([10] * 3)
    gone = [beginnings.keep((number,) * 10, None, row) for number, row in enumerate(rows)]
    assert gone == [[], [], [rows[0]]]
