"""How answers are sampled for training: the run's own way, and that of each taskset of `task.mix`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..types import Task
from .algorithm import AlgorithmConfig
from .flow import RolloutConfig
from .inputs import TaskConfig


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Of one taskset: completions per task, and how they are drawn; see `rollout`. `top_k` 0: from all tokens."""

    group_size: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0

    @property
    def masks(self) -> tuple[str, ...]:
        """The `sampling_masks` that its answers bring along. What was barred is not among what was kept."""
        return ("kept_tokens",) if self.top_k else ("barred_tokens",) if self.min_tokens else ()


def kept_width(top_k: int) -> int:
    """Of how many tokens the ids are kept for each token. More than top_k: tokens of equal logits, of which bfloat16
    has many, are left or cut together.
    """
    return 2 * top_k + 32 if top_k else 0


@dataclass(frozen=True, kw_only=True)
class Samplings:
    """`default`: of every task that is not of `by_taskset`. `shares`: of the tasks, by taskset; {} without a mix."""

    default: Sampling
    by_taskset: Mapping[str, Sampling]
    shares: Mapping[str, float]

    def of(self, task: Task) -> Sampling:
        return self.by_taskset.get(str(task.info.get("taskset")), self.default)

    @property
    def group_sizes(self) -> list[int]:
        """All that groups of this run may have."""
        return sorted({own.group_size for own in self.by_taskset.values()} or {self.default.group_size})

    @property
    def mean_group_size(self) -> float:
        """Over many tasks, each taskset by its share."""
        if not self.shares:
            return float(self.default.group_size)
        return sum(share * self.by_taskset[name].group_size for name, share in self.shares.items())


def samplings(rollout: RolloutConfig, algorithm: AlgorithmConfig, task: TaskConfig) -> Samplings:
    default = Sampling(
        group_size=algorithm.group_size,
        temperature=rollout.temperature,
        top_k=rollout.top_k or 0,
        top_p=rollout.top_p,
        min_tokens=rollout.min_response_tokens,
    )
    mixed = task.mix if task.name == "mix" else {}
    total = sum(own.weight for own in mixed.values())
    return Samplings(
        default=default,
        by_taskset={
            name: replace(
                default,
                group_size=own.group_size or default.group_size,
                temperature=own.temperature or default.temperature,
            )
            for name, own in mixed.items()
        },
        shares={name: own.weight / total for name, own in mixed.items()},
    )
