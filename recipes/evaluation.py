"""Held-out evaluation over all collectors, on one stated policy version."""

from __future__ import annotations

from collections.abc import Sequence

from leeway.config import Config
from leeway.runtime.launch import Parts
from leeway.runtime.supervisor import together
from leeway.types import Task, Trajectory


async def evaluate(
    config: Config, parts: Parts, tasks: Sequence[Task], *, name: str, policy_version: int
) -> tuple[dict[str, float], list[Trajectory]]:
    """(`eval/<name>/...`, one trajectory per task).

    Tasks are dealt to the collectors; the result does not depend on how many.
    """
    calls = [
        c.evaluate.remote(list(tasks[i :: len(parts.collectors)]), config.eval.temperature, policy_version)
        for i, c in enumerate(parts.collectors)
    ]
    results = await parts.supervisor.wait(together(calls), what="evaluation", timeout_s=config.cluster.step_timeout_s)
    trajectories = [t for part in results for t in part]
    return summarise(trajectories, name=name, policy_version=policy_version), trajectories


def summarise(trajectories: Sequence[Trajectory], *, name: str, policy_version: int) -> dict[str, float]:
    num = len(trajectories)
    metrics = {
        f"eval/{name}/reward": sum(t.reward for t in trajectories) / num,
        f"eval/{name}/num_tasks": float(num),
        f"eval/{name}/policy_version": float(policy_version),
        f"eval/{name}/response_tokens_mean": sum(len(t.response_tokens) for t in trajectories) / num,
    }
    for metric in sorted({m for t in trajectories for m in t.metrics}):
        values = [t.metrics[metric] for t in trajectories if metric in t.metrics]
        metrics[f"eval/{name}/{metric}"] = sum(values) / len(values)
    return metrics
