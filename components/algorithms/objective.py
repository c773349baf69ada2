"""What the trainer minimises: one object per recipe, passed to the trainer as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from ..versions import NO_VERSION
from .aggregation import aggregate
from .corrections import (
    NO_CORRECTION,
    Correction,
    interpolated_proximal,
    second_moment_limit,
    sequence_mask,
    squares_in_question,
)
from .diagnostics import MAXIMA, SUMS, step_metrics, token_sums
from .kl import adapted_coefficient, kl_estimate, penalties_to_go
from .pieces import CLIP, PolicyLoss
from .policy_loss import ratio_of, sequence_ratio_of


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
    @property
    def reference_logprobs(self) -> torch.Tensor: ...


class ScoredTokens(Protocol):
    """Response tokens of a rank's whole share of a step; see `types.TrainBatch`."""

    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def behavior_logprobs(self) -> torch.Tensor: ...
    @property
    def advantages(self) -> torch.Tensor: ...
    @property
    def policy_versions(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Loss:
    """`total` is this microbatch's share of the step's loss. `sums` and `maxima` add up over microbatches and ranks."""

    total: torch.Tensor
    sums: torch.Tensor
    maxima: torch.Tensor


class Objective:
    """What the trainer minimises. Flags say what it needs from the trainer in addition to `loss` and `metrics`:

    - `needs_proximal`: `Tokens.proximal_logprobs` (see `corrections`).
    - `needs_reference`: `Tokens.reference_logprobs`, of a frozen copy of the weights that training started from.
    - `needs_entropy_gradient`: an `entropy` that carries a gradient.
    - `needs_step_values`: each step starts by passing `step_values` of every rank to `for_step`.
    - `takes_expert_tokens`: tokens that no policy sampled (version NO_VERSION) may be trained on together with others.
    - `sequences_per_unit`: this many neighbouring sequences of a batch stay in one microbatch, in order.

    `sums` and `maxima` of a `Loss` have `num_sums` and `num_maxima` entries.
    """

    num_sums: int
    num_maxima: int
    needs_proximal: bool = False
    needs_reference: bool = False
    needs_entropy_gradient: bool = False
    needs_step_values: bool = False
    takes_expert_tokens: bool = False
    sequences_per_unit: int = 1

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
        raise NotImplementedError

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        raise NotImplementedError

    def step_values(self, batch: ScoredTokens, proximal_logprobs: torch.Tensor) -> torch.Tensor:
        """Numbers [K] of one rank's share of a step; see `needs_step_values`."""
        raise NotImplementedError

    def for_step(self, values: torch.Tensor) -> Self:
        """This objective, given the step's values of all ranks."""
        return self

    def after_step(self, metrics: dict[str, float]) -> Self:
        """The objective of the next step, given what `metrics` said of this one."""
        return self

    def state_dict(self) -> dict[str, float]:
        """The state that `after_step` has changed, for resuming, as JSON-able data."""
        return {}

    def with_state(self, state: dict[str, float]) -> Self:
        """This objective in the state that `state_dict()` returned."""
        return self


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """`coefficient` times the KL estimate from the reference policy (see `kl`), at `where`:

    - `loss`: added to the loss and differentiated.
    - `reward`: each token's penalty is subtracted from the return of that token and of earlier ones, without gradient,
      after advantages were computed.
    - `token`: subtracted from that token's advantage alone. With k1 and no other reward this is on-policy
      distillation: the advantage is `log p_teacher - log p_student`. Source: arXiv 2306.13649. `jsd` (with `jsd_beta`)
      is allowed only here.

    `target`: the mean KL per token towards which the coefficient moves from step to step; None leaves it.
    """

    coefficient: float = 0.0
    estimator: str = "k3"
    where: str = "loss"
    target: float | None = None
    jsd_beta: float = 0.5


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective):
    """A policy loss, weighted by a correction and aggregated, plus a KL penalty and an entropy bonus.

    `aggregation_length` is the length that `fixed_length` divides by.
    """

    clip_low: float
    clip_high: float
    aggregation: str
    policy_loss: PolicyLoss = CLIP
    dual_clip: float | None = None
    aggregation_length: int | None = None
    correction: Correction = NO_CORRECTION
    kl: KLPenalty = KLPenalty()
    entropy_coefficient: float = 0.0
    num_sums: int = len(SUMS) + 2
    num_maxima: int = len(MAXIMA)

    @property
    def needs_proximal(self) -> bool:
        return self.correction.needs_proximal

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient != 0

    @property
    def needs_step_values(self) -> bool:
        return self.correction.kind == "m2po"

    def step_values(self, batch: ScoredTokens, proximal_logprobs: torch.Tensor) -> torch.Tensor:
        sampled = batch.loss_mask & (batch.policy_versions != NO_VERSION)
        return squares_in_question(proximal_logprobs, batch.behavior_logprobs, batch.advantages, sampled)

    def for_step(self, values: torch.Tensor) -> Self:
        limit = second_moment_limit(values, bound=self.correction.second_moment)
        return replace(self, correction=replace(self.correction, second_moment_limit=limit))

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
        lags = policy_version - tokens.policy_versions
        old = self._old_logprobs(logprobs, tokens, lags)
        advantages, kl = self._penalised(logprobs, tokens)
        weights = self._weights(logprobs, old, advantages, tokens)
        per_token = weights * self.policy_loss(
            logprobs,
            old,
            advantages,
            mask=tokens.mask,
            segments=tokens.segments,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

        def step_share(values: torch.Tensor) -> torch.Tensor:
            return aggregate(
                values,
                tokens.mask,
                tokens.segments,
                how=self.aggregation,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                length=self.aggregation_length,
            )

        policy = total = step_share(per_token)
        if self.kl.coefficient and self.kl.where == "loss":
            total = total + self.kl.coefficient * step_share(kl)
        if self.needs_entropy_gradient:
            total = total - self.entropy_coefficient * step_share(entropy)
        with torch.no_grad():
            sums, maxima = token_sums(
                logprobs=logprobs,
                clipped_ratio=self._clipped_ratio(logprobs, old, tokens),
                clips=self.policy_loss.clips,
                behavior_logprobs=tokens.behavior_logprobs,
                weights=weights,
                entropy=entropy,
                lags=lags,
                advantages=advantages,
                mask=tokens.mask,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
            )
            own = torch.stack([policy.detach().double(), kl.detach()[tokens.mask].double().sum()])
        return Loss(total, torch.cat([own, sums]), maxima)

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        policy, kl = sums[:2].tolist()
        metrics = {"train/loss/policy": policy, **step_metrics(sums[2:], maxima)}
        num_tokens = sums[2 + SUMS.index("tokens")].item()
        if self.needs_reference and num_tokens:
            metrics |= {
                "train/reference_kl/mean": kl / num_tokens,
                "train/reference_kl/coefficient": self.kl.coefficient,
            }
        return metrics

    def after_step(self, metrics: dict[str, float]) -> Self:
        kl = metrics.get("train/reference_kl/mean")
        if self.kl.target is None or kl is None or not math.isfinite(kl):
            return self
        coefficient = adapted_coefficient(self.kl.coefficient, kl, target=self.kl.target)
        return replace(self, kl=replace(self.kl, coefficient=coefficient))

    def state_dict(self) -> dict[str, float]:
        return {} if self.kl.target is None else {"kl_coefficient": self.kl.coefficient}

    def with_state(self, state: dict[str, float]) -> Self:
        return replace(self, kl=replace(self.kl, coefficient=state.get("kl_coefficient", self.kl.coefficient)))

    def _old_logprobs(self, logprobs: torch.Tensor, tokens: Tokens, lags: torch.Tensor) -> torch.Tensor:
        if self.correction.kind == "none":
            return tokens.behavior_logprobs
        if self.correction.interpolate:
            return interpolated_proximal(logprobs, tokens.behavior_logprobs, lags)
        return tokens.proximal_logprobs

    def _penalised(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """(advantages, KL estimates [S]): a penalty in the reward is already subtracted from the advantages."""
        if not self.needs_reference:
            return tokens.advantages, torch.zeros_like(logprobs)
        behavior, reference = tokens.behavior_logprobs, tokens.reference_logprobs
        if self.kl.where == "loss":
            return tokens.advantages, kl_estimate(self.kl.estimator, logprobs, reference, behavior)
        # A reward is a property of the sample: it compares the policy that sampled it with the reference.
        kl = kl_estimate(self.kl.estimator, behavior, reference, behavior, jsd_beta=self.kl.jsd_beta)
        penalty = penalties_to_go(kl, tokens.mask, tokens.segments) if self.kl.where == "reward" else kl
        return tokens.advantages - self.kl.coefficient * penalty, kl

    def _weights(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, tokens: Tokens
    ) -> torch.Tensor:
        where = {"mask": tokens.mask, "segments": tokens.segments}
        behavior = tokens.behavior_logprobs
        weights = self.correction.weights(old, behavior, advantages=advantages, **where)
        if (bound := self.correction.mask_divergence) is not None:
            weights = weights * sequence_mask(logprobs, behavior, advantages, bound=bound, **where)
        return weights

    def _clipped_ratio(self, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if self.policy_loss.name == "gspo":
            return sequence_ratio_of(logprobs, old, tokens.mask, tokens.segments)
        return ratio_of(logprobs, old)


@dataclass(frozen=True, kw_only=True)
class SupervisedObjective(Objective):
    """Cross-entropy of the response tokens: token-mean over the step."""

    num_sums: int = 3
    num_maxima: int = 0

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
