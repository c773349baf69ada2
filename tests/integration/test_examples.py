"""The examples train as a user starts them: a scorer, a game in which only the last turn pays, an `openai` agent, and a
training loop of one's own with torchrl's loss.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import ANY_ENGINE, DIGITS_LAST, ROOT

EXAMPLES = {
    "scorer": ("env.reward=my_scorer:short_and_right", "stages.async_rl.train.steps=40"),
    "game": ("env.name=guess_number:GuessNumber", "stages.async_rl.train.steps=30"),
    "agent": (
        "env.name=openai_agent:Careful",
        "stages.async_rl.train.steps=40",
        "stages.async_rl.train.groups_per_step=16",
    ),
}
OWN_LOOP = str(ROOT / "examples/torchrl_grpo.py")
pytestmark = pytest.mark.timeout(900)


def test_a_training_loop_of_ones_own_gets_each_group_once_and_within_the_bound(
    start: Any, from_untrained: list[str], of_sums: list[str]
) -> None:
    sizes = ("train.steps=6", "train.groups_per_step=8", "algorithm.group_size=4", "eval.num_tasks=8")
    overrides = (ANY_ENGINE, *DIGITS_LAST, *sizes, "monitor.rollouts_per_step=100")
    run = start(OWN_LOOP, *from_untrained, *of_sums, *overrides).wait(600)
    assert run.code == 0, run.output
    assert run.summary["steps"] == 6
    assert 0 < max(run.series("train/policy_lag/max")) <= run.lag_bound
    assert len(taken := run.series("replay/groups_taken")) == 6
    assert taken[-1] == 6 * 8
    assert set(run.series("replay/dropped_stale")) == {0.0}
    # torchrl's loss and the engine agree about weights that are the same, and not about those that have moved on.
    distances = [abs(kl) for kl in run.series("train/kl/mean")]
    assert distances[0] < 1e-5 < max(distances)
    trained = [json.loads(line) for f in run.dir.glob("stages/*/rollouts/*.jsonl") for line in f.open()]
    assert len({(r["group_id"], r["sequence_id"]) for r in trained}) == len(trained) == 6 * 8 * 4
    assert (run.dir / "stages/async_rl/model/model.safetensors").exists()


@pytest.mark.long("a whole run")
def test_a_training_loop_of_ones_own_learns(start: Any, from_warm: list[str]) -> None:
    run = start(OWN_LOOP, *from_warm, ANY_ENGINE, "train.steps=40").wait(850)
    assert run.code == 0, run.output
    rewards, evals = run.series("train/reward/mean"), run.summary["eval"]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
    assert evals["after"]["exact_match"] > evals["before"]["exact_match"] + 0.03


@pytest.mark.long("three whole runs")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_to_the_end_and_gets_better(start: Any, from_warm: list[str], name: str) -> None:
    if name == "agent":
        pytest.importorskip("openai")
    run = start("async_rl", *from_warm, f"plugins=[{ROOT}/examples]", *EXAMPLES[name]).wait(850)
    assert run.code == 0, run.output
    rewards, done = run.series("train/reward/mean"), run.summary
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
    measure = "reward" if name == "scorer" else "exact_match"
    assert done["eval"]["after"][measure] > done["eval"]["before"][measure]
    assert run.series("replay/failed")[-1] == sum(run.series("collector/groups_retried")) == 0
    assert done["max_policy_lag_observed"] <= run.lag_bound
    if name == "game":
        assert rewards[0] < 0.2
        assert run.series("train/env/turns")[-1] > 2
