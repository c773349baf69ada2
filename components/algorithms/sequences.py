"""Sums over the tokens of each sequence. `segments` [S] holds each token's sequence index, 0 .. N - 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

from ..lazy import torch


@dataclass(frozen=True)
class Tokens:
    """S response tokens as an objective sees them."""

    segments: torch.Tensor  # int64 [S], index of the sequence among these
    mask: torch.Tensor  # bool [S], True where a token is trained on
    behavior_logprobs: torch.Tensor  # float32 [S]
    policy_versions: torch.Tensor  # int64 [S]
    advantages: torch.Tensor  # float32 [S]
    proximal_logprobs: torch.Tensor  # float32 [S]; the behaviour ones where no objective asks for them
    reference_logprobs: torch.Tensor  # float32 [S]; the behaviour ones where no objective asks for them


class StepCounts(TypedDict):
    """Of a whole optimizer step: the version of its weights, its sequences, and its trained tokens.

    `buffer_counts`: (sequences, tokens) of each auxiliary buffer, which the others do not count.
    """

    policy_version: int
    num_sequences: int
    num_tokens: int
    buffer_counts: NotRequired[list[tuple[int, int]]]


def sequence_sums(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Totals [N] of `values` [S]; N is the largest index plus one, 0 without tokens."""
    count = int(segments.max()) + 1 if len(segments) else 0
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, segments, values)


def sequence_means(values: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Means [N] of `values` [S] over each sequence's tokens in `mask` [S]; 0 where it has none."""
    lengths = sequence_sums(mask.to(values.dtype), segments)
    return sequence_sums(torch.where(mask, values, 0.0), segments) / lengths.clamp(min=1)
