"""Sums over the tokens of each sequence. `segments` [S] holds each token's sequence index, 0 .. N - 1."""

from __future__ import annotations

from ..lazy import torch


def sequence_sums(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Totals [N] of `values` [S]; N is the largest index plus one, 0 without tokens."""
    count = int(segments.max()) + 1 if len(segments) else 0
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, segments, values)


def sequence_means(values: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Means [N] of `values` [S] over each sequence's tokens in `mask` [S]; 0 where it has none."""
    lengths = sequence_sums(mask.to(values.dtype), segments)
    return sequence_sums(torch.where(mask, values, 0.0), segments) / lengths.clamp(min=1)
