"""Evaluation over all collectors, on one stated policy version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leeway.config import Config
from leeway.config.evalsets import ks
from leeway.config.inputs import EvalSampling
from leeway.recipes.eval_metrics import at_k
from leeway.runtime.launch import Parts
from leeway.runtime.supervisor import together
from leeway.tasks.evalsets import EvalSet
from leeway.types import Trajectory


async def evaluate(
    config: Config, parts: Parts, evalsets: Sequence[EvalSet], *, policy_version: int
) -> tuple[dict[str, float], list[Trajectory]]:
    """(`eval/<name>/...`, the trajectories), one taskset after the other.

    Tasks are dealt to the collectors; the result does not depend on how many there are.
    """
    metrics: dict[str, float] = {}
    trajectories: list[Trajectory] = []
    for evalset in evalsets:
        num = len(parts.collectors)
        calls = [
            c.evaluate.remote(list(evalset.tasks[i::num]), evalset.sampling, policy_version)
            for i, c in enumerate(parts.collectors)
            if evalset.tasks[i::num]
        ]
        shares = await parts.supervisor.wait(
            together(calls), what=f"evaluation on {evalset.name}", timeout_s=config.cluster.step_timeout_s
        )
        groups = [shares[i % num][i // num] for i in range(len(evalset.tasks))]
        metrics |= summarise(groups, evalset.sampling, name=evalset.name, policy_version=policy_version)
        trajectories += [t for group in groups for t in group]
    return metrics, trajectories


def evaluated_at_start(rows: Sequence[Mapping[str, Any]], evalsets: Sequence[EvalSet]) -> dict[str, Any]:
    """What the first evaluation in `rows` of a metrics.jsonl said, as `by_set` says it; {} where there is none."""
    first = next((row for row in rows if row["role"] == "evaluation"), {})
    return by_set({name: value for name, value in first.items() if name.startswith("eval/")}, evalsets) if first else {}


def by_set(metrics: dict[str, float], evalsets: Sequence[EvalSet]) -> dict[str, Any]:
    """The numbers of the first taskset (the held-out tasks); those of others stand under "tasksets", by name."""
    first, *others = [of_set(metrics, e.name) for e in evalsets]
    named = {e.name: own for e, own in zip(evalsets[1:], others, strict=True)}
    return {**first, "tasksets": named} if named else dict(first)


def of_set(metrics: dict[str, float], name: str) -> dict[str, float]:
    """The metrics of one taskset, by their bare names."""
    prefix = f"eval/{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def summarise(
    groups: Sequence[Sequence[Trajectory]], sampling: EvalSampling, *, name: str, policy_version: int
) -> dict[str, float]:
    """`groups`: the trajectories of each task; none where it failed for good, which counts in `failed_tasks` only."""
    answered = [group for group in groups if group]
    trajectories = [t for group in answered for t in group]
    num = len(trajectories)
    metrics = {
        "reward": sum(t.reward for t in trajectories) / num,
        "num_tasks": float(len(answered)),
        "failed_tasks": float(len(groups) - len(answered)),
        "policy_version": float(policy_version),
        "response_tokens_mean": sum(len(t.response_tokens) for t in trajectories) / num,
    }
    for metric in sorted({m for t in trajectories for m in t.metrics}):
        values = [t.metrics[metric] for t in trajectories if metric in t.metrics]
        metrics[metric] = sum(values) / len(values)
    if sampling.samples > 1:
        rewards = [[t.reward for t in group] for group in answered]
        right = [[_is_right(t, sampling.solved) for t in group] for group in answered]
        metrics |= at_k(rewards, right, ks(sampling))
    return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}


def _is_right(trajectory: Trajectory, solved: float) -> bool:
    return trajectory.metrics.get("exact_match", float(trajectory.reward >= solved)) == 1.0
