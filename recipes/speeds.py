"""Measure each side of a run with the other idle, so that contention cannot hide in the limit; at the start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from leeway.config import Config, derive
from leeway.runtime.launch import Parts
from leeway.runtime.limit import Speeds
from leeway.runtime.supervisor import together
from leeway.types import Task, Trajectory


async def measure_speeds(config: Config, parts: Parts, tasks: Sequence[Task], *, hand_over_s: float) -> Speeds:
    """Roll out as many groups as will ever be in flight; one group alone; then one training step.

    The groups in flight are rolled out twice and the shorter time counts. Nothing of it is trained on: the optimizer's
    learning rate is 0 and its state is made anew.
    """
    count = min(derive(config).max_outstanding_groups, 2 * config.train.groups_per_step)
    chosen = [tasks[i % len(tasks)] for i in range(count)]
    generate_s, trajectories = float("inf"), []
    for _ in range(2):
        seconds, trajectories = await _timed_rollouts(config, parts, chosen)
        generate_s = min(generate_s, seconds)
    response_tokens = sum(len(t.response_tokens) for t in trajectories)
    alone_s, alone = await _timed_rollouts(config, parts, chosen[:1])
    wanted = config.train.groups_per_step * config.algorithm.group_size
    batch = (trajectories * -(-wanted // len(trajectories)))[:wanted]
    refs, metrics = await _wait(
        config, parts, parts.buffer.sample_batch.remote(batch, config.algorithm.group_size), "replay"
    )
    calls = [t.measure.remote(ref) for t, ref in zip(parts.trainers, refs, strict=True)]
    times = (await _wait(config, parts, together(calls), "trainer"))[0]
    return Speeds(
        generate_s_per_token=generate_s / max(1, response_tokens),
        train_s_per_token=times["forward_backward_s"] / max(1.0, metrics["train/tokens_in_pass"]),
        optim_s=times["optim_s"],
        serial_s_per_token=alone_s / max(len(t.response_tokens) for t in alone),
        hand_over_s=hand_over_s,
    )


async def _timed_rollouts(config: Config, parts: Parts, tasks: Sequence[Task]) -> tuple[float, list[Trajectory]]:
    started = time.monotonic()
    calls = [
        c.rollouts.remote(list(share), config.rollout.temperature, config.algorithm.group_size)
        for i, c in enumerate(parts.collectors)
        if (share := tasks[i :: len(parts.collectors)])
    ]
    results = await _wait(config, parts, together(calls), "generators")
    return time.monotonic() - started, [t for part in results for t in part]


async def _wait(config: Config, parts: Parts, call: Any, what: str) -> Any:
    return await parts.supervisor.wait(call, what=what, timeout_s=config.cluster.step_timeout_s)
