"""What the trainer minimises: one object per recipe, passed to the trainer as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, Unpack

from ..lazy import torch
from ..versions import NO_VERSION
from .aggregation import aggregate
from .corrections import Correction, CorrectionInputs, NoCorrection, sequence_mask
from .diagnostics import MAXIMA, SUMS, step_metrics, token_sums
from .grpo import PPOClip
from .kl import KLEstimator, KLPenalty, adapted_coefficient, penalties_to_go
from .losses import LossInputs, PolicyLoss
from .sequences import StepCounts, Tokens

if TYPE_CHECKING:
    from ..types import TrainBatch


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
    - `num_buffers`: tokens of this many auxiliary buffers, which have no lag, may be trained on together with others.
    - `sequences_per_unit`: this many neighbouring sequences of a batch stay in one microbatch, in order.
    - `num_divided`: the first so many `sums` are divided by `divisor`, as `total` is. 0: a step comes in one part.

    `sums` and `maxima` of a `Loss` have `num_sums` and `num_maxima` entries.
    """

    num_sums: int
    num_maxima: int
    needs_proximal: bool = False
    needs_reference: bool = False
    needs_entropy_gradient: bool = False
    needs_step_values: bool = False
    num_buffers: int = 0
    sequences_per_unit: int = 1
    num_divided: int = 0

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens, **step: Unpack[StepCounts]) -> Loss:
        raise NotImplementedError

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        raise NotImplementedError

    def divisor(self, *, num_sequences: int, num_tokens: int) -> float:
        """What the loss of a step with these counts is divided by."""
        raise NotImplementedError

    def step_values(
        self, batch: TrainBatch, proximal_logprobs: torch.Tensor, reference_logprobs: torch.Tensor | None
    ) -> torch.Tensor:
        """Numbers [K] of one rank's share of a step; see `needs_step_values`."""
        raise NotImplementedError

    def for_step(self, values: torch.Tensor) -> Self:
        """This objective, given the step's values of all ranks."""
        return self

    def after_step(self, metrics: dict[str, float]) -> Self:
        """The objective of the next step, given the `metrics` of this one."""
        return self

    def state_dict(self) -> dict[str, float]:
        """The state that `after_step` has changed, for resuming, as JSON-able data."""
        return {}

    def with_state(self, state: dict[str, float]) -> Self:
        """This objective in the state that `state_dict()` returned."""
        return self


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective):
    """A policy loss, weighted by a correction and aggregated, plus a KL penalty and an entropy bonus.

    `aggregation_length` is the length that `fixed_length` divides by. `limit`: what the correction found in the whole
    step's tokens, where it looks at them.
    """

    aggregation: str
    policy_loss: PolicyLoss = field(default_factory=PPOClip)
    aggregation_length: int | None = None
    correction: Correction = field(default_factory=NoCorrection)
    kl: KLPenalty = field(default_factory=KLPenalty)
    entropy_coef: float = 0.0
    limit: float = math.inf
    num_sums: int = len(SUMS) + 2
    num_maxima: int = len(MAXIMA)
    num_divided: int = 1

    @property
    def needs_proximal(self) -> bool:
        return self.correction.needs_proximal

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef != 0

    @property
    def needs_step_values(self) -> bool:
        return self.correction.needs_step_values

    def step_values(
        self, batch: TrainBatch, proximal_logprobs: torch.Tensor, reference_logprobs: torch.Tensor | None
    ) -> torch.Tensor:
        lengths, behavior = batch.response_lengths, batch.behavior_logprobs
        tokens = Tokens(
            torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths),
            self.policy_tokens(batch),
            behavior,
            batch.policy_versions,
            batch.advantages,
            proximal_logprobs,
            behavior if reference_logprobs is None else reference_logprobs,
        )
        advantages, _ = self._penalised(proximal_logprobs, tokens)
        return self.correction.step_values(
            CorrectionInputs(proximal_logprobs, behavior, advantages, tokens.mask, tokens.segments)
        )

    def divisor(self, *, num_sequences: int, num_tokens: int) -> float:
        return num_tokens if self.aggregation == "token_mean" else num_sequences

    def policy_tokens(self, batch: TrainBatch) -> torch.Tensor:
        """The tokens [S] that the policy loss is about."""
        return batch.loss_mask & (batch.policy_versions != NO_VERSION)

    def for_step(self, values: torch.Tensor) -> Self:
        return replace(self, limit=self.correction.limit_of_step(values))

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens, **step: Unpack[StepCounts]) -> Loss:
        lags = step["policy_version"] - tokens.policy_versions
        old = self.correction.old_logprobs(logprobs, tokens, lags)
        advantages, kl = self._penalised(logprobs, tokens)
        weights = self._weights(logprobs, old, advantages, tokens)
        x = LossInputs(logprobs, old, advantages, tokens.mask, tokens.segments)
        per_token = weights * self.policy_loss.checked(self.policy_loss(x), like=logprobs)

        def step_share(values: torch.Tensor) -> torch.Tensor:
            return aggregate(
                values,
                tokens.mask,
                tokens.segments,
                how=self.aggregation,
                num_sequences=step["num_sequences"],
                num_tokens=step["num_tokens"],
                length=self.aggregation_length,
            )

        policy = total = step_share(per_token)
        if self.kl.coef and self.kl.where == "loss":
            total = total + self.kl.coef * step_share(kl)
        if self.needs_entropy_gradient:
            total = total - self.entropy_coef * step_share(entropy)
        with torch.no_grad():
            sums, maxima = token_sums(
                logprobs=logprobs,
                clipped_ratio=self.policy_loss.ratio(x),
                clips=self.policy_loss.clips,
                behavior_logprobs=tokens.behavior_logprobs,
                weights=weights,
                entropy=entropy,
                lags=lags,
                has_lag=tokens.policy_versions >= 0,
                advantages=advantages,
                mask=tokens.mask,
                clip_range=self.policy_loss.clip_range,
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
                "train/reference_kl/coefficient": self.kl.coef,
            }
        return metrics

    def after_step(self, metrics: dict[str, float]) -> Self:
        kl = metrics.get("train/reference_kl/mean")
        if self.kl.target is None or kl is None or not math.isfinite(kl):
            return self
        return self._with_coef(adapted_coefficient(self.kl.coef, kl, target=self.kl.target))

    def state_dict(self) -> dict[str, float]:
        return {} if self.kl.target is None else {"kl_coefficient": self.kl.coef}

    def with_state(self, state: dict[str, float]) -> Self:
        return self._with_coef(state.get("kl_coefficient", self.kl.coef))

    def _with_coef(self, coef: float) -> Self:
        return replace(self, kl=self.kl.model_copy(update={"coef": coef}))

    def _penalised(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """(advantages, KL estimates [S]): a penalty in the reward is already subtracted from the advantages."""
        if not self.needs_reference:
            return tokens.advantages, torch.zeros_like(logprobs)
        behavior, reference = tokens.behavior_logprobs, tokens.reference_logprobs
        # A reward is a property of the sample: it compares the policy that sampled it with the reference.
        compared = logprobs if self.kl.where == "loss" else behavior
        estimator = self.kl.estimator
        assert isinstance(estimator, KLEstimator), "a user's own is imported when the objective is made"
        kl = estimator.checked(estimator(compared, reference, behavior), like=logprobs)
        if self.kl.where == "loss":
            return tokens.advantages, kl
        penalty = penalties_to_go(kl, tokens.mask, tokens.segments) if self.kl.where == "reward" else kl
        return tokens.advantages - self.kl.coef * penalty, kl

    def _weights(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, tokens: Tokens
    ) -> torch.Tensor:
        behavior, mask, segments = tokens.behavior_logprobs, tokens.mask, tokens.segments
        with torch.no_grad():
            found = self.correction.weights(CorrectionInputs(old, behavior, advantages, mask, segments, self.limit))
            weights = self.correction.checked(found, like=logprobs)
        if (bound := self.correction.mask_divergence) is not None:
            kept = sequence_mask(logprobs, behavior, advantages, mask=mask, segments=segments, bound=bound)
            weights = weights * kept
        return weights


@dataclass(frozen=True, kw_only=True)
class SupervisedObjective(Objective):
    """Cross-entropy of the response tokens: token-mean over the step."""

    num_sums: int = 3
    num_maxima: int = 0

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens, **step: Unpack[StepCounts]) -> Loss:
        total = torch.where(tokens.mask, -logprobs, 0.0).sum() / step["num_tokens"]
        with torch.no_grad():
            count = tokens.mask.sum().double()
            sums = torch.stack([total.double(), (entropy * tokens.mask).sum().double(), count])
        return Loss(total, sums, torch.zeros(0, dtype=torch.float64, device=logprobs.device))

    def metrics(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        loss, entropy, count = sums.tolist()
        return {"train/loss/sft": loss, "train/entropy/mean": entropy / max(count, 1.0)}
