"""The replay buffer's actor around the buffer: what it does beside its loop, and what it tells the taskset."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leeway.config import ConfigError, load_config
from leeway.driver.dry_run import check_plugins
from leeway.failures import PartFailed
from leeway.replay import actor as replay_actor
from leeway.replay.actor import ReplayBufferActor
from leeway.replay.assemble import Assembler
from leeway.tasks.prompting import Prompter

from ..fakes import group

SOON_S = 120.0


@pytest.fixture
def actor(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReplayBufferActor]:
    """actor(overrides); what would go into the object store stays as it is."""
    monkeypatch.setattr(replay_actor.ray, "put", lambda value: value)
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(10, 60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: {model_path}}}\ntask: {{path: {tmp_path}/t.jsonl}}\nenv: {{reward: exact_match}}\n"
        "cluster: {device: cpu}\ntrain: {steps: 99, groups_per_step: 2}\nalgorithm: {group_size: 2}\n"
    )

    def build(*overrides: str) -> ReplayBufferActor:
        config = load_config(str(tmp_path / "c.yaml"), list(overrides))
        return ReplayBufferActor(config, role="replay", log_file=tmp_path / "log")

    return build


def test_finished_groups_come_with_the_wish_for_more_and_are_there_whatever_becomes_of_that(actor) -> None:
    async def scenario() -> None:
        buffer = actor("staleness.max_policy_lag=0")
        await buffer.published(0)
        held = await buffer.admit(2, SOON_S, "generator-0")
        with pytest.raises(PartFailed, match="TimeoutError"):  # no more until the first batch is trained
            await buffer.admit(2, 0.01, "generator-0", [group(a.group_id) for a in held])
        batch = await buffer.take_batch(SOON_S)
        assert sorted(batch.group_ids) == sorted(a.group_id for a in held)

    asyncio.run(asyncio.wait_for(scenario(), SOON_S))


def test_an_admission_brings_its_prompt_as_tokens_and_no_text_is_encoded_twice(actor, monkeypatch) -> None:
    async def scenario() -> None:
        encode, encoded = Prompter.encode, list[str]()
        monkeypatch.setattr(Prompter, "encode", lambda self, prompt: encoded.append(prompt) or encode(self, prompt))
        buffer = actor("staleness.max_policy_lag=9")
        await buffer.published(0)
        first = await buffer.admit(4, SOON_S, "generator-0")
        assert [a.prompt_tokens for a in first] == [encode(buffer._prompter, a.task.prompt) for a in first]
        assert len(encoded) == 5, "each once, and one that is drawn ahead"
        assert len(buffer._encoded) == 1, "none is kept for longer"
        await buffer.reissue([first[2].group_id], "engine lost")
        again, *_ = await buffer.admit(1, SOON_S, "generator-0")
        assert (again.group_id, again.prompt_tokens) == (first[2].group_id, None)
        of_messages = replace(again, task=replace(again.task, prompt=[{"role": "user", "content": "1 + 1 ="}]))
        assert buffer._with_tokens(of_messages).prompt_tokens is None

    asyncio.run(asyncio.wait_for(scenario(), SOON_S))


def test_while_a_batch_is_assembled_the_buffer_answers(actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assembling 16 million tokens takes seconds: nobody else waits for that."""
    answered = threading.Event()
    assemble = Assembler.__call__

    def slowly(self: Assembler, *args: Any) -> Any:
        assert answered.wait(SOON_S), "nothing was answered meanwhile"
        return assemble(self, *args)

    monkeypatch.setattr(Assembler, "__call__", slowly)

    async def scenario() -> None:
        buffer = actor()
        await buffer.published(0)
        held = await buffer.admit(3, SOON_S, "generator-0")
        await buffer.put([group(a.group_id) for a in held[:2]])
        taking = asyncio.create_task(buffer.take_batch(SOON_S))
        await asyncio.sleep(0)
        await buffer.put([group(held[2].group_id)])
        await buffer.ping()
        answered.set()
        assert (await taking).group_ids == [0, 1]

    asyncio.run(scenario())


