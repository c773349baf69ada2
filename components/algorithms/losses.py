"""Policy losses: what each token costs, from its probability ratio or its log-probability, and its advantage.

Shapes: S response tokens of N sequences laid end to end; `logprobs`, `old_logprobs`, `advantages` and the result [S],
`mask` bool [S] (tokens that the policy sampled), `segments` int64 [S] (each token's sequence). The gradient flows
through `logprobs` only. `old_logprobs` are those of the behaviour policy (the engine's, at the version that sampled
each token) or, under a correction, of the proximal policy (see `corrections`). `r = exp(logprobs - old_logprobs)`.
PPO's clip is in `grpo`.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from ..lazy import torch
from .piece import Piece
from .sequences import sequence_means, sequence_sums

MAX_LOG_RATIO = 20.0
"""Past e^20 a ratio is far outside any clip range; without the clamp, float32 overflows and inf * 0 is NaN."""


def ratio_of(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """`r = exp(logprobs - old_logprobs)`, finite."""
    return torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))


class LossInputs(NamedTuple):
    """What a loss is computed from; see above for shapes."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    segments: torch.Tensor


class PolicyLoss(Piece):
    """Derive from this for a loss of your own: define `__call__`."""

    kind: ClassVar[str] = "policy loss"
    key: ClassVar[str] = "algorithm.loss"
    works_off_policy: ClassVar[bool] = True
    """It has a ratio to the policy that sampled, or does without by design; otherwise it treats samples of older
    policies as its own.
    """
    is_proportional: ClassVar[bool] = False
    """A trajectory whose advantage is 0 has no gradient, and may be left out of the pass."""
    clips: ClassVar[str] = ""
    """What the clip range does to a token outside of it: stops its "gradient", cuts its "weight", or nothing."""

    def __call__(self, x: LossInputs) -> torch.Tensor:
        """The loss of each token, [S]. Weights, aggregation, KL and entropy come after it."""
        raise NotImplementedError("define __call__(x)")

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 a ratio is left alone; for the metrics."""
        return 0.0, 0.0

    def ratio(self, x: LossInputs) -> torch.Tensor:
        """The ratio [S] that the clip range is compared with; for the metrics too."""
        return ratio_of(x.logprobs, x.old_logprobs)


class ClippedLoss(PolicyLoss):
    """A loss with a range around ratio 1."""

    clip_low: float = Field(default=0.2, gt=0.0, le=1.0, description="ratios below 1 - clip_low are clipped")
    clip_high: PositiveFloat = Field(default=0.28, description="ratios above 1 + clip_high are clipped")
    is_proportional: ClassVar[bool] = True

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


class GSPO(ClippedLoss):
    """`-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`, s the sequence's ratio, given to each of its tokens:
    `s = exp(mean over the sequence's tokens of log r)`.

    The gradient flows through every token of the sequence: with `seq_mean_token_mean` it is
    `-s A (1 / T) sum_t grad logp_t`, the paper's. Source: GSPO, arXiv 2507.18071.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0.0, le=1.0, description="sequence ratios below 1 - clip_low are clipped")
    clip_high: PositiveFloat = Field(default=4e-4, description="sequence ratios above 1 + clip_high are clipped")
    clips: ClassVar[str] = "gradient"

    def ratio(self, x: LossInputs) -> torch.Tensor:
        mean = sequence_means(x.logprobs - x.old_logprobs, x.mask, x.segments)
        return torch.exp(mean.clamp(max=MAX_LOG_RATIO))[x.segments]

    def __call__(self, x: LossInputs) -> torch.Tensor:
        ratio = self.ratio(x)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -torch.minimum(ratio * x.advantages, clipped * x.advantages)


