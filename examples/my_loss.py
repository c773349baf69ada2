"""A complete custom policy loss and advantage.

    leeway run async_rl --config quickstart \\
        algorithm.policy_loss=my_loss:my_loss algorithm.advantage=my_loss:my_advantage      (started in this folder)

Options come from the config: algorithm.policy_loss_options.beta=0.2
"""

import torch

from leeway.algorithms.advantages import per_group


def my_loss(logprobs, old_logprobs, advantages, *, mask, beta=0.1):
    """-A logp, and a spring that holds each token's logprob near where it was sampled: one number per token, [S]."""
    stretch = torch.where(mask, logprobs - old_logprobs, 0.0)
    return -advantages * logprobs + beta * stretch.square()


@per_group
def my_advantage(rewards):
    """How much better than the group's median, [G] -> [G]."""
    return rewards - rewards.median()
