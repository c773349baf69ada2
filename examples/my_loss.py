"""A policy loss and an advantage of your own, in 20 lines of code.

    leeway run async_rl --config quickstart \\
        algorithm.loss.name=my_loss:MyLoss algorithm.advantage.name=my_loss:MyAdvantage      (started in this folder)

Options come from the config: algorithm.loss.beta=0.2
"""

from __future__ import annotations

import torch

from leeway import GroupAdvantage, LossInputs, PolicyLoss


class MyLoss(PolicyLoss):
    """-A logp, and a spring that holds each token's logprob near where it was sampled: one number per token, [S]."""

    beta: float = 0.1

    def __call__(self, x: LossInputs) -> torch.Tensor:
        stretch = torch.where(x.mask, x.logprobs - x.old_logprobs, 0.0)
        return -x.advantages * x.logprobs + self.beta * stretch.square()


class MyAdvantage(GroupAdvantage):
    """How much better than the group's median, [G] -> [G]."""

    def of_group(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards - rewards.median()
