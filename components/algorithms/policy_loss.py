"""Policy losses per token, and how per-token losses add up to one number.

Shapes: S response tokens of N sequences laid end to end. `segments` [S] holds each token's sequence index, 0 .. N - 1.
"""

from __future__ import annotations

import torch


def clipped_ratio_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprobs - old_logprobs)`, all [S] -> [S].

    `old_logprobs` are those of the behaviour policy: the engine's, at the version that sampled each token. The gradient
    flows through `logprobs` only. Source: PPO, arXiv 1707.06347, eq. 7; the asymmetric range is DAPO's, arXiv
    2503.14476, section 3.1.
    """
    # Past e^20 the ratio is far outside any clip range; without the clamp, float32 overflows and inf * 0 is NaN.
    ratio = torch.exp((logprobs - old_logprobs).clamp(max=20.0))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def aggregate(
    losses: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    *,
    how: str,
    num_sequences: int,
    num_tokens: int,
) -> torch.Tensor:
    """Sum of `losses` [S] over the tokens in `mask` [S], each with its share of the whole step; returns a scalar.

    `num_sequences` and `num_tokens` count the whole optimizer step over all microbatches and ranks, so that the parts
    simply add up:

    - `token_mean`: every token weighs 1 / num_tokens (DAPO).
    - `seq_mean_token_mean`: every token weighs 1 / (its sequence's tokens x num_sequences) (GRPO).
    """
    masked = losses * mask
    if how == "token_mean":
        return masked.sum() / num_tokens
    if how == "seq_mean_token_mean":
        lengths = torch.zeros(int(segments[-1]) + 1 if len(segments) else 0, device=losses.device)
        lengths.index_add_(0, segments, mask.to(lengths.dtype))
        return (masked / lengths.clamp(min=1)[segments]).sum() / num_sequences
    raise ValueError(f"aggregation: got {how!r}; expected token_mean or seq_mean_token_mean")
