"""A model beside the policy, served by the run itself, asked by a reward from a folder of plug-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

REWARD = """
from helper_beside import WORDS
async def agrees(task, text, *, models):
    said = await models["second"].complete(str(task.prompt), max_tokens=8)
    assert await models["second"].complete(str(task.prompt), max_tokens=8) == said, "greedy"
    return float(said.strip() == text.strip()) + 0 * len(WORDS)
"""


@pytest.mark.timeout(400)
def test_a_reward_asks_a_model_that_the_run_serves(
    start: Any, from_warm: list[str], warm: Path, tmp_path: Path
) -> None:
    plugins = tmp_path / "elsewhere"
    plugins.mkdir()
    (plugins / "asks_another.py").write_text(REWARD)
    (plugins / "helper_beside.py").write_text("WORDS = ()\n")
    command = start(
        "async_rl",
        *from_warm,
        f"plugins=[{plugins}]",
        "env.rewards={exact_match: 0, 'asks_another:agrees': 1}",
        f"env.models={{second: {{path: {warm}, max_model_len: 64, engine: {{enforce_eager: true}}}}}}",
        "stages.async_rl.train.steps=2",
        "stages.async_rl.train.groups_per_step=8",
        "eval.at_end=false",
        "eval.num_tasks=32",
    )
    run = command.wait(350)
    assert run.code == 0, run.output
    assert "auxiliary-second" in run.summary["processes"]
    # The policy before its first step is the second model: greedily, both say the same.
    assert run.summary["eval"]["before"]["rewards/agrees"] == 1.0
    assert 0 < run.series("train/rewards/agrees")[0] < 1
    assert command.left_over(grace_s=10) == []
