"""Reward shaping, applied before rewards become advantages. Rewards and lengths [G] are those of one group."""

from __future__ import annotations

from ..lazy import torch


def overlong_penalty(lengths: torch.Tensor, *, max_tokens: int, buffer_tokens: float) -> torch.Tensor:
    """0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`: lengths [G] -> [G] <= 0.

    Source: DAPO's soft overlong punishment, arXiv 2503.14476, section 3.4.
    """
    return ((max_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1.0, 0.0)


def rank_penalty(rewards: torch.Tensor, sequence_logprobs: torch.Tensor, *, strength: float) -> torch.Tensor:
    """`R (1 - strength (G - rank) / G)` for R > 0, else `R`, rank 0 for the likeliest of the group: [G] -> [G].

    A right answer that the policy already finds likely earns less than a rare one. In the paper, wrong answers earn 0
    and stay at 0. If they cost something (R < 0), the factor would reduce the cost of the likeliest ones most, so they
    keep their full cost. `sequence_logprobs` [G] are those of the behaviour policy. Source: unlikeliness reward,
    arXiv 2506.02355.
    """
    count = rewards.numel()
    ranks = torch.empty(count, dtype=rewards.dtype)
    ranks[torch.argsort(sequence_logprobs, descending=True, stable=True)] = torch.arange(count, dtype=rewards.dtype)
    return torch.where(rewards > 0, rewards * (1 - strength * (count - ranks) / count), rewards)
