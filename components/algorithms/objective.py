"""What the trainer minimises: one object per recipe, given to it as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .corrections import NO_CORRECTION, Correction
from .diagnostics import MAXIMA, SUMS, step_metrics, token_sums
from .policy_loss import aggregate, clipped_ratio_loss


class Tokens(Protocol):
    """S response tokens as an objective sees them; see `trainer.microbatch.Microbatch`."""

    @property
    def segments(self) -> torch.Tensor: ...
    @property
    def mask(self) -> torch.Tensor: ...
    @property
    def behavior_logprobs(self) -> torch.Tensor: ...
    @property
    def policy_versions(self) -> torch.Tensor: ...
    @property
    def advantages(self) -> torch.Tensor: ...
    @property
    def proximal_logprobs(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Loss:
    """`total` is this microbatch's share of the step's loss. `sums` and `maxima` add up over microbatches and ranks."""

    total: torch.Tensor
    sums: torch.Tensor
    maxima: torch.Tensor


class Objective(Protocol):
    """`needs_proximal`: whether `Tokens.proximal_logprobs` is read (see `corrections`)."""

    @property
    def needs_proximal(self) -> bool: ...
    @property
    def num_sums(self) -> int: ...
    @property
    def num_maxima(self) -> int: ...

    def loss(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        tokens: Tokens,
        *,
        policy_version: int,
        num_sequences: int,
        num_tokens: int,
    ) -> Loss: ...

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """The clipped ratio of GRPO: against the behaviour logprobs, or against the proximal ones with a correction."""

    clip_low: float
    clip_high: float
    aggregation: str
    correction: Correction = NO_CORRECTION
    num_sums: int = len(SUMS) + 1
    num_maxima: int = len(MAXIMA)

    @property
    def needs_proximal(self) -> bool:
        return self.correction.needs_proximal

    def loss(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        tokens: Tokens,
        *,
        policy_version: int,
        num_sequences: int,
        num_tokens: int,
    ) -> Loss:
        old = tokens.proximal_logprobs if self.needs_proximal else tokens.behavior_logprobs
        weights = self.correction.weights(old, tokens.behavior_logprobs, mask=tokens.mask, segments=tokens.segments)
        per_token = weights * clipped_ratio_loss(
            logprobs, old, tokens.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        total = aggregate(
            per_token,
            tokens.mask,
            tokens.segments,
            how=self.aggregation,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
        )
        with torch.no_grad():
            sums, maxima = token_sums(
                logprobs=logprobs,
                old_logprobs=old,
                behavior_logprobs=tokens.behavior_logprobs,
                weights=weights,
                entropy=entropy,
                lags=policy_version - tokens.policy_versions,
                advantages=tokens.advantages,
                mask=tokens.mask,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
            )
        return Loss(total, torch.cat([total.detach().double()[None], sums]), maxima)

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        return {"train/loss/policy": sums[0].item(), **step_metrics(sums[1:], maxima)}


@dataclass(frozen=True, kw_only=True)
class SupervisedObjective:
    """Cross-entropy of the response tokens: token-mean over the step."""

    num_sums: int = 3
    num_maxima: int = 0
    needs_proximal: bool = False

    def loss(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        tokens: Tokens,
        *,
        policy_version: int,
        num_sequences: int,
        num_tokens: int,
    ) -> Loss:
        total = aggregate(
            -logprobs,
            tokens.mask,
            tokens.segments,
            how="token_mean",
            num_sequences=num_sequences,
            num_tokens=num_tokens,
        )
        with torch.no_grad():
            count = tokens.mask.sum().double()
            sums = torch.stack([total.double(), (entropy * tokens.mask).sum().double(), count])
        return Loss(total, sums, torch.zeros(0, dtype=torch.float64, device=logprobs.device))

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        loss, entropy, count = sums.tolist()
        return {"train/loss/sft": loss, "train/entropy/mean": entropy / max(count, 1.0)}
