"""The class behind a collector's actor, without Ray: one engine, and one run after the other on it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leeway.collector import actor as actor_module
from leeway.collector.actor import CollectorActor
from leeway.collector.engine import SampledTokens
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


@pytest.mark.parametrize("listens", [False, True])
def test_what_refused_weights_sampled_is_sampled_again(actor: CollectorActor, listens: bool) -> None:
    """A load goes wrong while a served request is answered, and its version is proven by the next load."""
    sync = SimpleNamespace(num_quarantines=0, one_version=lambda: nullcontext(None))
    asked: list[bool] = []

    async def until_verified(version: int) -> None: ...

    async def sample(name: str, prompt_tokens: list[int], **sampling: Any) -> list[SampledTokens]:
        asked.append(sampling["listens"])
        sync.num_quarantines = 1
        return [SampledTokens([len(asked)], [-1.0], [3], "stop")]

    sync.until_verified = until_verified
    actor._current = cast(Any, SimpleNamespace(weight_sync=sync))
    actor._requests = cast(Any, SimpleNamespace(sample=sample))
    answer = asyncio.run(actor.sample("a", [1], listens=listens))
    assert answer is None if listens else [s.tokens for s in answer or ()] == [[2]]
    assert len(asked) == 2 - listens


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
