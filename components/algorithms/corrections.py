"""Off-policy corrections: weights on each token's loss, because a different policy sampled the token.

Three policies meet at a token: the behaviour policy `mu` (the engine, at the token's own version), the proximal policy
`prox` (the trainer's weights when the batch was taken) and the policy `pi` that is being trained. Every correction but
`none` clips `pi / prox` and weights the token according to `prox / mu`. The weights carry no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .policy_loss import MAX_LOG_RATIO
from .sequences import sequence_means, sequence_sums

CORRECTIONS = ("none", "decoupled", "tis", "icepop", "mis", "m2po")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Which weight, and its limits; `kind` as in `algorithm.correction`.

    - `none`: the loss clips `pi / mu` itself; every weight is 1 and no proximal policy is needed.
    - `decoupled`: `w = prox / mu`. Source: Hilton et al., arXiv 2110.00641, eq. 5; AReaL, arXiv 2505.24298, eq. 5.
    - `tis`: `w = min(prox / mu, cap)`: truncated importance sampling (Ionides 2008, "Truncated Importance Sampling").
    - `icepop`: `w = prox / mu` inside `[low, high]`, 0 outside. Source: Ring-1T, arXiv 2510.18855, section 3.2.
    - `mis`: `w = 1` inside `[low, high]`, 0 outside.
    - `m2po`: `w = prox / mu`, but 0 for the tokens with the largest `(log prox / mu)^2` among those that the ratio
      pushes further (ratio > 1 with A > 0, < 1 with A < 0), as many as bring the mean of the rest of them, over the
      whole step, down to `second_moment`. Source: M2PO, arXiv 2510.01161.

    `level`: the ratio of each `token`, or of its whole `sequence` (the product over its tokens in the mask).
    `interpolate`: see `interpolated_proximal`. `mask_divergence`: see `sequence_mask`; it goes with every kind.
    `second_moment_limit`: m2po's cut for this step, from `second_moment_limit()`.
    """

    kind: str = "none"
    cap: float = 2.0
    low: float = 0.5
    high: float = 2.0
    level: str = "token"
    interpolate: bool = False
    second_moment: float = 0.04
    second_moment_limit: float = math.inf
    mask_divergence: float | None = None

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer must score a take under the weights that take it."""
        return self.kind != "none" and not self.interpolate

    def weights(
        self,
        proximal_logprobs: torch.Tensor,
        behavior_logprobs: torch.Tensor,
        *,
        mask: torch.Tensor,
        segments: torch.Tensor,
        advantages: torch.Tensor,
    ) -> torch.Tensor:
        """Weights [S] without gradient. `segments` [S]: each token's sequence; `mask` [S]: tokens that count."""
        with torch.no_grad():
            log_ratio = proximal_logprobs - behavior_logprobs
            if self.level == "sequence":
                log_ratio = sequence_sums(torch.where(mask, log_ratio, 0.0), segments)[segments]
            ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
            inside = (ratio >= self.low) & (ratio <= self.high)
            if self.kind == "decoupled":
                return ratio
            if self.kind == "tis":
                return ratio.clamp(max=self.cap)
            if self.kind == "icepop":
                return torch.where(inside, ratio, 0.0)
            if self.kind == "mis":
                return inside.to(ratio.dtype)
            if self.kind == "m2po":
                outlier = _pushed_further(log_ratio, advantages) & (log_ratio.square() >= self.second_moment_limit)
                return torch.where(outlier, 0.0, ratio)
            if self.kind == "none":
                return torch.ones_like(ratio)
        raise ValueError(f"correction: got {self.kind!r}; expected one of {', '.join(CORRECTIONS)}")


NO_CORRECTION = Correction()


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


def squares_in_question(
    proximal_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`(log prox / mu)^2` of the tokens that m2po may drop, for `second_moment_limit`; all [S] -> [K]."""
    log_ratio = proximal_logprobs - behavior_logprobs
    return log_ratio[mask & _pushed_further(log_ratio, advantages)].square()


def second_moment_limit(squares: torch.Tensor, *, bound: float) -> float:
    """The value from which `squares` [K] are dropped so that the mean of the rest is at most `bound` (inf: none).

    Equal values stay or go together, so the order of the tokens changes nothing.
    """
    values = torch.sort(squares.double()).values
    means = values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device)
    kept = int((means <= bound).sum())
    return values[kept].item() if kept < len(values) else math.inf


def _pushed_further(log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
