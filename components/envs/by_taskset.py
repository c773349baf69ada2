"""Several environments in one run: each task goes to the environment of its taskset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..types import Task, Trajectory
from .base import Environment, Policy


class ByTaskSet(Environment):
    """`task.info["taskset"]` chooses; tasks of other tasksets go to `default`.

    Adds the metrics "tasksets/<name>/reward" and, where there is one, "tasksets/<name>/exact_match".
    """

    def __init__(self, default: Environment, environments: Mapping[str, Environment]) -> None:
        super().__init__()
        self._default = default
        self._environments = dict(environments)

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        name = task.info.get("taskset", "default")
        trajectories = await self._environments.get(name, self._default).rollout(task, policy)
        return [replace(t, metrics={**t.metrics, **_apart(t, name)}) for t in trajectories]


def _apart(trajectory: Trajectory, name: str) -> dict[str, float]:
    metrics = {f"tasksets/{name}/reward": trajectory.reward}
    if "exact_match" in trajectory.metrics:
        metrics[f"tasksets/{name}/exact_match"] = trajectory.metrics["exact_match"]
    return metrics
