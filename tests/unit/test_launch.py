"""How the parts that collectors wait at are created."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config import ConfigError, derive, find_recipe, load_config
from leeway.failures import PartFailed, machine
from leeway.runtime import launch, placement
from leeway.runtime.launch import Launcher, calls_at_once
from leeway.runtime.supervisor import Supervisor


class FakeActor:
    """Stands for an actor's class and for the actor; every method answers with its process."""

    def __init__(self) -> None:
        self.options_given: dict[str, Any] = {}

    def options(self, **options: Any) -> FakeActor:
        self.options_given |= options
        return self

    def remote(self, *args: Any, **named: Any) -> FakeActor:
        return self

    def __getattr__(self, method: str) -> Any:
        async def answer(*args: Any, **named: Any) -> Any:
            return (machine(), 0) if method == "answer" else {"pid": 0, "node": ""}

        return SimpleNamespace(remote=answer)


def test_waiting_collectors_leave_room_for_what_ends_their_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each waits in a call; Ray runs 1,000 at once, unless it is told otherwise."""
    config = load_config("quickstart", ["monitor.console=off"], recipe="async_rl")
    many = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_generators": 5000})})
    assert calls_at_once(many) >= 2 * 5000 + 1000
    fakes = {name: FakeActor() for name in ("ReplayBufferRemote", "ParameterServerRemote")}
    for name, fake in fakes.items():
        monkeypatch.setattr(launch, name, fake)
    monkeypatch.setattr(placement, "keep_on", lambda pid, cores, **_: None)
    here = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(launch.ray, "get_runtime_context", lambda: here)

    async def main() -> None:
        launcher = Launcher(config, find_recipe("async_rl"), run_dir=tmp_path, supervisor=Supervisor())
        await launcher.param_server()
        await launcher.buffer()

    asyncio.run(main())
    for fake in fakes.values():
        assert fake.options_given["max_concurrency"] == calls_at_once(config)


def test_engines_take_the_gpus_of_the_trainers_ranks_with_whom_they_take_turns(tmp_path: Path) -> None:
    shared = ["cluster.device=cuda", "cluster.placement=turns", "train.num_ranks=4", "staleness.in_flight=recompute"]
    two_of_two = ["rollout.num_generators=2", "rollout.engine.tensor_parallel_size=2"]
    config = load_config("quickstart", [*shared, *two_of_two], recipe="async_rl")
    assert derive(config).gpus_needed == 4

    def places(*nodes: str) -> Any:
        def rank(number: int, node: str) -> Any:
            async def devices() -> tuple[str, list[str]]:
                return node * 56, [str(number)]

            return SimpleNamespace(devices=SimpleNamespace(remote=devices))

        async def main() -> Any:
            launcher = Launcher(config, find_recipe("async_rl"), run_dir=tmp_path, supervisor=Supervisor())
            launcher.parts.trainers = [rank(i, node) for i, node in enumerate(nodes)]
            return await launcher._engine_places()

        return asyncio.run(main())

    (first, own), (second, others) = places("a", "a", "b", "b")
    assert (own, others) == (["0", "1"], ["2", "3"])
    assert first["num_gpus"] == second["num_gpus"] == 0, "Ray has given them to the ranks"
    assert [where["scheduling_strategy"].node_id[0] for where in (first, second)] == ["a", "b"]
    with pytest.raises(PartFailed, match="generator-0: its 2 GPUs would be those of trainer ranks on several machines"):
        places("a", "b", "b", "b")


def test_where_nothing_trains_engines_have_gpus_of_their_own(tmp_path: Path) -> None:
    """A config for turns also serves the recipe evaluate."""
    config = load_config("quickstart", ["cluster.device=cuda", "cluster.placement=turns"], recipe="async_rl")
    launcher = Launcher(config, find_recipe("evaluate"), run_dir=tmp_path, supervisor=Supervisor())
    assert asyncio.run(launcher._engine_places()) == [({"num_gpus": 1}, [])]


def test_devices_are_shared_one_to_one(tmp_path: Path) -> None:
    shared = ["cluster.device=cuda", "cluster.placement=together", "train.num_ranks=2"]
    with pytest.raises(ConfigError, match=r"rollout.num_generators: got 1, expected engines on 2 GPUs"):
        load_config("quickstart", shared, recipe="async_rl")
    with pytest.raises(ConfigError, match=r"staleness.in_flight: got 'keep', expected recompute or off"):
        load_config("quickstart", ["cluster.placement=turns", "staleness.in_flight=keep"], recipe="async_rl")


def test_generators_on_a_machine_that_is_silent_are_lost(tmp_path: Path) -> None:
    config = load_config("quickstart", ["monitor.console=off"], recipe="async_rl")
    lost: list[str] = []

    async def main() -> None:
        launcher = Launcher(config, find_recipe("async_rl"), run_dir=tmp_path, supervisor=Supervisor())
        for role, where in (("generator-0", "a"), ("generator-1", "b"), ("generator-2", "b")):
            launcher._met(role, FakeActor(), (where, 0), instead=lambda failure: lost.append(str(failure)))
        launcher._machine_is_silent("b", "its machine has not answered")
        launcher._machine_is_silent("b", "its machine has not answered")
        await asyncio.sleep(0)
        launcher.parts.supervisor.forget_all()

    asyncio.run(main())
    assert lost == [f"generator-{i}: its machine has not answered" for i in (1, 2)], "each process once"


def test_ranks_choose_their_places_before_engines_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may not go everywhere: they save where the run's folder is."""
    config = load_config("quickstart", ["monitor.console=off"], recipe="async_rl")
    asked: list[str] = []

    class Slow:
        async def trainer(self, rank: int) -> Any:
            await asyncio.sleep(0.1)
            asked.append("trainer")
            raise PartFailed("trainer-0", "enough")

        async def generator(self, index: int, options: Any) -> Any:
            asked.append("generator")
            raise PartFailed("generator-0", "too early")

    async def main() -> None:
        launcher = Launcher(config, find_recipe("async_rl"), run_dir=tmp_path, supervisor=Supervisor())
        launcher._places = Slow()  # type: ignore[assignment]
        trainers = asyncio.ensure_future(launcher.trainers(total_steps=1, canary=None))  # type: ignore[arg-type]
        generators = asyncio.ensure_future(launcher.generators())
        with pytest.raises(PartFailed, match="enough"):
            await trainers
        generators.cancel()

    asyncio.run(main())
    assert asked == ["trainer"]
