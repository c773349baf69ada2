"""The two calls of a load, on an engine core that pauses as vLLM's does: at once, or with a Future once it is idle."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from typing import Any

import pytest

from leeway.engines import vllm_core


class Core:
    def __init__(self, *, busy: bool, failure: Any = None) -> None:
        self._busy, self._failure = busy, failure
        self.pausing: Future[None] = Future()
        self.did: list[str] = []
        self.input_queue: queue.Queue[Any] = queue.Queue()

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.did.append(f"pause {mode} {clear_cache}")
        return self.pausing if self._busy else None

    def collective_rpc(self, method: str, args: tuple[str]) -> list[Any]:
        self.did.append(f"{method} {args[0]}")
        if isinstance(self._failure, Exception):
            raise self._failure
        return [(None, None), (None, self._failure)]

    def set_weight_version(self, version: str) -> None:
        self.did.append(f"version {version}")

    def resume_scheduler(self) -> None:
        self.did.append("resume")


def loads(core: Any) -> tuple[Future[None], Future[Any]]:
    return vllm_core._stand_still(core, "wait", True), vllm_core._take_staged(core, "7")


def test_an_idle_engine_loads_at_once():
    core = Core(busy=False)
    still, taken = loads(core)
    assert still.done()
    assert taken.result(0)[0] == [(None, None), (None, None)]
    assert core.did == ["pause wait True", "load_staged 7", "version 7", "resume"]


def test_a_busy_engine_loads_in_the_moment_in_which_it_has_drained():
    core = Core(busy=True)
    still, taken = loads(core)
    told = []
    still.add_done_callback(lambda _: told.append(list(core.did)))
    assert core.did == ["pause wait True"]
    assert not taken.done()
    core.pausing.set_result(None)
    assert core.did == ["pause wait True", "load_staged 7", "version 7", "resume"]
    assert taken.done()
    assert core.input_queue.get_nowait()[0].name == "WAKEUP", "it has gone to wait for a message"


def test_whoever_waits_for_the_pause_is_told_before_the_load():
    core = Core(busy=True)
    told = []
    still = vllm_core._stand_still(core, "wait", True)  # type: ignore[arg-type]
    still.add_done_callback(lambda _: told.append("load_staged 7" in core.did))
    vllm_core._take_staged(core, "7")  # type: ignore[arg-type]
    core.pausing.set_result(None)
    assert told == [False]


def test_an_engine_whose_load_failed_neither_names_the_version_nor_goes_on():
    core = Core(busy=False, failure=("load", "a layer was left out"))
    _, taken = loads(core)
    assert taken.result(0)[0][1] == (None, ("load", "a layer was left out"))
    assert core.did[-1] == "load_staged 7"


@pytest.mark.parametrize("fails", ["pause", "load"])
def test_an_error_reaches_whoever_waits(fails):
    error = RuntimeError("no such worker")
    core = Core(busy=True, failure=error if fails == "load" else None)
    _, taken = loads(core)
    if fails == "pause":
        core.pausing.set_exception(error)
    else:
        core.pausing.set_result(None)
    with pytest.raises(RuntimeError, match="no such worker"):
        taken.result(0)
    assert "resume" not in core.did


def test_nothing_is_loaded_without_a_pause_of_its_own():
    """As where a load is given up between its two calls: the engine generates, and its batch has a version."""
    core = Core(busy=False)
    loads(core)
    did = list(core.did)
    with pytest.raises(RuntimeError, match="was not asked to stand still"):
        vllm_core._take_staged(core, "8").result(0)  # type: ignore[arg-type]
    core.pause_scheduler = lambda *_: (_ for _ in ()).throw(ValueError("no such mode"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such mode"):
        vllm_core._stand_still(core, "wait", True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="was not asked to stand still"):
        vllm_core._take_staged(core, "8").result(0)  # type: ignore[arg-type]
    assert core.did == did


def test_a_load_that_was_given_up_in_its_drain_takes_nothing_of_the_next_one():
    """vLLM calls back the last one first."""
    core = Core(busy=True)
    _, given_up = loads(core)
    first, core.pausing = core.pausing, Future()
    vllm_core._stand_still(core, "wait", True)  # type: ignore[arg-type]
    taken = vllm_core._take_staged(core, "8")  # type: ignore[arg-type]
    core.pausing.set_result(None)
    first.set_result(None)
    with pytest.raises(RuntimeError, match="for something else before it loaded"):
        given_up.result(0)
    assert taken.done()
    assert core.did[2:] == ["load_staged 8", "version 8", "resume"]
