"""Advantages: the value of each trajectory of a take, computed from the rewards alone.

An advantage function maps rewards [N] of all trajectories of a take and `groups` [N], the index of each one's group
(0, 0, 0, 1, 1, ...), to advantages [N]. Most look at one group only. These are written for a group's rewards [G] and
lifted with `per_group`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

AdvantageFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rewards [N] and group indices [N] of a take -> advantages [N]."""


def per_group(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Lift a function of one group's rewards, [G] -> [G], to a whole take; keyword arguments are passed through."""

    def over_take(rewards: torch.Tensor, groups: torch.Tensor, **options: Any) -> torch.Tensor:
        if not len(rewards):
            return rewards
        sizes = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
        return torch.cat([function(part, **options) for part in torch.split(rewards, sizes)])

    over_take.__name__, over_take.__doc__, over_take.__module__ = function.__name__, function.__doc__, __name__
    over_take.of_group = function  # type: ignore[attr-defined]  # whose options it takes
    return over_take


def grpo_advantage(rewards: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """`(R - mean_g) / (std_g + eps)`, rewards [G] -> [G]; std_g of the sample; zeros where all rewards are equal.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    if rewards.numel() < 2 or _all_equal(rewards):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


def mean_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """`R - mean_g`, [G] -> [G]. Source: Dr. GRPO, arXiv 2503.20783."""
    return torch.zeros_like(rewards) if _all_equal(rewards) else rewards - rewards.mean()


def rloo_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """`R - mean of the others = G / (G - 1) (R - mean_g)`, [G] -> [G]; zeros for a group of one.

    Source: RLOO, arXiv 2402.14740.
    """
    count = rewards.numel()
    return mean_advantage(rewards) * (count / (count - 1) if count > 1 else 0.0)


def asymre_advantage(rewards: torch.Tensor, *, delta: float = -0.1) -> torch.Tensor:
    """`R - (mean_g + delta)`, [G] -> [G]: delta < 0 leans towards good answers, which off-policy learning needs.

    Source: AsymRE, arXiv 2506.20520.
    """
    return mean_advantage(rewards) - delta


def log_mean_exp_advantage(rewards: torch.Tensor, *, tau: float = 1.0) -> torch.Tensor:
    """`R - tau log mean_g exp(R / tau)`, [G] -> [G]: the soft value as baseline. Source: Kimi k1.5,
    arXiv 2501.12599.

    `tau` to infinity is the mean, to 0 the best of the group.
    """
    if _all_equal(rewards):
        return torch.zeros_like(rewards)
    return rewards - tau * (torch.logsumexp(rewards / tau, dim=0) - math.log(rewards.numel()))


def balanced_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """`R - mean_g`, [G] -> [G], with at most as many negatives as positives: the later negatives are set to 0.

    A group's samples are exchangeable, so their order is as random as any other. Source: RED-Drop, arXiv 2509.24203.
    """
    advantages = mean_advantage(rewards)
    negative = advantages < 0
    surplus = negative & (negative.cumsum(0) > (advantages > 0).sum())
    return torch.where(surplus, 0.0, advantages)


def best_advantage(rewards: torch.Tensor, *, least: float = 0.0) -> torch.Tensor:
    """1 for the best of the group (the first of equals) if its reward is above `least`, 0 for the rest, [G] -> [G].

    With `-A logp` this is supervised training on the best completions. Source: RAFT, arXiv 2304.06767.
    """
    best = torch.zeros_like(rewards)
    best[rewards.argmax()] = 1.0
    return best * (rewards > least)


def zero_advantage(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """0, [N] -> [N]: the signal comes from a teacher (`kl_where: token`), not from rewards."""
    return torch.zeros_like(rewards)


def reward_advantage(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`R` itself, [N] -> [N]: rewards must already say good (> 0) and bad (< 0)."""
    return rewards.clone()


def outcome(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`R` unchanged, [N] -> [N]: the trainer's critic computes advantages from it, token by token; see `critic.gae`."""
    return rewards.clone()


def batch_std_advantage(rewards: torch.Tensor, groups: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """`(R - mean_g) / (std of all rewards of the take + eps)`, [N] -> [N].

    One easy group cannot blow up a tiny deviation. Source: Lite PPO, arXiv 2508.08221.
    """
    centred = per_group(mean_advantage)(rewards, groups)
    return centred / (rewards.std() + eps) if rewards.numel() > 1 else centred


def whitened_advantage(rewards: torch.Tensor, groups: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """`(R - mean) / (std + eps)` over all rewards of the take, groups or not, [N] -> [N].

    Source: REINFORCE++, arXiv 2501.03262.
    """
    return grpo_advantage(rewards, eps=eps)


def whitened_group_advantage(rewards: torch.Tensor, groups: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """`R - mean_g`, then divided by the deviation of that over the take, [N] -> [N]: REINFORCE++ with a group baseline.

    Source: REINFORCE++-baseline, arXiv 2501.03262.
    """
    return grpo_advantage(per_group(mean_advantage)(rewards, groups), eps=eps)


def _all_equal(rewards: torch.Tensor) -> bool:
    """Exact zeros for these: rounding in the mean must not turn "no signal" into a tiny number divided by eps."""
    return bool((rewards == rewards[0]).all()) if rewards.numel() else True


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {
    "grpo": per_group(grpo_advantage),
    "mean": per_group(mean_advantage),
    "batch_std": batch_std_advantage,
    "rloo": per_group(rloo_advantage),
    "whitened": whitened_advantage,
    "whitened_group": whitened_group_advantage,
    "asymre": per_group(asymre_advantage),
    "log_mean_exp": per_group(log_mean_exp_advantage),
    "balanced": per_group(balanced_advantage),
    "best": per_group(best_advantage),
    "reward": reward_advantage,
    "zero": zero_advantage,
    "gae": outcome,
}
