"""Rollouts and auxiliary buffers in one step: a policy loss on rollouts, a loss of its own on each buffer's samples.

A buffer has expert answers (supervised loss) or experiences that were stored (the policy loss, with the logprobs and
rewards that they have). `(1 - sum of mu) L_policy + sum over buffers of mu L_buffer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Unpack

from pydantic import Field, NonNegativeInt, PositiveInt

from ..lazy import torch
from ..section import Section
from ..versions import buffer_version
from .objective import Loss, PolicyObjective
from .sequences import StepCounts, Tokens

if TYPE_CHECKING:
    from ..types import TrainBatch

OWN_SUMS = ("loss", "nll", "kl", "tokens", "weighed")


class MixedIn(Section):
    """How the samples of a buffer take part in the loss."""

    kind: Literal["answers", "experiences"] = Field(
        default="answers",
        description="answers: a supervised loss on the answers of rows; experiences: the policy loss on groups with "
        "rewards, of rows or of a run that kept them (name=store)",
    )
    weight: float = Field(default=0.1, ge=0.0, le=1.0, description="its share mu of the loss; at 0 nothing is drawn")
    warmup_steps: NonNegativeInt = Field(
        default=0, description="optimizer steps over which mu first rises from 0 to weight, linearly"
    )
    weight_end: float | None = Field(default=None, ge=0.0, le=1.0, description="mu after decay_steps; null: constant")
    decay_steps: PositiveInt = Field(default=100, description="optimizer steps over which mu then decays, linearly")
    token_weights: bool = Field(
        default=False,
        description="answers: weight each token by p (1 - p), small for what the policy already knows "
        "and for what it finds absurd",
    )

    def weight_at(self, policy_version: int) -> float:
        """`mu` at a policy version: from 0 to `weight` in a straight line over `warmup_steps` steps, and from there to
        `weight_end` over `decay_steps`.
        """
        if policy_version < self.warmup_steps:
            return self.weight * policy_version / self.warmup_steps
        end = self.weight if self.weight_end is None else self.weight_end
        return self.weight + (end - self.weight) * min(1.0, (policy_version - self.warmup_steps) / self.decay_steps)


@dataclass(frozen=True, kw_only=True)
class MixedObjective(PolicyObjective):
    """`(1 - sum mu_k) L_policy + sum mu_k L_k` over the buffers that have samples in the step.

    The tokens of buffer k have version `buffer_version(k)`, and `buffer_counts[k]` counts its (sequences, tokens) in
    the whole step, so that parts add up; the step's own counts are those of the rollouts alone. `L_k` of answers is the
    mean over their tokens of `-w logp`, w = 1, or with `token_weights` `sg(p (1 - p))`; of experiences it is the policy
    loss, aggregated over them alone. Source of the mixture, and of w: CHORD, arXiv 2508.11408 (its phi is w).
    """

    buffers: Mapping[str, MixedIn]

    @property
    def num_buffers(self) -> int:
        return len(self.buffers)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_sums", PolicyObjective.num_sums + len(OWN_SUMS) * len(self.buffers))

    def policy_tokens(self, batch: TrainBatch) -> torch.Tensor:
        return batch.loss_mask & (batch.policy_versions >= 0)

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens, **step: Unpack[StepCounts]) -> Loss:
        version, counts = step["policy_version"], step.get("buffer_counts", [])
        policy = super().loss(
            logprobs, entropy, replace(tokens, mask=tokens.mask & (tokens.policy_versions >= 0)), **step
        )
        total, rest, sums = torch.zeros_like(policy.total), 1.0, []
        for index, (buffer, (num_sequences, num_tokens)) in enumerate(zip(self.buffers.values(), counts, strict=False)):
            mu = buffer.weight_at(version) if num_tokens else 0.0
            own = replace(tokens, mask=tokens.mask & (tokens.policy_versions == buffer_version(index)))
            if buffer.kind == "answers":
                weights = token_weights(logprobs, on=buffer.token_weights)
                loss = torch.where(own.mask, -weights * logprobs, 0.0).sum() / max(num_tokens, 1)
            else:
                its = StepCounts(
                    policy_version=version, num_sequences=max(num_sequences, 1), num_tokens=max(num_tokens, 1)
                )
                loss = super().loss(logprobs, entropy, own, **its).total
            total, rest = total + mu * loss, rest - mu
            sums.append(self._sums(buffer, logprobs, own, loss, mu))
        missing = len(OWN_SUMS) * (len(self.buffers) - len(sums))
        none = torch.zeros(missing, dtype=policy.sums.dtype, device=policy.sums.device)
        return Loss(rest * policy.total + total, torch.cat([*sums, none, policy.sums]), policy.maxima)

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        size = len(OWN_SUMS)
        metrics = super().metrics(sums[size * len(self.buffers) :], maxima)
        for index, (name, buffer) in enumerate(self.buffers.items()):
            own = dict(zip(OWN_SUMS, sums[size * index : size * (index + 1)].tolist(), strict=True))
            if count := own["tokens"]:
                metrics |= {
                    f"train/buffers/{name}/loss": own["loss"],
                    f"train/buffers/{name}/nll": own["nll"] / count,
                    f"train/buffers/{name}/tokens": count,
                    f"train/buffers/{name}/weight": own["weighed"] / count,
                }
                if buffer.kind == "experiences":
                    metrics[f"train/buffers/{name}/kl"] = own["kl"] / count
        return metrics

    def _sums(
        self, buffer: MixedIn, logprobs: torch.Tensor, own: Tokens, loss: torch.Tensor, mu: float
    ) -> torch.Tensor:
        """Of `OWN_SUMS`. mu is the same everywhere: weighted by each part's tokens, it survives the summation."""
        with torch.no_grad():
            count = own.mask.sum().double()
            d = torch.where(own.mask, logprobs - own.behavior_logprobs, 0.0).double()
            nll = torch.where(own.mask, -logprobs, 0.0).double().sum()
            return torch.stack([loss.detach().double(), nll, (d.exp() - 1 - d).sum(), count, mu * count])


def token_weights(logprobs: torch.Tensor, *, on: bool) -> torch.Tensor:
    """`p (1 - p)` of each token without gradient, or 1: [S] -> [S]."""
    p = logprobs.detach().exp()
    return p * (1 - p) if on else torch.ones_like(p)
