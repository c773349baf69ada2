"""An environment that takes its time: the built-in single turn, and then a wait that costs no processor.

It stands for tools, compilers and judges, whose latency a plan has to know: env.name=slow_env:SlowSingleTurn,
env.options={delay_s: 0.5, sigma: 0.5}, found when `leeway run` is started in this folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random

from leeway import Environment, Policy, Task, Trajectory
from leeway.envs.single_turn import SingleTurn


class SlowSingleTurn(Environment):
    """Each group waits for a lognormal time of mean `delay_s` seconds; the same task always waits as long.

    `sigma`: standard deviation of the time's logarithm.
    """

    def __init__(self, *, delay_s: float, sigma: float = 0.0, reward: str = "exact_match") -> None:
        self._inner = SingleTurn(reward=reward)
        self._delay_s = delay_s
        self._sigma = sigma

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        trajectories = await self._inner.rollout(task, policy)
        rng = random.Random(hashlib.sha256(task.task_id.encode()).digest())
        await asyncio.sleep(self._delay_s * math.exp(rng.gauss(0.0, self._sigma) - self._sigma**2 / 2))
        return trajectories
