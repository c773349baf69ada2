"""The replay buffer's actor in real Ray, with more collectors waiting at it than Ray runs calls at once by default."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import ray

from leeway.config import Config, load_config
from leeway.replay.actor import ReplayBufferRemote
from leeway.runtime.cluster import _own_way, _prepare
from leeway.runtime.launch import calls_at_once

from ..fakes import group
from ..trainers import save_model

pytestmark = pytest.mark.timeout(300)
NUM_COLLECTORS = 1100


@pytest.fixture
def cluster(config: Config) -> Iterator[None]:
    """As a run starts it. Left to itself, Ray gives its workers a low priority, and they wait for all other tests."""
    with patch.dict(os.environ):
        _prepare(config)
        with _own_way(None):
            ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, logging_level=logging.ERROR)
        yield
        ray.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = save_model(tmp_path / "model", tied=True)
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(10, 60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: {model}}}\ntask: {{path: {tmp_path}/t.jsonl}}\nenv: {{reward: exact_match}}\n"
        f"cluster: {{device: cpu}}\ntrain: {{steps: 99, groups_per_step: {NUM_COLLECTORS}}}\n"
        f"rollout: {{num_generators: {NUM_COLLECTORS}}}\nalgorithm: {{group_size: 2}}\n"
        "staleness: {max_policy_lag: 0}\n"
    )
    return load_config(str(tmp_path / "c.yaml"), [])


@pytest.mark.usefixtures("cluster")
def test_what_ends_a_wait_is_heard_however_many_collectors_wait(config: Config, tmp_path: Path) -> None:
    """Each wait occupies a call: were there no more of them than waiting collectors, nobody could deliver anything."""

    async def scenario() -> None:
        actor = ReplayBufferRemote.options(max_concurrency=calls_at_once(config)).remote(
            config, role="replay", log_file=tmp_path / "replay.log"
        )
        await actor.start.remote()
        await actor.published.remote(0)
        names = [f"generator-{i}" for i in range(NUM_COLLECTORS)]
        held = await asyncio.gather(*(actor.admit.remote(1, 120.0, name) for name in names))
        assert sorted(admissions[0].group_id for admissions in held) == [*range(NUM_COLLECTORS)]
        taking = asyncio.ensure_future(asyncio.wait_for(actor.take_batch.remote(120.0), 120))
        waiting = [asyncio.ensure_future(asyncio.wait_for(actor.admit.remote(1, 120.0, name), 120)) for name in names]
        await asyncio.sleep(1)  # they are all there
        await asyncio.wait_for(actor.put.remote([group(i) for i in range(NUM_COLLECTORS)]), 120)
        assert len((await taking).group_ids) == NUM_COLLECTORS
        await actor.published.remote(1)
        assert all(len(admissions) == 1 for admissions in await asyncio.gather(*waiting))

    asyncio.run(scenario())
