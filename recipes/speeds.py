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

_REPEATS = 3
# One group alone is quick where answers are short, and then differs by more than it takes: as often as there is time.
_ALONE_S, _MAX_REPEATS = 1.5, 12


async def measure_speeds(config: Config, parts: Parts, tasks: Sequence[Task], *, hand_over_s: float) -> Speeds:
    """Roll out as many groups as will ever be in flight; one group alone, and its first tokens; then a training step.

    Each is repeated, and the shortest time counts. Nothing of it is trained on: the optimizer's learning rate is 0 and
    its state is made anew.
    """
    count = min(derive(config).max_outstanding_groups, 2 * config.train.groups_per_step)
    chosen = [tasks[i % len(tasks)] for i in range(count)]
    generate_s_per_token, trajectories = float("inf"), []
    for _ in range(_REPEATS):
        seconds, trajectories = await _timed_rollouts(config, parts, chosen)
        response_tokens = sum(len(t.response_tokens) for t in trajectories)
        generate_s_per_token = min(generate_s_per_token, seconds / max(1, response_tokens))
    first_token_s, serial_s_per_token = await _alone(config, parts, chosen)
    wanted = config.train.groups_per_step * config.algorithm.group_size
    batch = (trajectories * -(-wanted // len(trajectories)))[:wanted]
    refs, metrics = await _wait(
        config, parts, parts.buffer.sample_batch.remote(batch, config.algorithm.group_size), "replay"
    )
    calls = [t.measure.remote(ref) for t, ref in zip(parts.trainers, refs, strict=True)]
    times = (await _wait(config, parts, together(calls), "trainer"))[0]
    return Speeds(
        generate_s_per_token=generate_s_per_token,
        train_s_per_token=times["forward_backward_s"] / max(1.0, metrics["train/tokens_in_pass"]),
        optim_s=times["optim_s"],
        first_token_s=first_token_s,
        serial_s_per_token=serial_s_per_token,
        hand_over_s=hand_over_s,
    )


async def _alone(config: Config, parts: Parts, tasks: Sequence[Task]) -> tuple[float, float]:
    """(seconds in the engine until a group that is alone has its first tokens, seconds for each further one)."""
    begun, first_token_s, wholes = time.monotonic(), float("inf"), []
    while len(wholes) < _REPEATS or (time.monotonic() - begun < _ALONE_S and len(wholes) < _MAX_REPEATS):
        task = [tasks[len(wholes) % len(tasks)]]
        first_s, _ = await _timed_rollouts(config, parts, task, max_response_tokens=1)
        first_token_s = min(first_token_s, first_s)
        whole_s, group = await _timed_rollouts(config, parts, task)
        wholes.append((whole_s, max(len(t.response_tokens) for t in group) - 1))
    per_token = [max(0.0, whole_s - first_token_s) / further for whole_s, further in wholes if further]
    return first_token_s, min(per_token, default=0.0)


async def _timed_rollouts(
    config: Config, parts: Parts, tasks: Sequence[Task], *, max_response_tokens: int | None = None
) -> tuple[float, list[Trajectory]]:
    """Seconds in which the busiest engine had a request: what environments think about meanwhile is not its work."""
    begun = await _generating_s(config, parts)
    calls = [
        c.rollouts.remote(list(share), config.rollout.temperature, config.algorithm.group_size, max_response_tokens)
        for i, c in enumerate(parts.collectors)
        if (share := tasks[i :: len(parts.collectors)])
    ]
    results = await _wait(config, parts, together(calls), "generators")
    seconds = [after - before for before, after in zip(begun, await _generating_s(config, parts), strict=True)]
    return max(seconds), [t for part in results for t in part]


async def _generating_s(config: Config, parts: Parts) -> list[float]:
    """Seconds so far in which each engine had a request."""
    return await _wait(config, parts, together([c.generating_s.remote() for c in parts.collectors]), "generators")


async def _wait(config: Config, parts: Parts, call: Any, what: str) -> Any:
    return await parts.supervisor.wait(call, what=what, timeout_s=config.cluster.step_timeout_s)
