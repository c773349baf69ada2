"""benchmarks/scale.py: the planner's simulation with a buffer and links that take time."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.planning.simulate import Simulation

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FREE: dict[str, float] = dict.fromkeys(("call_s", "group_s", "order_s", "byte_s", "model_bytes", "bucket_bytes"), 0.0)
STEPS = 8


@pytest.fixture(scope="module")
def scale() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "scale.py")))
        sys.modules.pop("quickstart_runs", None)


def test_where_nothing_takes_time_it_is_the_planners_simulation(scale: Any) -> None:
    calibration, settings, costs = scale.job("short", 3)
    own = scale.Fleet(calibration, settings, replace(costs, **FREE), num_steps=STEPS).run()
    planned = Simulation(calibration, settings, num_steps=STEPS, skip=0, chunks_per_group=2).run()
    assert own.steps == pytest.approx(planned.steps, rel=1e-6)
    assert own.num_groups == planned.num_groups == STEPS * settings.groups_per_step


@pytest.mark.slow
def test_a_tree_brings_weights_in_levels_and_shards_share_the_deliveries(scale: Any) -> None:
    calibration, settings, costs = scale.job("short", 21)
    flat, tree, sharded = [
        scale.fleet(calibration, settings, replace(costs, shards=shards, fan_out=fan_out), num_steps=STEPS)
        for shards, fan_out in ((1, 0), (1, 4), (4, 4))
    ]
    copy_s, bucket_s = costs.model_bytes / costs.link_bytes_per_s, costs.bucket_bytes / costs.link_bytes_per_s
    assert flat["last_engine_has_it_s"] == pytest.approx(21 * copy_s, abs=0.01)
    assert tree["last_engine_has_it_s"] == pytest.approx(4 * copy_s + 2 * 4 * bucket_s, abs=0.01), "4 + 16 + 1 engines"
    assert tree["step_s"] <= flat["step_s"]
    assert tree["coordinator_busy"] == tree["shard_busy"], "one event loop"
    assert sharded["shard_busy"] < 0.4 * tree["shard_busy"]
    assert sharded["groups_per_s"] >= 0.9 * tree["groups_per_s"]
