"""Parts of a run that take their time, for `planted.py`: each waits, so a busy machine plants nothing by itself."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from typing import Any

import numpy as np
import torch

from leeway import Environment, LossInputs, Policy, PolicyLoss, Task, Trajectory
from leeway.engines.hf_engine import HfEngine
from leeway.transports.object_store import ObjectStore

ENGINE_S, TRAINER_S, BUCKET_S = 0.8, 0.8, 1.5


class Parity(Environment):
    """Half of the answers are right, whatever they say. A group waits `delay_s` on average, lognormal with `sigma`."""

    def __init__(self, *, delay_s: float = 0.0, sigma: float = 0.0) -> None:
        self._delay_s, self._sigma = delay_s, sigma

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        prompt = policy.encode(task.prompt)
        completions = await policy.generate(prompt)
        if self._delay_s:
            rng = random.Random(hashlib.sha256(task.task_id.encode()).digest())
            await asyncio.sleep(self._delay_s * min(8.0, math.exp(rng.gauss(0.0, self._sigma) - self._sigma**2 / 2)))
        return [Trajectory.from_completion(prompt, c, reward=float(i % 2)) for i, c in enumerate(completions)]


class SlowEngine(HfEngine):
    """Every request takes `ENGINE_S` longer, one after the other."""

    async def generate(self, prompt_tokens: Any, **options: Any) -> Any:
        if not hasattr(self, "_one"):
            self._one = asyncio.Semaphore(4)
        async with self._one:
            await asyncio.sleep(ENGINE_S)
            return await super().generate(prompt_tokens, **options)


class SlowLoss(PolicyLoss):
    """Plain policy gradient; each pass takes `TRAINER_S` longer."""

    def __call__(self, x: LossInputs) -> torch.Tensor:
        time.sleep(TRAINER_S)
        return -x.advantages * x.logprobs


class SlowTransport(ObjectStore):
    """Each bucket takes `BUCKET_S` to be sent."""

    def begin(self, policy_version: int) -> Any:
        outgoing = super().begin(policy_version)
        put = outgoing.put

        def slow_put(bucket: np.ndarray) -> None:
            time.sleep(BUCKET_S)
            put(bucket)

        outgoing.put = slow_put
        return outgoing
