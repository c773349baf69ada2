"""One prompt, one answer: the whole group is a single request, and a reward function scores each completion."""

from __future__ import annotations

import asyncio
import inspect
import math

from ..types import Completion, Task, Trajectory
from .base import Environment, Policy, all_or_none
from .rewards import AnyReward, exact_match, resolve_reward


class SingleTurn(Environment):
    """Samples G answers to the task's prompt and scores them.

    `reward` is a function (task, text) -> number, sync or async, or the name of one. A sync function that may take long
    says so with an attribute `blocking = True` (or a function of the task) and is then run in a thread.
    """

    def __init__(self, *, reward: AnyReward | str = "exact_match") -> None:
        self._reward = resolve_reward(reward) if isinstance(reward, str) else reward

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        """One request for `policy.group_size` completions; metrics: {"exact_match"} beside the reward."""
        prompt_tokens = policy.encode(task.prompt)
        completions = await policy.generate(prompt_tokens, n=policy.group_size)
        rewards = await all_or_none(self._score(task, completion) for completion in completions)
        return [
            Trajectory.from_completion(
                prompt_tokens, completion, reward=reward, metrics={"exact_match": exact_match(task, completion.text)}
            )
            for completion, reward in zip(completions, rewards, strict=True)
        ]

    async def _score(self, task: Task, completion: Completion) -> float:
        name = getattr(self._reward, "__name__", type(self._reward).__name__)
        try:
            if _is_blocking(self._reward, task):
                value = await asyncio.to_thread(self._reward, task, completion.text)
            else:
                value = self._reward(task, completion.text)
            if inspect.isawaitable(value):
                value = await value
            reward = float(value)
        except Exception as error:
            raise RuntimeError(
                f"reward {name} failed on task {task.task_id}: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(reward):
            raise RuntimeError(f"reward {name} gave {reward} on task {task.task_id}; expected a finite number")
        return reward


def _is_blocking(reward: AnyReward, task: Task) -> bool:
    blocking = getattr(reward, "blocking", False)
    return bool(blocking(task) if callable(blocking) else blocking)
