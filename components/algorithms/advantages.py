"""Advantages of a group of completions of one task."""

from __future__ import annotations

from collections.abc import Callable

import torch

AdvantageFunction = Callable[[torch.Tensor], torch.Tensor]
"""Rewards [G] of one group -> advantages [G]."""


def grpo_advantage(rewards: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """`(R - mean_g) / (std_g + eps)`, rewards [G] -> [G]; std_g of the sample; zeros where all rewards are equal.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    centred = rewards - rewards.mean()
    if rewards.numel() < 2 or bool((rewards == rewards[0]).all()):
        # Exact zeros: rounding in the mean must not turn "no signal" into a tiny number divided by eps.
        return torch.zeros_like(rewards)
    return centred / (rewards.std() + eps)


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {"grpo": grpo_advantage}
