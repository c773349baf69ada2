"""Off-policy corrections: weights on each token's loss, because a different policy sampled the token.

Three policies meet at a token: the behaviour policy `mu` (the engine, at the token's own version), the proximal policy
`prox` (the trainer's weights when the batch was taken) and the policy `pi` that is being trained. Every correction but
`none` clips `pi / prox` and weights the token according to `prox / mu`. The weights carry no gradient.

Shapes: S response tokens of N sequences laid end to end.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from ..lazy import torch
from .losses import MAX_LOG_RATIO
from .piece import Piece
from .sequences import Tokens, sequence_means, sequence_sums


class CorrectionInputs(NamedTuple):
    """All [S]. `mask`: tokens that count; `segments`: each token's sequence. `limit`: of `limit_of_step`."""

    proximal_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    segments: torch.Tensor
    limit: float = math.inf

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.proximal_logprobs - self.behavior_logprobs

    @property
    def pushed_further(self) -> torch.Tensor:
        """Where the loss moves a ratio away from 1: above it with A > 0, below it with A < 0."""
        ratio, advantages = self.log_ratio, self.advantages
        return ((ratio > 0) & (advantages > 0)) | ((ratio < 0) & (advantages < 0))


class Correction(Piece):
    """Derive from this for weights that are no function of one ratio: define `weights`."""

    kind: ClassVar[str] = "correction"
    key: ClassVar[str] = "algorithm.correction"
    corrects: ClassVar[bool] = True
    """It makes samples of older policies right for a loss that has no ratio of its own."""
    needs_step_values: ClassVar[bool] = False
    """It looks at the tokens of the whole step first: see `step_values`."""

    mask_divergence: PositiveFloat | None = Field(
        default=None,
        description="leave out sequences with negative advantage whose mean log(behaviour / current) is above this; "
        "null: keep all",
    )

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer must score a batch under the weights that take it."""
        return True

    def old_logprobs(self, logprobs: torch.Tensor, tokens: Tokens, policy_lags: torch.Tensor) -> torch.Tensor:
        """Those of the policy that the loss's ratio is taken to, [S]."""
        return tokens.proximal_logprobs

    def weights(self, x: CorrectionInputs) -> torch.Tensor:
        """Weights [S]; called without gradient."""
        raise NotImplementedError("define weights(x)")

    def step_values(self, x: CorrectionInputs) -> torch.Tensor:
        """Numbers [K] of one rank's share of a step."""
        raise NotImplementedError("define step_values(x)")

    def limit_of_step(self, values: torch.Tensor) -> float:
        """From the `step_values` of all ranks to the number that `weights` gets as `x.limit`."""
        raise NotImplementedError("define limit_of_step(values)")


class NoCorrection(Correction):
    """1 for every token: the loss clips `pi / mu` itself, and no proximal policy is needed."""

    name: Literal["none"] = "none"
    corrects: ClassVar[bool] = False

    @property
    def needs_proximal(self) -> bool:
        return False

    def old_logprobs(self, logprobs: torch.Tensor, tokens: Tokens, policy_lags: torch.Tensor) -> torch.Tensor:
        return tokens.behavior_logprobs

    def weights(self, x: CorrectionInputs) -> torch.Tensor:
        return torch.ones_like(x.proximal_logprobs)


class RatioCorrection(Correction):
    """Derive from this for a function of the ratio `prox / mu`: define `of_ratio`."""

    level: Literal["token", "sequence"] = Field(
        default="token", description="ratio of each token, or of its whole sequence: the product over its tokens"
    )
    proximal: Literal["recompute", "interpolate"] = Field(
        default="recompute",
        description="proximal policy: scored when a batch is taken, or interpolated by lag between the behaviour and "
        "the current policy",
    )

    @property
    def needs_proximal(self) -> bool:
        return self.proximal == "recompute"

    def old_logprobs(self, logprobs: torch.Tensor, tokens: Tokens, policy_lags: torch.Tensor) -> torch.Tensor:
        if self.proximal == "interpolate":
            return interpolated_proximal(logprobs, tokens.behavior_logprobs, policy_lags)
        return tokens.proximal_logprobs

    def weights(self, x: CorrectionInputs) -> torch.Tensor:
        log_ratio = x.log_ratio
        if self.level == "sequence":
            log_ratio = sequence_sums(torch.where(x.mask, log_ratio, 0.0), x.segments)[x.segments]
        return self.of_ratio(torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)))

    def of_ratio(self, ratio: torch.Tensor) -> torch.Tensor:
        """`prox / mu` [S] -> weights [S]."""
        raise NotImplementedError("define of_ratio(ratio)")


