"""The class behind a collector's actor, without Ray: one engine, and one run after the other on it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leeway.collector import actor as actor_module
from leeway.collector.actor import CollectorActor, CollectorRun
from leeway.collector.engine import SampledTokens
from leeway.collector.outbox import Outbox
from leeway.config import load_config
from leeway.failures import PartFailed
from leeway.runtime.launch import engine_settings
from leeway.transports.transport import TransportSettings

OVERRIDES = ["rollout.engine.name=hf", "cluster.kv_cache_gib=0.01", "rollout.max_model_len=64", "cluster.device=cpu"]


class Silent:
    """An actor that never answers."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self, *args: Any, **options: Any) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def actor(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CollectorActor:
    monkeypatch.setattr(actor_module, "LoopWatch", lambda: None)
    monkeypatch.setattr(actor_module, "settle", lambda: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "here")
    config = load_config("quickstart", [f"model.path={model_path}", *OVERRIDES])
    settings = engine_settings(config, cores=[], initial_version=None)
    return CollectorActor(settings, role="generator-0", log_file=tmp_path / "log", log_level="INFO")


class Sync:
    """Weights of version 3 are proven when `proven` is set."""

    def __init__(self) -> None:
        self.num_quarantines = 0
        self.proven = asyncio.Event()

    def one_version(self) -> Any:
        return nullcontext(None)

    async def until_verified(self, version: int) -> None:
        if version == 3:
            await self.proven.wait()


class Asked:
    """A request of which one token is drawn under version 3, and which ends when `ends` is set."""

    def __init__(self) -> None:
        self.count = 0
        self.ends, self.was_ended = asyncio.Event(), False

    async def sample(self, name: str, prompt_tokens: list[int], **sampling: Any) -> list[SampledTokens] | None:
        self.count += 1
        await self.ends.wait()
        return None if self.was_ended else [SampledTokens([self.count], [-1.0], [3], "stop")]

    async def heard(self, name: str, *, within_s: float) -> list[Any]:
        return [(0, [self.count], [-1.0], 3)]

    def end(self, name: str) -> None:
        self.was_ended = True
        self.ends.set()


def served(actor: CollectorActor) -> tuple[Sync, Asked]:
    sync, asked = Sync(), Asked()
    actor._current = cast(Any, SimpleNamespace(weight_sync=sync))
    actor._requests = cast(Any, asked)
    actor._quarantines_before = {}
    return sync, asked


def test_what_refused_weights_sampled_for_a_client_is_sampled_again(actor: CollectorActor) -> None:
    """A load goes wrong while a request is answered, and its version is proven by the next load."""

    async def asks() -> None:
        sync, asked = served(actor)
        answering = asyncio.ensure_future(actor.sample("a", [1], listens=False))
        await asyncio.sleep(0)
        sync.num_quarantines = 1
        sync.proven.set()
        asked.ends.set()
        answer = await answering
        assert answer is not None
        assert [s.tokens for s in answer] == [[2]]

    asyncio.run(asks())


def test_a_client_hears_of_tokens_once_their_weights_are_proven(actor: CollectorActor) -> None:
    async def listens() -> None:
        sync, asked = served(actor)
        answering = asyncio.ensure_future(actor.sample("a", [1], listens=True))
        hearing = asyncio.ensure_future(actor.heard("a", 1.0))
        await asyncio.sleep(0.01)
        assert not hearing.done()
        sync.proven.set()
        assert await hearing == [(0, [1], [-1.0], 3)]
        asked.ends.set()
        assert await answering is not None

    asyncio.run(listens())


@pytest.mark.parametrize("first", ["heard", "sample", None])
def test_a_client_hears_nothing_of_tokens_whose_weights_are_refused(actor: CollectorActor, first: str | None) -> None:
    """Their version is proven by the next load, but they are of the one before. `first`: which of the two that wait for
    the proof is woken first; None: the request has not ended by then.
    """

    async def listens() -> None:
        sync, asked = served(actor)
        answering = asyncio.ensure_future(actor.sample("a", [1], listens=True))
        await asyncio.sleep(0)
        if first == "sample":
            asked.ends.set()
            await asyncio.sleep(0.01)
        hearing = asyncio.ensure_future(actor.heard("a", 1.0))
        await asyncio.sleep(0.01)
        if first == "heard":
            asked.ends.set()
            await asyncio.sleep(0.01)
        sync.num_quarantines = 1
        sync.proven.set()
        assert await hearing == []
        assert await answering is None
        assert asked.count == 1

    asyncio.run(listens())


