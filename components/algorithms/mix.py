"""Rollouts and expert data in one step: a policy loss on the rollouts, a supervised loss on the expert data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

from pydantic import Field, PositiveInt

from ..lazy import torch
from ..section import Section
from ..versions import NO_VERSION
from .objective import Loss, PolicyObjective
from .sequences import StepCounts, Tokens


class ExpertData(Section):
    """Expert answers that are mixed into every step: `(1 - mu) L_policy + mu L_expert`."""

    path: str = Field(description="jsonl of expert answers, with the keys of task")
    batch_size: PositiveInt = Field(default=64, description="number of expert answers in each optimizer step")
    weight: float = Field(default=0.1, ge=0.0, le=1.0, description="share mu of expert data in the loss")
    weight_end: float | None = Field(default=None, ge=0.0, le=1.0, description="mu after decay_steps; null: constant")
    decay_steps: PositiveInt = Field(default=100, description="optimizer steps over which mu decays, linearly")
    token_weights: bool = Field(
        default=False,
        description="weight each expert token by p (1 - p), small for what the policy already knows "
        "and for what it finds absurd",
    )

    def weight_at(self, policy_version: int) -> float:
        """`mu` at a policy version: from `weight` to `weight_end` in a straight line over `decay_steps` steps."""
        end = self.weight if self.weight_end is None else self.weight_end
        return self.weight + (end - self.weight) * min(1.0, policy_version / max(self.decay_steps, 1))


@dataclass(frozen=True, kw_only=True)
class MixedObjective(PolicyObjective):
    """`(1 - mu) L_policy + mu L_expert`, `L_expert` the mean over the step's expert tokens of `-w logp`.

    Expert tokens are those in the mask that no policy sampled (version NO_VERSION). Their `advantages` hold 1 / (their
    number in the whole step), so that parts add up; the step's counts are those of the rollouts alone. `w` is 1, or
    with `experts.token_weights` `sg(p (1 - p))`: tokens that the policy is sure of, or finds absurd, teach little.
    Source: CHORD, arXiv 2508.11408 (its phi is w).
    """

    experts: ExpertData
    takes_expert_tokens: bool = True
    num_sums: int = PolicyObjective.num_sums + 4

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens, **step: Unpack[StepCounts]) -> Loss:
        mu = self.experts.weight_at(step["policy_version"])
        sampled = tokens.policy_versions != NO_VERSION
        expert = tokens.mask & ~sampled
        policy = super().loss(logprobs, entropy, replace(tokens, mask=tokens.mask & sampled), **step)
        losses = -tokens.advantages * expert_token_weights(logprobs, on=self.experts.token_weights) * logprobs
        supervised = torch.where(expert, losses, 0.0).sum()
        with torch.no_grad():
            count = expert.sum().double()
            nll = torch.where(expert, -logprobs, 0.0).double().sum()
            # mu is the same everywhere: weighted by each part's tokens, it survives the summation.
            own = torch.stack([supervised.double(), nll, count, mu * count])
        return Loss((1 - mu) * policy.total + mu * supervised, torch.cat([own, policy.sums]), policy.maxima)

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        metrics = super().metrics(sums[4:], maxima)
        supervised, nll, count, weighed = sums[:4].tolist()
        if count:
            metrics |= {
                "train/loss/expert": supervised,
                "train/expert/nll": nll / count,
                "train/expert/tokens": count,
                "train/expert/weight": weighed / count,
            }
        return metrics


def expert_token_weights(logprobs: torch.Tensor, *, on: bool) -> torch.Tensor:
    """`p (1 - p)` of each token without gradient, or 1: [S] -> [S]."""
    p = logprobs.detach().exp()
    return p * (1 - p) if on else torch.ones_like(p)
