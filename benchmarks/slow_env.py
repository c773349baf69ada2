"""An environment that takes its time: the built-in single turn, and then a wait that costs no processor.

It stands for tools, compilers and judges, whose latency a plan has to know: env.name=slow_env:SlowSingleTurn,
env.options={delay_s: 0.5, sigma: 0.5}, found when `leeway run` is started in this folder.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import random

from leeway import Environment, Policy, Task, Trajectory
from leeway.envs.single_turn import SingleTurn


class SlowSingleTurn(Environment):
    """Each group waits for a lognormal time of mean `delay_s` seconds; the same task always waits as long.

    `sigma`: standard deviation of the time's logarithm. `cap`: no wait is longer than so many times the mean. The wait
    is in each trajectory's metrics as `waited_s`.
    """

    def __init__(
        self, *, delay_s: float, sigma: float = 0.0, cap: float = math.inf, reward: str = "exact_match"
    ) -> None:
        self._inner = SingleTurn(reward=reward)
        self._delay_s = delay_s
        self._sigma = sigma
        self._cap = cap

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        trajectories = await self._inner.rollout(task, policy)
        rng = random.Random(hashlib.sha256(task.task_id.encode()).digest())
        factor = math.exp(rng.gauss(0.0, self._sigma) - self._sigma**2 / 2)
        wait_s = self._delay_s * min(self._cap, factor)
        await asyncio.sleep(wait_s)
        return [dataclasses.replace(t, metrics=t.metrics | {"waited_s": wait_s}) for t in trajectories]