def test_batches_are_assembled_one_after_the_other_in_their_order(actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are drawn as batches are assembled, so their order must not depend on threads."""
    assemble, indices, at_once = Assembler.__call__, [], []

    def watched(self: Assembler, index: int, *args: Any) -> Any:
        at_once.append(index)
        assert at_once == [index]
        indices.append(index)
        batch = assemble(self, index, *args)
        at_once.remove(index)
        return batch

    monkeypatch.setattr(Assembler, "__call__", watched)

    async def scenario() -> None:
        buffer = actor()
        await buffer.published(0)
        held = await buffer.admit(4, SOON_S, "generator-0")
        taking = [asyncio.create_task(buffer.take_batch(SOON_S)) for _ in range(2)]
        await buffer.put([group(a.group_id) for a in held])
        await asyncio.gather(*taking)

    asyncio.run(scenario())
    assert indices == [0, 1]


def test_a_batch_comes_in_parts_and_each_group_in_one_of_them(actor) -> None:
    async def scenario() -> None:
        buffer = actor("train.groups_per_step=4", "train.stream_groups=1", "staleness.max_policy_lag=1")
        await buffer.published(0)
        held = [a.group_id for a in await buffer.admit(8, SOON_S, "generator-0")]

        async def part() -> list[int] | None:
            shares = await buffer.take_part(1, SOON_S)
            return None if shares is None else [int(share.num_sequences) for share in shares]

        for first in (0, 4):
            own = held[first : first + 4]
            await buffer.put([group(own[2])])
            assert await part() == [2]
            await buffer.put([group(own[0]), group(own[1])])
            assert await part() == [4], "all that has come meanwhile"
            await buffer.put([group(own[3])])
            assert await part() is None
            batch = await buffer.take_batch(SOON_S)
            assert batch.group_ids == own
            assert [int(share.num_sequences) for share in batch.steps[0]] == [2]
            assert batch.metrics["train/sequences"] == 8
            await buffer.trained(batch.group_ids)
            if first == 0:
                await buffer.published(1)

    asyncio.run(scenario())


def test_a_delivery_that_was_superseded_says_nothing_about_its_task(actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the adaptive order would follow rollouts that nothing else has heard of."""
    recorded: list[str] = []

    async def scenario() -> None:
        buffer = actor("task.order=adaptive", "replay.operators=[filter_zero_variance]")
        monkeypatch.setattr(buffer._taskset, "record", lambda task_id, rate: recorded.append(task_id))
        await buffer.published(0)
        held = await buffer.admit(2, SOON_S, "generator-0")
        await buffer.reissue([held[0].group_id], "engine lost")
        await buffer.put([group(held[0].group_id)])
        assert recorded == []
        await buffer.put([group(held[1].group_id, (1.0, 1.0))])  # left out, which says most about how hard it is
        assert recorded == ["task-1"]

    asyncio.run(scenario())


OWN_PARTS = """
import torch
from torchrl.data import LazyStackStorage
from torchrl.data.replay_buffers.samplers import Sampler

made = []

class Counted(LazyStackStorage):
    def set(self, index, data, **options):
        made.append(int(index))
        super().set(index, data, **options)

class NewestFirst(Sampler):
    def __init__(self, capacity):
        super().__init__()

    def sample(self, storage, batch_size):
        return torch.arange(len(storage)).flip(0)[:batch_size], {}

    def _empty(self): ...
    def state_dict(self): return {}
    def load_state_dict(self, state): ...
    def dumps(self, path): ...
    def loads(self, path): ...

def wrong(capacity): return capacity
"""


@pytest.mark.slow
def test_a_sampler_and_a_storage_of_ones_own_are_named_in_the_config(actor, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["replay.sampler=own_parts:NewestFirst", "replay.storage=own_parts:Counted", "staleness.reorder_window=9"]

    async def batch_of(*overrides: str) -> list[int]:
        buffer = actor("staleness.max_policy_lag=9", *overrides)
        await buffer.published(0)
        held = await buffer.admit(6, SOON_S, "generator-0")
        await buffer.put([group(a.group_id) for a in held])
        served = await buffer.take_batch(SOON_S)
        assert served is not None
        return sorted(served.group_ids)

    assert asyncio.run(batch_of(own[2])) == [0, 1]
    assert asyncio.run(batch_of(*own)) == [4, 5]
    import own_parts  # type: ignore[import-not-found]

    assert own_parts.made[:6] == list(range(6))
    for key, name, part in (
        ("sampler", "own_parts:wrong", "made a int; expected a function (capacity) -> torchrl Sampler"),
        ("storage", "own_parts:NewestFirst", "made a NewestFirst; expected a function (capacity) -> torchrl Storage"),
        ("storage", "own_parts:made", "fails: TypeError: 'list' object is not callable"),
    ):
        with pytest.raises(ValueError, match=re.escape(part)):
            check_plugins(load_config(str(tmp_path / "c.yaml"), [f"replay.{key}={name}"]))
    for key, got in (("sampler", "own_parts:gone"), ("storage", "list")):
        with pytest.raises(ConfigError, match=f"replay.{key}: got "):
            load_config(str(tmp_path / "c.yaml"), [f"replay.{key}={got}"])