def test_nothing_is_sampled_again_for_a_client_that_has_left(actor: CollectorActor) -> None:
    async def leaves() -> None:
        sync, asked = served(actor)
        answering = asyncio.ensure_future(actor.sample("a", [1], listens=False))
        await asyncio.sleep(0)
        asked.ends.set()
        await asyncio.sleep(0.01)
        await actor.end("a")
        sync.num_quarantines = 1
        sync.proven.set()
        assert await answering is None
        assert asked.count == 1

    asyncio.run(leaves())


class Slow:
    """A replay buffer that answers a `put`, and who asks for more, when `answers` is set."""

    def __init__(self) -> None:
        self.got: list[list[int | str]] = []
        self.answers = asyncio.Event()
        self.put = SimpleNamespace(remote=self._put)
        self.admit = SimpleNamespace(remote=self._admit)

    async def _admit(self, limit: int, timeout_s: float, collector: str, finished: list[Any]) -> list[Any]:
        self.got.append([*(group.group_id for group in finished), f"+{limit}"])
        await self.answers.wait()
        return []

    async def _put(self, groups: list[Any]) -> None:
        self.got.append([group.group_id for group in groups])
        await self.answers.wait()


def collecting(actor: CollectorActor, buffer: Slow, *, ends: bool = True) -> list[str]:
    """Have `actor` collect four groups, and no more if not `ends`; what happened in its collector."""
    happened = list[str]()

    async def groups() -> AsyncIterator[list[Any]]:
        for ids in ([1], [2], [3, 4]):
            happened.append(f"made {ids}")
            yield [SimpleNamespace(group_id=i) for i in ids]
            for _ in range(3):
                await asyncio.sleep(0)
        while not ends:
            await asyncio.sleep(10)
        happened.append("ended")

    actor._current = run_with(buffer)
    actor._current.collector = cast("Any", SimpleNamespace(groups=groups, num_in_flight=1))
    return happened


def run_with(buffer: Slow) -> CollectorRun:
    """Of a run, its buffer and what is on the way there."""
    run = object.__new__(CollectorRun)
    run.buffer, run._name, run._deadline_s = buffer, "generator-0", 60.0
    run.outbox = Outbox(run._put)
    return run


def test_who_asks_for_more_groups_takes_along_those_that_have_finished() -> None:
    async def asks() -> None:
        buffer = Slow()
        run = run_with(buffer)
        putting = asyncio.ensure_future(run.outbox.run())
        await asyncio.sleep(0)
        run.outbox.add([cast("Any", SimpleNamespace(group_id=i)) for i in (1, 2)])
        asked = asyncio.ensure_future(run._admit(5))
        emptied = asyncio.ensure_future(run.outbox.emptied())
        for _ in range(9):
            await asyncio.sleep(0)
        assert buffer.got == [[1, 2, "+5"]], "one call"
        assert not emptied.done()
        buffer.answers.set()
        assert await asked == []
        await emptied
        assert await run._admit(3) == []
        assert buffer.got[1:] == [["+3"]]
        putting.cancel()

    asyncio.run(asyncio.wait_for(asks(), 60))


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_the_last_groups_under_way_wait_for_no_other_call(actor: CollectorActor, num_in_flight: int) -> None:
    """In lockstep the next wish for more waits until these are trained on."""

    async def collects() -> None:
        buffer = Slow()
        collecting(actor, buffer)
        run = actor._current
        assert run is not None
        cast("Any", run.collector).num_in_flight = num_in_flight
        asked = asyncio.ensure_future(run._admit(5))
        await asyncio.sleep(0)
        collect = asyncio.ensure_future(actor.collect())
        for _ in range(30):
            await asyncio.sleep(0)
        assert buffer.got == [["+5"], *([] if num_in_flight else [[1]])]
        for task in (asked, collect):
            task.cancel()

    asyncio.run(asyncio.wait_for(collects(), 60))


