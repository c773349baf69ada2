"""A model beside the policy, served by the run itself, asked by a reward from a folder of plug-ins.

It is the policy before its first step: greedily, both say the same, whichever engines they have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import ANY_ENGINE, CLIENT, ENGINE, command_line

REWARD = """
from helper_beside import WORDS
async def agrees(task, text, *, models):
    said = await models["second"].complete(str(task.prompt), max_tokens=1)
    for name in ("second", "third", "third"):
        assert await models[name].complete(str(task.prompt), max_tokens=1) == said, "greedy"
    return float(said.strip() == text.strip()) + 0 * len(WORDS)
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.long("the other engine"))])
def test_a_reward_asks_a_model_that_the_run_serves_and_nothing_is_left_of_it_when_the_driver_is_killed(
    start: Any, from_untrained: list[str], of_sums: list[str], untrained: Path, tmp_path: Path, engine: str
) -> None:
    own = "{name: hf}" if engine == "hf" else "{enforce_eager: true}"
    plugins = tmp_path / "elsewhere"
    plugins.mkdir()
    (plugins / "asks_another.py").write_text(REWARD)
    (plugins / "helper_beside.py").write_text("WORDS = ()\n")
    command = start(
        "async_rl",
        *from_untrained,
        *of_sums,
        ANY_ENGINE,
        f"plugins=[{plugins}]",
        "env.rewards={exact_match: 0, 'asks_another:agrees': 1}",
        f"env.models={{second: {{path: {untrained}, max_model_len: 64, engine: {own}}},"
        f" third: {{path: {untrained}, max_model_len: 64, num_engines: 2, engine: {{name: hf}}}}}}",
        "stages.async_rl.train.groups_per_step=16",
        "rollout.max_response_tokens=1",  # or a model that knows nothing never says the same twice
        "rollout.temperature=0.5",
        "eval.num_tasks=32",
    )
    rows = command.wait_for_steps(2, timeout_s=600)
    names = [command_line(process) for process in command.processes()]
    assert sum("AuxiliaryActor" in name for name in names) == 3, names
    # An engine has vLLM's title, or the command line of its start if none could be set (see test_endings.py).
    vllms = sum(any(word in name for word in ENGINE) and not CLIENT.match(name) for name in names)
    assert vllms == (engine == "vllm"), names
    # The policy before its first step is the second model: greedily, both say the same.
    assert [r["eval/held_out/rewards/agrees"] for r in rows if "eval/held_out/rewards/agrees" in r] == [1.0]
    assert 0 < next(r["train/rewards/agrees"] for r in rows if "train/rewards/agrees" in r) < 1

    # Nobody is there to clean up: every process has to notice by itself.
    command.process.kill()
    command.process.wait(120)
    assert command.left_over(grace_s=120) == []
