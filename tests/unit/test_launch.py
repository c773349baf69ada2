"""How the parts that collectors wait at are created."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.config import find_recipe, load_config
from leeway.runtime import launch
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
        async def answer(*args: Any, **named: Any) -> dict[str, Any]:
            return {"pid": 0, "node": ""}

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
    monkeypatch.setattr(launch, "keep_on", lambda pid, cores, **_: None)
    here = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(launch.ray, "get_runtime_context", lambda: here)

    async def main() -> None:
        launcher = Launcher(config, find_recipe("async_rl"), run_dir=tmp_path, supervisor=Supervisor())
        await launcher.param_server()
        await launcher.buffer()

    asyncio.run(main())
    for fake in fakes.values():
        assert fake.options_given["max_concurrency"] == calls_at_once(config)
