"""Advantages: the value of each trajectory of a batch, computed from the rewards alone.

An advantage maps the rewards [N] of all trajectories of a batch and `groups` [N], the index of each one's group (0, 0,
0, 1, 1, ...), to advantages [N]. One that looks at a single group derives from `GroupAdvantage` and is written for that
group's rewards [G]. One that values the turns of an agent derives from `TurnAdvantage`. GRPO's is in `grpo`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from ..lazy import torch
from .piece import Piece

if TYPE_CHECKING:
    from .turns import Turns


class Advantage(Piece):
    """Derive from this for a function of a whole batch: define `of_batch`."""

    kind: ClassVar[str] = "advantage"
    key: ClassVar[str] = "algorithm.advantage"
    needs_group: ClassVar[bool] = False
    """It compares a trajectory with the others of its group, which must be two at least."""
    by_group: ClassVar[bool] = False
    """It looks at no other group, so a batch may be trained part by part (`train.stream_groups`)."""
    needs_critic: ClassVar[bool] = False
    """The trainer's critic computes advantages, token by token, from what this returns."""
    needs_teacher: ClassVar[bool] = False
    """It has no signal of its own: a KL from a teacher is the whole of it."""
    works_off_policy: ClassVar[bool] = False
    """Its `-A logp` may learn from another policy's samples. Otherwise the loss needs a ratio, or a correction."""
    keeps_baseline: ClassVar[bool] = False
    """A number that is subtracted from all rewards of a group does not cancel."""

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Rewards [N] and group indices [N] -> advantages [N]."""
        raise NotImplementedError("define of_batch(rewards, groups)")

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return self.checked(self.of_batch(rewards, groups), like=rewards)


class GroupAdvantage(Advantage):
    """Derive from this for a function of one group: define `of_group`."""

    needs_group: ClassVar[bool] = True
    by_group: ClassVar[bool] = True

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        """Rewards [G] of one group -> advantages [G]."""
        raise NotImplementedError("define of_group(rewards)")

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        parts = split_by_group(rewards, groups)
        return torch.cat([self.checked(self.of_group(part), like=part) for part in parts]) if parts else rewards


class TurnAdvantage(Advantage):
    """Derive from this for the value of each turn when an episode earns its reward after several: define `of_turns`."""

    def of_turns(self, rewards: torch.Tensor, groups: torch.Tensor, turns: Turns) -> torch.Tensor:
        """Rewards [N] and group indices [N] of a batch, and its M turns -> advantages [M]."""
        raise NotImplementedError("define of_turns(rewards, groups, turns)")

    def of_each_turn(self, rewards: torch.Tensor, groups: torch.Tensor, turns: Turns) -> torch.Tensor:
        return self.checked(self.of_turns(rewards, groups, turns), like=turns.rewards)


def split_by_group(values: torch.Tensor, groups: torch.Tensor) -> list[torch.Tensor]:
    """`values` [N] cut wherever the index in `groups` [N] changes."""
    if not len(values):
        return []
    return list(torch.split(values, torch.unique_consecutive(groups, return_counts=True)[1].tolist()))


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """`R - mean`, [G] -> [G]. Exact zeros for equal rewards: rounding in the mean is no signal."""
    return torch.zeros_like(rewards) if all_equal(rewards) else rewards - rewards.mean()


def centred_by_group(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`R - mean_g`, [N] -> [N]."""
    parts = split_by_group(rewards, groups)
    return torch.cat([centred(part) for part in parts]) if parts else rewards


def normalised(rewards: torch.Tensor, *, eps: float) -> torch.Tensor:
    """`(R - mean) / (std + eps)`, [G] -> [G], the sample's deviation; exact zeros for equal rewards, or one."""
    if rewards.numel() < 2 or all_equal(rewards):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


def all_equal(rewards: torch.Tensor) -> bool:
    """Without this, rounding would turn "no signal" into a tiny number divided by eps."""
    return bool((rewards == rewards[0]).all()) if rewards.numel() else True


class Mean(GroupAdvantage):
    """`R - mean_g`. Source: Dr. GRPO, arXiv 2503.20783."""

    name: Literal["mean"] = "mean"

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        return centred(rewards)


class RLOO(GroupAdvantage):
    """`R - mean of the others = G / (G - 1) (R - mean_g)`; zeros for a group of one. Source: RLOO, arXiv 2402.14740."""

    name: Literal["rloo"] = "rloo"

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        count = rewards.numel()
        return centred(rewards) * (count / (count - 1) if count > 1 else 0.0)


class AsymRE(GroupAdvantage):
    """`R - (mean_g + delta)`: delta < 0 leans towards good answers, which off-policy learning needs. At 0 or above, bad
    answers of older policies would be pushed away without limit. Source: AsymRE, arXiv 2506.20520.
    """

    name: Literal["asymre"] = "asymre"
    delta: float = Field(
        default=-0.1, lt=0.0, description="negative: how far the baseline lies below the group's mean reward"
    )
    works_off_policy: ClassVar[bool] = True

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        return centred(rewards) - self.delta


