"""A reward that an untrained model earns in part, with answers long enough to live through several policy versions."""

from __future__ import annotations

from leeway import Completion, StepEnvironment, Task
from leeway.envs import Step


def digits(task: Task, text: str) -> float:
    """Share of the characters that are digits."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


class Talk(StepEnvironment):
    """Four long answers in turn, with a few words in between: conversations that live through several versions."""

    max_turns = 4
    max_tokens_per_turn = 90

    async def step(self, completion: Completion) -> Step:
        return " and now =", digits(Task(task_id="", prompt=""), completion.text) / self.max_turns, False, {}
