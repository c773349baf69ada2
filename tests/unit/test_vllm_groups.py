"""What a front end makes of the passes of vLLM's engine: `engines.vllm_groups`, without vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leeway.collector.progress import Sampled
from leeway.engines.vllm_groups import COUNTS, ENDED, MEMBERS, REASONS, Groups, Member, is_of_group, member_id

GROUP, OTHER = "group-1", "group-2"


@dataclass
class Engine:
    """What it was told to do."""

    sent: int = 0
    aborted: list[list[str]] | None = None

    async def send(self) -> None:
        self.sent += 1

    async def abort(self, names: list[str]) -> None:
        self.aborted = [*(self.aborted or []), names]


def record(*members: tuple[str, list[int], str | None], width: int = 1) -> Any:
    """Of one pass: (member, its new tokens, why it ended). A token's logprob is minus a hundredth of it; the ids that
    follow it are less likely.
    """
    tokens = [t for _, new, _ in members for t in new]
    ids = np.array([[t + k for k in range(width)] for t in tokens]).reshape(-1, width)
    reasons = {i: reason for i, (_, _, reason) in enumerate(members) if reason is not None}
    return SimpleNamespace(
        new_token_ids=tokens,
        new_logprobs=SimpleNamespace(logprob_token_ids=ids, logprobs=-ids / 100) if tokens else None,
        kv_transfer_params={
            MEMBERS: [name for name, _, _ in members],
            COUNTS: [len(new) for _, new, _ in members],
            ENDED: list(reasons),
            REASONS: list(reasons.values()),
        },
    )


def first(name: str = GROUP) -> str:
    return member_id(name, 0)


def second(name: str = GROUP) -> str:
    return member_id(name, 1)


async def begun(groups: Groups, engine: Engine, name: str = GROUP, **how: Any) -> asyncio.Task[list[Member]]:
    task = asyncio.create_task(groups.sample(name, engine.send, **{"n": 2, **how}))
    await asyncio.sleep(0)
    return task


def test_a_groups_completions_are_put_together_from_passes() -> None:
    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)
        task = await begun(groups, engine)
        assert engine.sent == 1
        said = groups.passed(record((second(), [7], None), (first(), [5], None)), "3")
        assert said == [Sampled(GROUP, second(), 1, False), Sampled(GROUP, first(), 1, False)]
        said = groups.passed(record((first(), [6, 9], "stop"), (second(), [8], None)), "4")
        assert said == [Sampled(GROUP, first(), 2, True), Sampled(GROUP, second(), 1, False)]
        await asyncio.sleep(0)
        assert not task.done(), "one of two has ended"
        groups.passed(record((second(), [1], "length")), "4")
        one, two = await task
        assert (one.index, one.tokens, one.logprobs, one.versions, one.finish_reason) == (
            0,
            [5, 6, 9],
            [-0.05, -0.06, -0.09],
            [3, 4, 4],
            "stop",
        )
        assert (two.tokens, two.versions, two.finish_reason) == ([7, 8, 1], [3, 4, 4], "length")

    asyncio.run(run())


def test_under_an_adapter_all_tokens_are_of_its_version() -> None:
    """vLLM's own name of the weights is not a version then."""

    async def run() -> None:
        engine, told = Engine(), []
        groups = Groups(engine.abort)
        task = await begun(groups, engine, n=1, version=9, heard=lambda *said: told.append(said))
        groups.passed(record((first(), [5, 6], "stop")), "default")
        (one,) = await task
        assert one.versions == [9, 9]
        assert told == [(0, [5, 6], [-0.05, -0.06], 9)]

    asyncio.run(run())


def test_of_each_token_the_likeliest_are_noted_as_far_as_they_were_asked_for() -> None:
    """A pass tells each request as many as the one that asked for most."""

    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)
        plain, noted = await begun(groups, engine, n=1), await begun(groups, engine, OTHER, n=1, num_kept=2)
        groups.passed(record((first(), [5], "stop"), (first(OTHER), [6], "stop"), width=6), "0")
        assert (await plain)[0].kept == []
        assert (await noted)[0].kept == [{6: -0.06, 7: -0.07, 8: -0.08}]

    asyncio.run(run())


def test_logprobs_of_other_tokens_than_were_sampled_are_refused() -> None:
    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)
        task = await begun(groups, engine, n=1)
        wrong = record((first(), [5], None))
        wrong.new_token_ids = [6]
        with pytest.raises(AssertionError, match="logprobs of other tokens"):
            groups.passed(wrong, "0")
        task.cancel()

    asyncio.run(run())


def test_a_call_that_is_cancelled_is_aborted_and_what_comes_late_is_nobodys() -> None:
    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)
        task, other = await begun(groups, engine), await begun(groups, engine, OTHER, n=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.aborted == [[GROUP]]
        late = record((first(), [5], "abort"), (second(), [5], None), (first(OTHER), [6], "stop"))
        assert groups.passed(late, "0") == [Sampled(OTHER, first(OTHER), 1, True)]
        assert (await other)[0].tokens == [6]
        assert groups.ended(GROUP, "abort") == []

    asyncio.run(run())


def test_a_group_that_may_have_been_sent_is_aborted_where_sending_it_failed() -> None:
    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)

        async def send() -> None:
            raise OSError("no route")

        with pytest.raises(OSError, match="no route"):
            await groups.sample(GROUP, send, n=2)
        assert engine.aborted == [[GROUP]]
        assert groups.ended(GROUP, "abort") == []

    asyncio.run(run())


@pytest.mark.parametrize("name", [GROUP, "each member"])
def test_what_the_engine_gives_up_outside_of_a_pass_ends(name: str) -> None:
    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)
        task = await begun(groups, engine)
        groups.passed(record((first(), [5], None)), "0")
        said = [s for one in ([GROUP] if name == GROUP else [first(), second()]) for s in groups.ended(one, "error")]
        assert said == [Sampled(GROUP, first(), 0, True), Sampled(GROUP, second(), 0, True)]
        assert [(m.tokens, m.finish_reason) for m in await task] == [([5], "error"), ([], "error")]

    asyncio.run(run())


def test_of_requests_that_are_given_up_only_those_under_way_are_aborted() -> None:
    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)
        task = await begun(groups, engine)
        await groups.give_up(["17", GROUP, OTHER])
        assert engine.aborted == [[GROUP]]
        assert [m.finish_reason for m in await task] == ["abort", "abort"]

    asyncio.run(run())


def test_everyone_who_waits_is_told_that_the_engine_is_lost() -> None:
    async def run() -> None:
        engine = Engine()
        groups = Groups(engine.abort)
        tasks = [await begun(groups, engine, name) for name in (GROUP, OTHER)]
        groups.fail(ConnectionError("gone"))
        for task in tasks:
            with pytest.raises(ConnectionError, match="gone"):
                await task
        assert engine.aborted is None, "there is nobody to tell"

    asyncio.run(run())


def test_an_id_says_whether_it_is_of_a_group() -> None:
    assert is_of_group(GROUP)
    assert is_of_group(first())
    assert not is_of_group("17")
