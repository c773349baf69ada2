"""The engine on transformers under the contract of every engine, and what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leeway.collector.engine import EngineLost
from leeway.engines.hf_engine import HfEngine

from ..engine_contract import EngineContract, Served, check_masks, engine_settings


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("model"), HfEngine)
    served.recover()
    yield served
    served.close()


class TestHf(EngineContract):
    pass


def test_it_says_what_each_token_was_drawn_from(served: Served) -> None:
    check_masks(served)


def test_a_pass_wakes_its_listeners_up_once(served: Served) -> None:
    """However many sequences it has: waking up a loop is a system call."""
    wakes: list[object] = []

    async def generate() -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*args: Any) -> Any:
            wakes.append(args)
            return wake(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", counted)
            await served.engine.generate(
                [5, 6, 7], n=8, temperature=1.0, max_tokens=12, stop_token_ids=[], heard=lambda *_: None
            )

    served.run(generate())
    assert 12 <= len(wakes) < 24


def test_a_listener_that_fails_keeps_no_other_one_from_hearing(served: Served) -> None:
    heard: list[int] = []

    def hear(index: int, *_: object) -> None:
        if index == 0:
            raise ValueError("a listener's own mistake")
        heard.append(index)

    reported: list[dict[str, Any]] = []

    async def generate() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        await served.engine.generate([5, 6, 7], n=3, temperature=1.0, max_tokens=4, stop_token_ids=[], heard=hear)
        asyncio.get_running_loop().set_exception_handler(None)

    served.run(generate())
    assert sorted(heard) == [1] * 4 + [2] * 4
    assert len(reported) == 4, "it is not swallowed"


def test_a_version_takes_the_memory_of_the_last_one_that_was_loaded_and_of_no_other(served: Served) -> None:
    """What was given up may still be written by its fetch: that would be in the next version, after its check."""
    manifest, buckets = served.publisher.next()
    engine = served.engine

    def staged(*, loaded: bool) -> int:
        """The address of its memory."""
        memory = engine.stage(manifest)
        for into, bucket in zip(memory.buckets, buckets, strict=True):
            into[:] = bucket
        if loaded:
            served.run(engine.load_weights(memory, in_flight="recompute"))
        held.append(memory.buckets)  # else the next one may get the same addresses by chance
        memory.release()
        return memory.buckets[0].ctypes.data

    held: list[Any] = []
    served.recover()
    first = staged(loaded=True)
    assert staged(loaded=False) == first
    second = staged(loaded=True)
    assert second != first, "nobody knows who still writes there"
    assert staged(loaded=True) == second
    assert served.run(engine.sleep(in_flight="recompute")) > 0
    asleep = staged(loaded=False)
    assert asleep != second, "an engine that sleeps keeps no copy of the weights"
    served.recover()
    last = engine.stage(manifest)
    for into, bucket in zip(last.buckets, buckets, strict=True):
        into[:] = bucket
    served.run(engine.load_weights(last, in_flight="recompute"))
    assert served.run(engine.sleep(in_flight="recompute")) > 0
    last.release()
    held.append(last.buckets)
    assert staged(loaded=False) != last.buckets[0].ctypes.data, "nor one that is let go of meanwhile"
    served.recover()


def in_time(work: Any) -> Any:
    return asyncio.wait_for(work, 60)


def test_what_keeps_its_thread_from_starting_is_said(served: Served, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = engine_settings(Path(served.engine._settings.model_path), cores=[100_000])
    with pytest.raises(EngineLost, match="the inference engine died: OSError"):
        asyncio.run(in_time(HfEngine.start(settings)))


@pytest.mark.parametrize("fails", ["set_aside", "_abort"])
def test_whatever_fails_in_its_thread_every_caller_is_told(
    served: Served, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A pass that has ended every sequence of a request, or what a call has it do between two passes."""
    engine = HfEngine(engine_settings(Path(served.engine._settings.model_path), initial_version=0))
    how: dict[str, Any] = dict(n=2, temperature=1.0, stop_token_ids=[])

    def breaks(*_: Any, **__: Any) -> None:
        if fails == "_abort" or not engine._running:  # all that ran has ended
            raise MemoryError("no room for a copy")

    async def scenario() -> None:
        monkeypatch.setattr(engine._decoder if fails == "set_aside" else engine, fails, breaks)
        if fails == "set_aside":
            with pytest.raises(EngineLost, match="MemoryError: no room for a copy"):
                await in_time(engine.generate([5, 6], max_tokens=3, **how))
        else:
            other = asyncio.create_task(engine.generate([5, 7], max_tokens=200, **how))
            begun = asyncio.Event()
            call = asyncio.create_task(engine.generate([5, 6], max_tokens=200, heard=lambda *_: begun.set(), **how))
            await in_time(begun.wait())
            call.cancel()
            with pytest.raises(EngineLost, match="MemoryError: no room for a copy"):
                await in_time(other)
        with pytest.raises(EngineLost):
            await in_time(engine.generate([5, 6], max_tokens=3, **how))

    try:
        asyncio.run(scenario())
    finally:
        engine.shutdown()
