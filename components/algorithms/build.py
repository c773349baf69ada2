"""From the settings to the objective."""

from __future__ import annotations

from ..config import Config, Recipe
from .corrections import Correction
from .mix import ExpertWeight, MixedObjective
from .objective import KLPenalty, Objective, PolicyObjective, SupervisedObjective
from .pieces import policy_loss_of
from .preference import PreferenceObjective


def objective_of(config: Config, recipe: Recipe) -> Objective:
    """What the trainer of `recipe` minimises. Raises ValueError in one line for a user's own piece that is wrong."""
    if recipe.objective is not None:
        return recipe.objective(config)
    if recipe.trains_on == "answers":
        return SupervisedObjective()
    a = config.algorithm
    if recipe.trains_on == "pairs":
        return PreferenceObjective(beta=a.dpo_beta, label_smoothing=a.dpo_label_smoothing)
    policy = PolicyObjective(
        policy_loss=policy_loss_of(a.policy_loss, a.policy_loss_options),
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        dual_clip=a.dual_clip,
        aggregation=a.aggregation,
        aggregation_length=config.rollout.max_response_tokens,
        correction=Correction(
            kind=a.correction,
            cap=a.correction_cap,
            low=a.correction_low,
            high=a.correction_high,
            level=a.correction_level,
            second_moment=a.correction_second_moment,
            interpolate=a.correction_proximal == "interpolate",
            mask_divergence=a.correction_mask_divergence,
        ),
        kl=KLPenalty(
            coefficient=a.kl_coef,
            estimator=a.kl_estimator,
            where=a.kl_where,
            target=a.kl_target,
            jsd_beta=a.jsd_beta,
        ),
        entropy_coefficient=a.entropy_coef,
    )
    if a.expert_path is None:
        return policy
    end = a.expert_weight if a.expert_weight_end is None else a.expert_weight_end
    weight = ExpertWeight(start=a.expert_weight, end=end, decay_steps=a.expert_decay_steps)
    return MixedObjective(policy=policy, weight=weight, token_weights=a.expert_token_weights)