class Decoupled(RatioCorrection):
    """`w = prox / mu`. Source: Hilton et al., arXiv 2110.00641, eq. 5; AReaL, arXiv 2505.24298, eq. 5."""

    name: Literal["decoupled"] = "decoupled"

    def of_ratio(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio


class TIS(RatioCorrection):
    """`w = min(prox / mu, cap)`. Source: Ionides 2008, "Truncated Importance Sampling"."""

    name: Literal["tis"] = "tis"
    cap: PositiveFloat = Field(default=2.0, description="largest weight")

    def of_ratio(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(max=self.cap)


class _Range(RatioCorrection):
    low: NonNegativeFloat = Field(default=0.5, description="smallest ratio kept")
    high: PositiveFloat = Field(default=2.0, description="largest ratio kept")

    def inside(self, ratio: torch.Tensor) -> torch.Tensor:
        return (ratio >= self.low) & (ratio <= self.high)


class IcePop(_Range):
    """`w = prox / mu` inside `[low, high]`, 0 outside. Source: Ring-1T, arXiv 2510.18855, section 3.2."""

    name: Literal["icepop"] = "icepop"

    def of_ratio(self, ratio: torch.Tensor) -> torch.Tensor:
        return torch.where(self.inside(ratio), ratio, 0.0)


class MIS(_Range):
    """`w = 1` inside `[low, high]`, 0 outside: masked importance sampling."""

    name: Literal["mis"] = "mis"

    def of_ratio(self, ratio: torch.Tensor) -> torch.Tensor:
        return self.inside(ratio).to(ratio.dtype)


class M2PO(Correction):
    """`w = prox / mu`, but 0 for the tokens with the largest `(log prox / mu)^2` among those that the loss pushes
    further, as many as bring the mean of the rest of them, over the whole step, down to `second_moment`.

    Source: M2PO, arXiv 2510.01161.
    """

    name: Literal["m2po"] = "m2po"
    second_moment: PositiveFloat = Field(
        default=0.04, description="largest mean of (log ratio)^2 of the kept tokens that are pushed further"
    )
    needs_step_values: ClassVar[bool] = True

    def weights(self, x: CorrectionInputs) -> torch.Tensor:
        log_ratio = x.log_ratio
        outlier = x.pushed_further & (log_ratio.square() >= x.limit)
        return torch.where(outlier, 0.0, torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)))

    def step_values(self, x: CorrectionInputs) -> torch.Tensor:
        """`(log prox / mu)^2` of the tokens that may be dropped: [S] -> [K]."""
        return x.log_ratio[x.mask & x.pushed_further].square()

    def limit_of_step(self, values: torch.Tensor) -> float:
        """The value from which squares [K] are dropped, so that the mean of the rest is in bounds (inf: none).

        Equal values stay or go together, so the order of the tokens changes nothing.
        """
        squares = torch.sort(values.double()).values
        means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
        kept = int((means <= self.second_moment).sum())
        return squares[kept].item() if kept < len(squares) else math.inf


def interpolated_proximal(
    logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, policy_lags: torch.Tensor
) -> torch.Tensor:
    """`log prox = log pi + (log mu - log pi) / max(lag, 1)`, [S] without gradient: no scoring pass is needed.

    As if every optimizer step since a token was sampled had moved its logprob as much as the last one. Up to lag 1 it
    is mu, which makes the loss plain PPO. Source: A-3PO, arXiv 2512.06547.
    """
    with torch.no_grad():
        return logprobs + (behavior_logprobs - logprobs) / policy_lags.clamp(min=1)


def sequence_mask(
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    segments: torch.Tensor,
    bound: float,
) -> torch.Tensor:
    """0 for tokens with A < 0 of sequences whose mean `log mu / pi` exceeds `bound`, 1 elsewhere: [S], no gradient.

    The policy has already moved away from these and would only be pushed further. Source: off-policy sequence masking,
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    with torch.no_grad():
        divergence = sequence_means(behavior_logprobs - logprobs, mask, segments)[segments]
        return 1.0 - ((divergence > bound) & (advantages < 0)).to(logprobs.dtype)