class LogMeanExp(GroupAdvantage):
    """`R - tau log mean_g exp(R / tau)`: the soft value as baseline. `tau` to infinity is the mean, to 0 the best of
    the group. Source: Kimi k1.5, arXiv 2501.12599.
    """

    name: Literal["log_mean_exp"] = "log_mean_exp"
    tau: PositiveFloat = Field(default=1.0, description="temperature of the soft value")

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        if all_equal(rewards):
            return torch.zeros_like(rewards)
        return rewards - self.tau * (torch.logsumexp(rewards / self.tau, dim=0) - math.log(rewards.numel()))


class Balanced(GroupAdvantage):
    """`R - mean_g`, with at most as many negatives as positives: the later negatives are set to 0.

    A group's samples are exchangeable, so their order is as random as any other. Source: RED-Drop, arXiv 2509.24203.
    """

    name: Literal["balanced"] = "balanced"

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        advantages = centred(rewards)
        negative = advantages < 0
        surplus = negative & (negative.cumsum(0) > (advantages > 0).sum())
        return torch.where(surplus, 0.0, advantages)


class Best(GroupAdvantage):
    """1 for the best of the group (the first of equals) if its reward is above `least`, 0 for the rest.

    With `-A logp` this is supervised training on the best completions. Source: RAFT, arXiv 2304.06767.
    """

    name: Literal["best"] = "best"
    least: float = Field(default=0.0, description="answers with a reward up to this are not learned from")
    works_off_policy: ClassVar[bool] = True

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        best = torch.zeros_like(rewards)
        best[rewards.argmax()] = 1.0
        return best * (rewards > self.least)


class BatchStd(Advantage):
    """`(R - mean_g) / (std of all rewards of the batch + eps)`: one easy group cannot blow up a tiny deviation.

    Source: Lite PPO, arXiv 2508.08221.
    """

    name: Literal["batch_std"] = "batch_std"
    eps: PositiveFloat = Field(default=1e-6, description="added to the standard deviation of rewards")
    needs_group: ClassVar[bool] = True

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        relative = centred_by_group(rewards, groups)
        return relative / (rewards.std() + self.eps) if rewards.numel() > 1 else relative


class Whitened(Advantage):
    """`(R - mean) / (std + eps)` over all rewards of the batch, groups or not.

    Source: REINFORCE++, arXiv 2501.03262.
    """

    name: Literal["whitened"] = "whitened"
    eps: PositiveFloat = Field(default=1e-6, description="added to the standard deviation of rewards")
    keeps_baseline: ClassVar[bool] = True

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return normalised(rewards, eps=self.eps)


class WhitenedGroup(Advantage):
    """`R - mean_g`, divided by the deviation of that over the batch. Source: REINFORCE++-baseline, arXiv 2501.03262."""

    name: Literal["whitened_group"] = "whitened_group"
    eps: PositiveFloat = Field(default=1e-6, description="added to the standard deviation")
    needs_group: ClassVar[bool] = True

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return normalised(centred_by_group(rewards, groups), eps=self.eps)


class Reward(Advantage):
    """`R` itself: rewards must already say good (> 0) and bad (< 0)."""

    name: Literal["reward"] = "reward"
    by_group: ClassVar[bool] = True
    keeps_baseline: ClassVar[bool] = True

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return rewards.clone()


class Zero(Advantage):
    """0: the signal comes from a teacher (`algorithm.kl.where: token`), not from rewards."""

    name: Literal["zero"] = "zero"
    by_group: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = True

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rewards)


class GAE(Advantage):
    """`R` unchanged: the trainer's critic computes advantages from it, token by token; see `critic.gae`."""

    name: Literal["gae"] = "gae"
    needs_critic: ClassVar[bool] = True

    def of_batch(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return rewards.clone()


class GiGPO(TurnAdvantage):
    """`A_episode + omega A_step`: a turn against others of its group that began in the same state.

    `A_episode`: the group's advantage of the trajectory's reward. `A_step`: the same of the turns' discounted returns
    `sum_k gamma^k r_(t + k)`, among the turns of one state; 0 where nobody else met it. `std` divides both by their
    deviation (plus `eps`). Source: GiGPO, arXiv 2505.10978, eq. 3, 6 to 8.
    """

    name: Literal["gigpo"] = "gigpo"
    omega: NonNegativeFloat = Field(default=1.0, description="weight of a turn's own advantage")
    gamma: float = Field(default=0.95, ge=0.0, le=1.0, description="discount from one turn to the next")
    std: bool = Field(default=True, description="divide advantages by their standard deviation")
    eps: PositiveFloat = Field(default=1e-6, description="added to that standard deviation")
    needs_group: ClassVar[bool] = True

    def of_turns(self, rewards: torch.Tensor, groups: torch.Tensor, turns: Turns) -> torch.Tensor:
        episodes = self._relative(rewards, groups)[turns.trajectories]
        returns = turns.discounted_returns(rewards.dtype, gamma=self.gamma)
        order = torch.argsort(turns.states, stable=True)
        steps = torch.empty_like(returns)
        steps[order] = self._relative(returns[order], turns.states[order])
        return episodes + self.omega * steps

    def _relative(self, values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        parts = split_by_group(values, groups)
        relative = [normalised(part, eps=self.eps) if self.std else centred(part) for part in parts]
        return torch.cat(relative) if parts else values
