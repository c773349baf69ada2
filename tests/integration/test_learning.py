"""The job itself: the reward rises, trainer and engine agree, the bound holds, and all that a run promises is there,
although its engine dies on the way.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean

import pytest
from transformers import AutoModelForCausalLM

from leeway.monitor.trace import arrows, read_spans

from .conftest import (
    ENGINE,
    Started,
    check_that_only_this_user_on_this_machine_can_connect,
    left_by,
    part_of,
    shared_memory_of,
)

TOLERANCE = 1e-4


@pytest.mark.timeout(1600)
def test_asynchronous_rl_learns_within_the_bound_although_its_engine_dies(
    quickstart: Started, temporary_of_quickstart: Path
) -> None:
    quickstart.wait_for_steps(1, timeout_s=600)
    check_that_only_this_user_on_this_machine_can_connect(quickstart, temporary_of_quickstart)
    engine = part_of(quickstart, *ENGINE)
    shared = shared_memory_of(engine, temporary_of_quickstart)
    cores = os.cpu_count() or 1
    assert len(engine.cpu_affinity()) < cores or cores == 1, "it keeps to its own"
    engine.kill()
    run = quickstart.wait(900)
    assert run.code == 0, run.output
    assert "generator-0 serves again" in run.output
    summary = run.summary
    assert summary["status"] == "completed"
    assert summary["steps"] == 40

    # It learns: sampled reward in training, greedy accuracy on questions it never trained on. Ten steps at each end:
    # the mean of the first four, which the summary has, moves by 0.02 with the order of the groups alone.
    rewards = run.series("train/reward/mean")
    assert 0.2 <= summary["reward_first"] <= 0.55
    assert mean(rewards[-10:]) >= mean(rewards[:10]) + 0.04
    assert summary["eval"]["after"]["exact_match"] > summary["eval"]["before"]["exact_match"] + 0.08

    # It is asynchronous, and inside the bound at every step.
    assert 0 < max(run.series("train/policy_lag/max")) == summary["max_policy_lag_observed"] <= run.lag_bound
    assert summary["dropped_stale"] == 0
    assert run.series("replay/groups_taken")[-1] == 40 * 48

    # Served = trained, at every one of the pulls.
    assert summary["pulls"] >= 10
    assert 0 < summary["served_gap_max"] <= TOLERANCE

    # Every trained trajectory that was written down carries a version and a logprob for every token.
    rows = [json.loads(line) for f in run.dir.glob("stages/async_rl/rollouts/*.jsonl") for line in f.open()]
    assert len(rows) == 40 * 16
    assert len({(r["group_id"], r["sequence_id"]) for r in rows}) == len(rows), "a trajectory was trained on twice"
    for row in rows:
        assert len(row["policy_versions"]) == len(row["behavior_logprobs"]) == len(row["response_tokens"])
        assert min(row["policy_versions"]) >= 0

    check_spans(run.dir)
    for name in ("config.yaml", "summary.json", "curves.png"):
        assert (run.dir / name).stat().st_size > 0
    assert list(run.dir.glob("stages/async_rl/tensorboard/*tfevents*"))
    assert {"trainer-0", "generator-0", "replay", "param_server"} <= set(summary["processes"])
    assert summary["versions"]["vllm"]
    assert " differ from " not in (run.dir / "logs/driver.log").read_text(), "all were forks, or the machine was busy"
    assert left_by(quickstart, temporary_of_quickstart) == []
    assert shared
    assert [path for path in shared if path.exists()] == []
    saved = run.dir / "stages/async_rl/checkpoints/step-000040/hf"
    assert AutoModelForCausalLM.from_pretrained(saved).config.model_type == "qwen2"


def check_spans(run_dir: Path) -> None:
    """What every part did is on record, that of the generator which was killed too; and versions can be followed."""
    parts = {part.name: part for part in read_spans(run_dir) if part.stage == "async_rl"}
    assert {*parts} == {"driver", "trainer-0", "generator-0", "replay", "param_server"}
    processes = {span.id.split(":")[1].split(".")[0] for span in parts["generator-0"].spans}
    assert len(processes) == 2, "the one that was killed, and its successor"
    taken = {g for s in parts["replay"].spans if s.name == "batch_taken" for g in s.attrs["groups"]}
    generated = {s.attrs["group"] for s in parts["generator-0"].spans if s.name == "generate"}
    # What the killed one wrote last may be lost: half a second.
    assert len(taken & generated) >= 30 * 48
    steps = [s.attrs["step"] for s in parts["trainer-0"].spans if s.name == "forward_backward"]
    assert steps == sorted(steps)
    whole = [[s.name for s in chain] for chain in arrows([*parts.values()]) if len(chain) == 5]
    assert len(whole) >= 10
    assert whole[0] == ["publish", "fetch_weights", "pause", "generate", "forward_backward"]
