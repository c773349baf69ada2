"""Policy losses in the family of REINFORCE: the log-probability times the advantage, weighted or masked.

Shapes and notation as in `policy_loss`. Under `correction: none` the samples of mu are used unweighted, which is what
`asymre`, `topr`, `opmd` and `rec` are designed for.
"""

from __future__ import annotations

import torch

from .policy_loss import MAX_LOG_RATIO, ratio_of
from .sequences import sequence_sums

REC_CLIPS = ("none", "one_side", "two_side", "ring")


def reinforce_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """`-A logp`. Source: Williams 1992; RLOO, arXiv 2402.14740."""
    return -advantages * logprobs


def topr_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    segments: torch.Tensor,
) -> torch.Tensor:
    """`-A logp` where A > 0, else `-sg(min(pi(y) / mu(y), 1)) A logp` with the ratio of the whole sequence.

    Good answers are imitated however unlikely they have become; bad answers lose their influence once they are
    unlikely. The paper's A is the reward itself. Source: TOPR, arXiv 2503.14286.
    """
    with torch.no_grad():
        log_ratio = sequence_sums(torch.where(mask, logprobs - old_logprobs, 0.0), segments)[segments]
        weight = torch.where(advantages > 0, 1.0, torch.exp(log_ratio.clamp(max=0.0)))
    return -weight * advantages * logprobs


def opmd_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, tau: float = 1.0
) -> torch.Tensor:
    """`-A logp / (1 + tau)`: online policy mirror descent as Trinity-RFT simplifies it (arXiv 2505.17826).

    A is the reward less a baseline: the group's mean, or `tau log mean exp(R / tau)`.
    """
    return -advantages * logprobs / (1 + tau)


def opmd_kimi_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    segments: torch.Tensor,
    tau: float = 0.1,
) -> torch.Tensor:
    """`-A logp_t + (tau / 2) (log pi(y) / pi_old(y))^2 / T` for each of the T tokens of y.

    Summed over a sequence (`seq_mean_token_sum`) this is the paper's surrogate, whose second term holds the policy
    near the one that sampled. That term moves sequences whose advantage is 0 too. Source: Kimi k1.5, arXiv 2501.12599.
    """
    log_ratio = sequence_sums(torch.where(mask, logprobs - old_logprobs, 0.0), segments)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lengths = sequence_sums(mask.to(logprobs.dtype), segments).clamp(min=1)
    return -advantages * logprobs + (tau / 2 * log_ratio.square() / lengths)[segments]


def sppo_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, epsilon: float = 0.3
) -> torch.Tensor:
    """`-A (logp - logp_old)` where `1 / (1 + epsilon) <= r <= 1 + epsilon`, 0 elsewhere.

    Simple policy optimization as Trinity-RFT has it (its `sppo`, after arXiv 2108.05828); *not* Self-Play Preference
    Optimization (arXiv 2405.00675).
    """
    log_ratio = logprobs - old_logprobs
    ratio = ratio_of(logprobs, old_logprobs)
    inside = (ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)
    return torch.where(inside, -advantages * log_ratio, 0.0)


def rec_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip: str = "one_side",
    importance_weight: bool = False,
    ring_low: float = 0.6,
    ring_high: float = 2.0,
) -> torch.Tensor:
    """`-M A logp`, with `importance_weight` `-M sg(r) A logp`; M is 1 for the tokens that `clip` keeps:

    - `none`: all of them.
    - `one_side`: `r <= 1 + clip_high` where A > 0, `r >= 1 - clip_low` where A < 0; with importance weights its
      gradient is that of the PPO clip.
    - `two_side`: `1 - clip_low <= r <= 1 + clip_high`.
    - `ring`: as two_side, and also `r <= 1 - ring_low` where A > 0, `r >= 1 + ring_high` where A < 0: far outside,
      towards the side from which the gradient brings the token back.

    Source: REC, arXiv 2509.24203 (NoIS without importance weights, IS with them).
    """
    with torch.no_grad():
        ratio = ratio_of(logprobs, old_logprobs)
        below, above = ratio < 1 - clip_low, ratio > 1 + clip_high
        if clip == "none":
            keep = torch.ones_like(below)
        elif clip == "one_side":
            keep = ~((above & (advantages > 0)) | (below & (advantages < 0)))
        elif clip in ("two_side", "ring"):
            keep = ~(above | below)
            if clip == "ring":
                keep |= (ratio <= 1 - ring_low) & (advantages > 0)
                keep |= (ratio >= 1 + ring_high) & (advantages < 0)
        else:
            raise ValueError(f"rec: clip: got {clip!r}; expected one of {', '.join(REC_CLIPS)}")
        weight = keep * (ratio if importance_weight else 1.0)
    return -weight * advantages * logprobs
