"""How per-token losses add up to one number.

Shapes: S response tokens of N sequences laid end to end. `segments` [S] holds each token's sequence index, 0 .. N - 1.
"""

from __future__ import annotations

from ..lazy import torch
from .sequences import sequence_sums

AGGREGATIONS = ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "fixed_length", "turn_mean_token_mean")


def aggregate(
    losses: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    *,
    how: str,
    num_sequences: int,
    num_tokens: int,
    length: int | None = None,
) -> torch.Tensor:
    """Sum of `losses` [S] over the tokens in `mask` [S], each with its share of the whole step; returns a scalar.

    `num_sequences` and `num_tokens` count the whole optimizer step over all microbatches and ranks, so that the parts
    simply add up and nothing is ever a mean of means:

    - `token_mean`: every token weighs 1 / num_tokens. Source: DAPO, arXiv 2503.14476, section 3.3.
    - `seq_mean_token_mean`: every token weighs 1 / (its sequence's tokens x num_sequences). Source: GRPO, arXiv
      2402.03300, eq. 3.
    - `seq_mean_token_sum`: every token weighs 1 / num_sequences: the gradient of a sequence's log-probability.
    - `fixed_length`: every token weighs 1 / (`length` x num_sequences). Source: Dr. GRPO, arXiv 2503.20783.
    - `turn_mean_token_mean`: every token weighs 1 / (its turn's tokens x turns of the step), as if each turn were a
      sequence of its own; `num_sequences` must then count turns (see `turns.num_turns`).
    """
    masked = torch.where(mask, losses, 0.0)
    if how == "token_mean":
        return masked.sum() / num_tokens
    if how == "turn_mean_token_mean":
        segments = turn_segments(mask, segments)
    if how in ("seq_mean_token_mean", "turn_mean_token_mean"):
        lengths = sequence_sums(mask.to(losses.dtype), segments)
        return (masked / lengths.clamp(min=1)[segments]).sum() / num_sequences
    if how == "seq_mean_token_sum":
        return masked.sum() / num_sequences
    if how == "fixed_length":
        assert length, "aggregation fixed_length divides by a length"
        return masked.sum() / (length * num_sequences)
    raise ValueError(f"aggregation: got {how!r}; expected one of {', '.join(AGGREGATIONS)}")


def turn_segments(mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Each token's turn, 0, 1, ...: [S] -> [S]. A turn is a run of tokens in `mask`; what is outside has any number."""
    before = torch.zeros_like(mask)
    before[1:] = mask[:-1] & (segments[1:] == segments[:-1])
    return ((mask & ~before).cumsum(0) - 1).clamp(min=0)
