"""What our side of `peers.py` runs with: the reward and the environment of its workloads."""

from __future__ import annotations

import asyncio

from leeway import Completion, StepEnvironment, Task
from leeway.envs import Step

REPLY = " and now ="
TURNS, TOKENS_PER_TURN, ENVIRONMENT_S = 3, 24, 0.5


def digits(task: Task, text: str) -> float:
    """Share of the characters that are digits."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


class Talk(StepEnvironment):
    """Answers in turn; the environment takes its time for each, as a tool or a judge would."""

    max_turns = TURNS
    max_tokens_per_turn = TOKENS_PER_TURN

    async def step(self, completion: Completion) -> Step:
        await asyncio.sleep(ENVIRONMENT_S)
        return REPLY, digits(Task(task_id="", prompt=""), completion.text) / TURNS, False, {}