class CISPO(ClippedLoss):
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp`: the weight is clipped, and every token keeps its gradient.

    Source: MiniMax-M1, arXiv 2506.13585; there the lower limit is off, which is clip_low = 1.
    """

    name: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0.0, le=1.0, description="weights below 1 - clip_low are clipped")
    clip_high: PositiveFloat = Field(default=4.0, description="weights above 1 + clip_high are clipped")
    clips: ClassVar[str] = "weight"

    def __call__(self, x: LossInputs) -> torch.Tensor:
        weight = ratio_of(x.logprobs, x.old_logprobs).detach().clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * x.advantages * x.logprobs


class SAPO(PolicyLoss):
    """`-(4 / tau) sigmoid(tau (r - 1)) A`, tau = tau_pos where A > 0, else tau_neg.

    Its gradient is `-4 s (1 - s) r A grad logp` with `s = sigmoid(tau (r - 1))`: on policy exactly that of `-A logp`,
    and fading on both sides. Source: SAPO, arXiv 2511.20347.
    """

    name: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = Field(
        default=1.0, description="how fast the weight of good answers fades as their ratio leaves 1"
    )
    tau_neg: PositiveFloat = Field(default=1.05, description="the same for bad answers")
    is_proportional: ClassVar[bool] = True

    def __call__(self, x: LossInputs) -> torch.Tensor:
        ratio = ratio_of(x.logprobs, x.old_logprobs)
        tau = torch.where(x.advantages > 0, x.logprobs.new_tensor(self.tau_pos), x.logprobs.new_tensor(self.tau_neg))
        return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * x.advantages


class Reinforce(PolicyLoss):
    """`-A logp`. Source: Williams 1992; RLOO, arXiv 2402.14740."""

    name: Literal["reinforce"] = "reinforce"
    works_off_policy: ClassVar[bool] = False
    is_proportional: ClassVar[bool] = True

    def __call__(self, x: LossInputs) -> torch.Tensor:
        return -x.advantages * x.logprobs


class TOPR(PolicyLoss):
    """`-A logp` where A > 0, else `-sg(min(pi(y) / mu(y), 1)) A logp` with the ratio of the whole sequence.

    Good answers are imitated however unlikely they have become; bad answers lose their influence once they are
    unlikely. The paper's A is the reward itself. Source: TOPR, arXiv 2503.14286.
    """

    name: Literal["topr"] = "topr"
    is_proportional: ClassVar[bool] = True

    def __call__(self, x: LossInputs) -> torch.Tensor:
        with torch.no_grad():
            log_ratio = sequence_sums(torch.where(x.mask, x.logprobs - x.old_logprobs, 0.0), x.segments)[x.segments]
            weight = torch.where(x.advantages > 0, 1.0, torch.exp(log_ratio.clamp(max=0.0)))
        return -weight * x.advantages * x.logprobs


class OPMD(PolicyLoss):
    """`-A logp / (1 + tau)`: online policy mirror descent as Trinity-RFT simplifies it (arXiv 2505.17826).

    A is the reward less a baseline: the group's mean, or `tau log mean exp(R / tau)`.
    """

    name: Literal["opmd"] = "opmd"
    tau: NonNegativeFloat = Field(default=1.0, description="divides the gradient by 1 + tau")
    is_proportional: ClassVar[bool] = True

    def __call__(self, x: LossInputs) -> torch.Tensor:
        return -x.advantages * x.logprobs / (1 + self.tau)


class OPMDKimi(PolicyLoss):
    """`-A logp_t + (tau / 2) (log pi(y) / pi_old(y))^2 / T` for each of the T tokens of y.

    Summed over a sequence (`seq_mean_token_sum`) this is the paper's surrogate, whose second term holds the policy
    near the one that sampled. That term moves sequences whose advantage is 0 too. Source: Kimi k1.5, arXiv 2501.12599.
    """

    name: Literal["opmd_kimi"] = "opmd_kimi"
    tau: NonNegativeFloat = Field(default=0.1, description="how firmly the policy is held near the one that sampled")

    def __call__(self, x: LossInputs) -> torch.Tensor:
        log_ratio = sequence_sums(torch.where(x.mask, x.logprobs - x.old_logprobs, 0.0), x.segments)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        lengths = sequence_sums(x.mask.to(x.logprobs.dtype), x.segments).clamp(min=1)
        return -x.advantages * x.logprobs + (self.tau / 2 * log_ratio.square() / lengths)[x.segments]


class SPPO(PolicyLoss):
    """`-A (logp - logp_old)` where `1 / (1 + epsilon) <= r <= 1 + epsilon`, 0 elsewhere.

    Simple policy optimization as Trinity-RFT has it (its `sppo`, after arXiv 2108.05828); *not* Self-Play Preference
    Optimization (arXiv 2405.00675).
    """

    name: Literal["sppo"] = "sppo"
    epsilon: PositiveFloat = Field(default=0.3, description="ratios up to 1 + epsilon, and down to its inverse, count")
    is_proportional: ClassVar[bool] = True

    def __call__(self, x: LossInputs) -> torch.Tensor:
        log_ratio = x.logprobs - x.old_logprobs
        ratio = ratio_of(x.logprobs, x.old_logprobs)
        inside = (ratio >= 1 / (1 + self.epsilon)) & (ratio <= 1 + self.epsilon)
        return torch.where(inside, -x.advantages * log_ratio, 0.0)


class REC(ClippedLoss):
    """`-M A logp`, with `importance_weight` `-M sg(r) A logp`; M is 1 for the tokens that `clip` keeps:

    - `none`: all of them.
    - `one_side`: `r <= 1 + clip_high` where A > 0, `r >= 1 - clip_low` where A < 0; with importance weights its
      gradient is that of the PPO clip.
    - `two_side`: `1 - clip_low <= r <= 1 + clip_high`.
    - `ring`: as two_side, and also `r <= 1 - ring_low` where A > 0, `r >= 1 + ring_high` where A < 0: far outside,
      towards the side from which the gradient brings the token back.

    Source: REC, arXiv 2509.24203 (NoIS without importance weights, IS with them).
    """

    name: Literal["rec"] = "rec"
    clip_high: PositiveFloat = Field(default=0.2, description="ratios above 1 + clip_high are left out")
    clip: Literal["none", "one_side", "two_side", "ring"] = Field(
        default="one_side", description="which tokens outside of the range are left out"
    )
    importance_weight: bool = Field(default=False, description="weight each token by its ratio, without gradient")
    ring_low: float = Field(default=0.6, gt=0.0, le=1.0, description="clip=ring: ratios below 1 - ring_low count again")
    ring_high: PositiveFloat = Field(default=2.0, description="clip=ring: ratios above 1 + ring_high count again")

    def __call__(self, x: LossInputs) -> torch.Tensor:
        with torch.no_grad():
            ratio = ratio_of(x.logprobs, x.old_logprobs)
            below, above = ratio < 1 - self.clip_low, ratio > 1 + self.clip_high
            keep = torch.ones_like(below)
            if self.clip == "one_side":
                keep = ~((above & (x.advantages > 0)) | (below & (x.advantages < 0)))
            elif self.clip != "none":
                keep = ~(above | below)
            if self.clip == "ring":
                keep |= (ratio <= 1 - self.ring_low) & (x.advantages > 0)
                keep |= (ratio >= 1 + self.ring_high) & (x.advantages < 0)
            weight = keep * (ratio if self.importance_weight else 1.0)
        return -weight * x.advantages * x.logprobs
