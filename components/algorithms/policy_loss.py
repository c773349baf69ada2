"""Policy losses that limit a probability ratio. Per token, to be minimised.

Shapes: S response tokens of N sequences laid end to end; `logprobs`, `old_logprobs`, `advantages` and the result [S],
`mask` bool [S] (tokens that the policy sampled), `segments` int64 [S] (each token's sequence). The gradient flows
through `logprobs` only. `old_logprobs` are those of the behaviour policy (the engine's, at the version that sampled
each token) or, under a correction, of the proximal policy (see `corrections`).
"""

from __future__ import annotations

import torch

from .sequences import sequence_means

MAX_LOG_RATIO = 20.0
"""Past e^20 a ratio is far outside any clip range; without the clamp, float32 overflows and inf * 0 is NaN."""


def ratio_of(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """`r = exp(logprobs - old_logprobs)`, finite."""
    return torch.exp((logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO))


def sequence_ratio_of(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """GSPO's length-normalised ratio `s = exp(mean over the sequence's tokens of log r)`, for each token: [S]."""
    mean = sequence_means(logprobs - old_logprobs, mask, segments)
    return torch.exp(mean.clamp(max=MAX_LOG_RATIO))[segments]


def clipped_ratio_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; with `dual_clip` c, not above `-c A` where A < 0.

    Source: PPO, arXiv 1707.06347, eq. 7; the asymmetric range is DAPO's, arXiv 2503.14476, section 3.1; dual clip is
    arXiv 1912.09729.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def gspo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    segments: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """`-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`, s the sequence's ratio, given to each of its tokens.

    The gradient flows through every token of the sequence: with `seq_mean_token_mean` it is
    `-s A (1 / T) sum_t grad logp_t`, the paper's. Source: GSPO, arXiv 2507.18071.
    """
    ratio = sequence_ratio_of(logprobs, old_logprobs, mask, segments)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp`: the weight is clipped, and every token keeps its gradient.

    Source: MiniMax-M1, arXiv 2506.13585; there the lower limit is off, which is clip_low = 1.
    """
    weight = ratio_of(logprobs, old_logprobs).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs


def sapo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> torch.Tensor:
    """`-(4 / tau) sigmoid(tau (r - 1)) A`, tau = tau_pos where A > 0, else tau_neg.

    Its gradient is `-4 s (1 - s) r A grad logp` with `s = sigmoid(tau (r - 1))`: on policy exactly that of `-A logp`,
    and fading on both sides. Source: SAPO, arXiv 2511.20347.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, logprobs.new_tensor(tau_pos), logprobs.new_tensor(tau_neg))
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