def test_groups_are_made_while_others_are_put(actor: CollectorActor) -> None:
    async def collects() -> None:
        buffer = Slow()
        happened = collecting(actor, buffer)
        collect = asyncio.ensure_future(actor.collect())
        while "ended" not in happened:
            await asyncio.sleep(0)
        assert buffer.got == [[1]], "one call at a time"
        for _ in range(5):
            await asyncio.sleep(0)
        assert not collect.done(), "it has ended when the buffer has all"
        buffer.answers.set()
        await collect
        assert buffer.got == [[1], [2, 3, 4]]

    asyncio.run(asyncio.wait_for(collects(), 60))


@pytest.mark.parametrize("ends", [False, True])
def test_a_buffer_that_is_lost_ends_the_collecting(actor: CollectorActor, ends: bool) -> None:
    async def collects() -> None:
        buffer = Slow()

        async def lost(groups: list[Any]) -> None:
            for _ in range(50):  # until the collecting waits for the last ones, where it ends
                await asyncio.sleep(0)
            if groups[-1].group_id < 4:
                return
            raise ConnectionError("the buffer is gone")

        buffer.put = SimpleNamespace(remote=lost)
        collecting(actor, buffer, ends=ends)
        with pytest.raises(PartFailed, match="the buffer is gone"):
            await actor.collect()

    asyncio.run(asyncio.wait_for(collects(), 60))


@pytest.mark.slow
def test_another_run_on_the_same_engine_has_all_that_is_a_runs_anew(actor: CollectorActor, tmp_path: Path) -> None:
    config = load_config("quickstart", [f"model.path={actor._settings.model_path}", *OVERRIDES])
    others: dict[str, Any] = {"buffer": Silent(), "param_server": Silent()}
    others["transport"] = TransportSettings(name="files", folder=tmp_path)

    async def two_runs() -> None:
        with pytest.raises(PartFailed, match=r"start\(\) comes first"):
            await actor.collect()
        process = await actor.start(config, **others)
        assert process["name"].startswith("generator-0/")
        first, engine = actor._run, actor._engine
        first.weight_sync._ended.clear()  # as while it loads
        resetting = asyncio.ensure_future(actor.reset(config, **others))
        await asyncio.sleep(0.05)
        assert actor._run is first, "one run at a time has the engine"
        first.weight_sync._ended.set()
        await resetting
        first = actor._run
        syncing = asyncio.ensure_future(actor.sync_weights_loop())
        await asyncio.sleep(0)
        await actor.reset(config.model_copy(update={"seed": 5}), **others)
        await asyncio.wait_for(syncing, 200)
        assert actor._engine is engine
        assert actor._run.weight_sync is not first.weight_sync
        assert actor._run.transport is not first.transport
        assert (first.collector._seed, actor._run.collector._seed) == (config.seed, 5)
        assert actor._run.weight_sync.verified_version == -1, "it serves nothing before it has pulled"
        await actor.shutdown()

    asyncio.run(two_runs())


@pytest.mark.parametrize("forgets", [True, False])
def test_an_engine_that_keeps_prompts_while_it_is_measured_is_known(
    actor: CollectorActor, caplog: pytest.LogCaptureFixture, forgets: bool
) -> None:
    async def forget_prompts() -> bool:
        return forgets

    actor._engine = cast(Any, SimpleNamespace(forget_prompts=forget_prompts))
    with caplog.at_level("WARNING", logger=actor_module.logger.name):
        asyncio.run(actor.forget_prompts())
    assert ("kept its prompts" in caplog.text) is not forgets


def test_no_two_engines_of_a_run_draw_the_same_numbers(
    actor: CollectorActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that takes another's place."""
    given: list[Any] = []

    async def start_engine(settings: Any) -> Any:
        given.append(settings)
        raise RuntimeError("that is enough")

    monkeypatch.setattr(actor_module, "start_engine", start_engine)
    config = load_config("quickstart", [])
    for role in ("generator-0", "generator-1", "generator-0"):
        each = CollectorActor(actor._settings, role=role, log_file=tmp_path / "log", log_level="INFO")
        with pytest.raises(PartFailed, match="that is enough"):
            asyncio.run(each.start(config))
    assert len({settings.seed for settings in given}) == 3
    assert all(0 <= settings.seed < 2**31 for settings in given), "vLLM gives it to numpy as well"
    assert len({dataclasses.replace(settings, seed=0).model_path for settings in given}) == 1
