"""From the settings to what the trainer minimises."""

from __future__ import annotations

from ..algorithms.mix import MixedObjective
from ..algorithms.objective import Objective, PolicyObjective, SupervisedObjective
from ..algorithms.preference import PreferenceObjective
from .recipe import Recipe
from .schema import Config


def objective_of(config: Config, recipe: Recipe) -> Objective:
    """What the trainer of `recipe` minimises. Raises ValueError in one line for a class of the user's that is wrong."""
    if recipe.objective is not None:
        return recipe.objective(config)
    if recipe.trains_on == "answers":
        return SupervisedObjective()
    if recipe.trains_on == "pairs":
        return PreferenceObjective(dpo=config.algorithm.dpo)
    pieces = config.algorithm.made()
    a = pieces.settings
    policy = {
        "policy_loss": pieces.loss,
        "aggregation": a.aggregation,
        "aggregation_length": config.rollout.max_response_tokens,
        "correction": pieces.correction,
        "kl": a.kl,
        "entropy_coef": a.entropy_coef,
    }
    buffers = config.replay.buffers if recipe.is_online else {}
    return MixedObjective(**policy, buffers=buffers) if buffers else PolicyObjective(**policy)
