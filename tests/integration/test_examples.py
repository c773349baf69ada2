"""The examples train as a user starts them: a scorer, a game in which only the last turn pays, an `openai` agent."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import ROOT

EXAMPLES = {
    "scorer": ("env.reward=my_scorer:short_and_right", "stages.async_rl.train.steps=40"),
    "game": ("env.name=guess_number:GuessNumber", "stages.async_rl.train.steps=30"),
    "agent": (
        "env.name=openai_agent:Careful",
        "stages.async_rl.train.steps=40",
        "stages.async_rl.train.groups_per_step=16",
    ),
}
pytestmark = [pytest.mark.timeout(900), pytest.mark.long("three whole runs")]


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
    assert done["max_policy_lag_observed"] <= 2
    if name == "game":
        assert rewards[0] < 0.2
        assert run.series("train/env/turns")[-1] > 2
