"""Tries the parts of an algorithm on a small example: a mistake in a user's own is refused before anything starts."""

from __future__ import annotations

from ..lazy import torch
from .advantages import Advantage, TurnAdvantage
from .corrections import Correction, CorrectionInputs
from .kl import KLEstimator
from .losses import LossInputs, PolicyLoss
from .piece import tried
from .turns import Turns


def try_pieces(advantage: Advantage, loss: PolicyLoss, correction: Correction, estimator: KLEstimator) -> None:
    """Raises ValueError in one line, with the name of the part and what was expected."""
    segments = torch.tensor([0, 0, 1, 1, 1, 2])
    mask = torch.tensor([True, True, True, False, True, True])
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.7, -3.0], requires_grad=True)
    old_logprobs = torch.tensor([-0.6, -1.0, -1.5, 0.0, -0.9, -2.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    x = LossInputs(logprobs, old_logprobs, advantages, mask, segments)
    losses = tried(loss, lambda: loss.checked(loss(x), like=logprobs))
    if not losses.requires_grad:
        raise ValueError(f"policy loss {loss.name}: its result does not depend on logprobs; expected a gradient to it")
    values = CorrectionInputs(logprobs.detach(), old_logprobs, advantages, mask, segments)
    if correction.needs_step_values:
        limit = tried(correction, lambda: correction.limit_of_step(correction.step_values(values)))
        values = values._replace(limit=limit)
    tried(correction, lambda: correction.checked(correction.weights(values), like=logprobs))
    tried(estimator, lambda: estimator.checked(estimator(logprobs, old_logprobs, old_logprobs), like=logprobs))
    _try_advantage(advantage)


def _try_advantage(advantage: Advantage) -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.5]), torch.tensor([0, 0, 0, 1, 1, 2])
    if isinstance(advantage, TurnAdvantage):
        owners, states = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5]), torch.tensor([0, 1, 0, 0, 2, 3, 3, 4])
        turns = Turns(trajectories=owners, states=states, rewards=torch.tensor([0.0, 0, 1, 0.5, 0.5, 0, 0, 0.5]))
        tried(advantage, lambda: advantage.of_each_turn(rewards, groups, turns))
    else:
        tried(advantage, lambda: advantage(rewards, groups))
