"""A user's own environment, and real text from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

GSM8K = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/train.jsonl"

MY_ENV = '''
from helper_of_mine import bonus
from leeway import Environment, Task, Trajectory

class ShortAnswers(Environment):
    """Pays for short answers; asks in a way of its own."""
    async def rollout(self, task: Task, policy) -> list[Trajectory]:
        prompt = policy.encode(task.prompt)
        completions = await policy.generate(prompt)
        return [Trajectory.from_completion(prompt, c, reward=bonus(len(c.tokens)),
                                           metrics={"short": float(len(c.tokens) < 4)}) for c in completions]
'''


@pytest.mark.timeout(300)
def test_an_environment_of_the_users_own(start: Any, from_warm: list[str], tmp_path: Path) -> None:
    (tmp_path / "envs_of_mine.py").write_text(MY_ENV)
    (tmp_path / "helper_of_mine.py").write_text("def bonus(n):\n    return 1.0 / n\n")
    run = start(
        "async_rl",
        *from_warm,
        "env.name=envs_of_mine:ShortAnswers",
        "stages.async_rl.train.steps=4",
        "eval.at_start=false",
        "eval.at_end=false",
    ).wait(240)
    assert run.code == 0, run.output
    assert len(run.series("train/accuracy/short")) == 4
    lengths, rewards = run.series("train/response_tokens/mean"), run.series("train/reward/mean")
    assert all(1 / 8 <= r <= 1.0 for r in rewards)
    assert all(r >= 1 / n - 1e-6 for r, n in zip(rewards, lengths, strict=True)), "mean of 1/n is at least 1/mean"


@pytest.mark.timeout(300)
@pytest.mark.skipif(not GSM8K.exists(), reason=f"real data is not at hand: {GSM8K}")
def test_gsm8k_rows_with_math_verify(start: Any) -> None:
    run = start(
        "async_rl",
        "task.name=jsonl",
        "task.dataset=null",
        "task.options={}",
        f"task.path={GSM8K}",
        "task.answer_after='####'",
        "task.limit=200",
        "env.reward=math_verify",
        "model.init.options.max_position_embeddings=512",
        "rollout.max_prompt_tokens=320",
        "rollout.max_response_tokens=32",
        "rollout.max_model_len=512",
        "stages.sft.train.steps=3",
        "stages.sft.train.batch_size=8",
        "stages.async_rl.train.steps=2",
        "stages.async_rl.train.groups_per_step=4",
        "eval.num_tasks=8",
    ).wait(240)
    assert run.code == 0, run.output
    assert run.summary["steps"] == 2
    assert run.series("train/sequences") == [32.0, 32.0]
    assert run.summary["served_gap_max"] <= 1e-4
