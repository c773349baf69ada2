"""Section for the algorithm: which advantage, loss, correction and KL, each with its own options."""

from __future__ import annotations

import copy
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from ..algorithms.advantages import Advantage
from ..algorithms.corrections import Correction, NoCorrection
from ..algorithms.grpo import GRPO, PPOClip
from ..algorithms.kl import KL_ESTIMATORS, KLEstimator, KLPenalty
from ..algorithms.losses import PolicyLoss
from ..algorithms.piece import Own, made
from ..algorithms.preference import DPO
from ..algorithms.presets import (
    ADVANTAGES,
    CORRECTIONS,
    POLICY_LOSSES,
    PRESETS,
    AnyAdvantage,
    AnyCorrection,
    AnyLoss,
)
from ..section import Refused, Section
from .effect import PAIRS, REFERENCE, ROLLOUTS
from .names import check_name, nearest
from .tree import value_at

CHOICES = {
    "algorithm.advantage": ADVANTAGES,
    "algorithm.loss": POLICY_LOSSES,
    "algorithm.correction": CORRECTIONS,
    "algorithm.kl.estimator": KL_ESTIMATORS,
}
"""Sections whose `name` says which options they take."""


class AlgorithmConfig(Section):
    """The policy-gradient objective. `name` is a preset for everything you do not set: docs/algorithms.md."""

    name: str = Field(
        default="grpo", description=f"preset: fills in every setting below that you do not set: {', '.join(PRESETS)}"
    )
    group_size: Annotated[PositiveInt, ROLLOUTS] = Field(default=8, description="completions per task")
    advantage: AnyAdvantage = Field(default=GRPO(), description="how rewards become advantages")
    greedy_baseline: Annotated[bool, ROLLOUTS] = Field(
        default=False,
        description="sample one more completion per group greedily and subtract its reward from the "
        "others'; it is not trained on",
    )
    overlong_buffer_frac: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="responses that reach into this last share of max_response_tokens lose reward, up to 1 "
        "at the limit; 0: no penalty",
    )
    rank_penalty: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="share of its positive reward that a group's likeliest completion loses; the others lose less",
    )
    loss: AnyLoss = Field(default=PPOClip(), description="how ratios and advantages become a loss")
    aggregation: Literal[
        "seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "fixed_length", "turn_mean_token_mean"
    ] = Field(
        default="seq_mean_token_mean",
        description="mean over sequences of their token means, mean over all tokens, mean over sequences of their "
        "token sums, or of these sums divided by rollout.max_response_tokens; or mean over turns of their token means",
    )
    correction: AnyCorrection = Field(
        default=NoCorrection(),
        description="correction for off-policy data: none, importance weights (decoupled), truncated (tis), tokens "
        "outside a range left out, the others weighted (icepop) or not (mis), or weighted without outliers (m2po)",
    )
    kl: KLPenalty = Field(default=KLPenalty(), description="penalty on the distance from a reference policy")
    reference_path: Annotated[str | None, REFERENCE] = Field(
        default=None, description="model of the reference policy, or teacher; null: the weights training starts from"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus in the loss")
    dpo: Annotated[DPO, PAIRS] = Field(default=DPO(), description="the objective of the recipe dpo")

    @field_validator("name")
    @classmethod
    def _is_a_preset(cls, name: str) -> str:
        if name not in PRESETS:
            guess = nearest(name, PRESETS)
            raise Refused(
                "algorithm.name",
                got=name,
                expected=f"one of {', '.join(PRESETS)}",
                fix=f"did you mean {guess}?"
                if guess
                else "for a loss of your own, set algorithm.loss.name=pkg.mod:Loss",
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _chosen_by_name(cls, tree: Any) -> Any:
        """A built-in name, or a class of the user's own that can be found; nothing is imported."""
        for key, known in CHOICES.items():
            chosen = value_at(tree, key.removeprefix("algorithm."))
            if isinstance(chosen, str):
                raise Refused(key, got=chosen, expected="a mapping", fix=f"write {key}.name={chosen}")
            name = chosen.get("name") if isinstance(chosen, dict) else None
            if isinstance(name, str):
                check_name(f"{key}.name", name, known, kind="Class")
        return tree

    @model_validator(mode="after")
    def _is_checked(self) -> Self:
        return self.check()

    def check(self) -> Self:
        """Raises Refused for what cannot work together. What a user's own class needs is known once it is imported."""
        advantage, estimator, where = self.advantage, self.kl.estimator, self.kl.where
        if self.kl.coef and isinstance(estimator, KLEstimator) and where not in estimator.places:
            raise Refused(
                "algorithm.kl.where",
                got=where,
                expected=f"{' or '.join(estimator.places)} where algorithm.kl.estimator is {estimator.name}"
                f"{estimator.why and ': '}{estimator.why}",
                fix=f"set algorithm.kl.where={estimator.places[0]}, or algorithm.kl.estimator.name=k3",
            )
        if isinstance(advantage, Own):
            return self
        if advantage.needs_group and self.group_size < 2:
            raise Refused(
                "algorithm.group_size",
                got=self.group_size,
                expected=f"at least 2, because advantage {advantage.name} compares completions of one task",
                fix="use 8, or algorithm.name=reinforce_pp, which needs no group",
            )
        if advantage.needs_teacher and (not self.kl.coef or self.kl.where == "loss" or self.reference_path is None):
            raise Refused(
                "algorithm.reference_path",
                got=self.reference_path,
                expected=f"a teacher, with algorithm.kl.coef above 0 in the token: advantage {advantage.name} has no "
                "other signal",
                fix="set algorithm.reference_path=/path/to/teacher, or another algorithm.advantage.name",
            )
        if self.greedy_baseline and not advantage.keeps_baseline:
            kept = [name for name, cls in ADVANTAGES.items() if cls.keeps_baseline]
            why = "a critic is already a baseline" if advantage.needs_critic else "it cancels out in the others"
            raise Refused(
                "algorithm.advantage.name",
                got=advantage.name,
                expected=f"{' or '.join(kept)} where algorithm.greedy_baseline is true: {why}",
                fix="set algorithm.advantage.name=reward, or algorithm.greedy_baseline=false",
            )
        return self

    @property
    def trains_without_advantage(self) -> bool:
        """Whether a trajectory whose advantage is 0 may still have a gradient.

        A KL penalty or an entropy bonus gives it one. A user's own loss may do anything, and a critic learns from a
        reward of 0 too.
        """
        proportional = isinstance(self.loss, PolicyLoss) and self.loss.is_proportional
        return not proportional or self.needs_critic or bool(self.kl.coef or self.entropy_coef)

    @property
    def needs_critic(self) -> bool:
        return isinstance(self.advantage, Advantage) and self.advantage.needs_critic

    @property
    def needs_proximal(self) -> bool:
        """Whether a batch is scored when it is taken. A user's own correction may not need it."""
        return isinstance(self.correction, Own) or self.correction.needs_proximal

    @property
    def works_off_policy(self) -> bool:
        """Whether it may learn from samples of older policies."""
        pieces = (self.loss, self.advantage)
        return any(isinstance(piece, Own) or piece.works_off_policy for piece in pieces) or (
            isinstance(self.correction, Own) or self.correction.corrects
        )

    def made(self) -> Pieces:
        """The parts: the user's own are imported, and checked as built-in ones are. Raises ValueError in one line."""
        advantage, loss = made(self.advantage, Advantage), made(self.loss, PolicyLoss)
        correction, estimator = made(self.correction, Correction), made(self.kl.estimator, KLEstimator)
        kl = self.kl.model_copy(update={"estimator": estimator})
        parts = {"advantage": advantage, "loss": loss, "correction": correction, "kl": kl}
        settings = self.model_copy(update=parts)
        settings.check()
        return Pieces(advantage, loss, correction, estimator, settings)


class Pieces(NamedTuple):
    """The parts of an algorithm. `settings`: the section that they come from, with them in their places."""

    advantage: Advantage
    loss: PolicyLoss
    correction: Correction
    estimator: KLEstimator
    settings: AlgorithmConfig


def with_preset(tree: Any) -> Any:
    """Fill in `tree` (settings by section) with what its `algorithm.name` picks; its own settings win."""
    algorithm = tree.get("algorithm", {}) if isinstance(tree, dict) else None
    name = algorithm.get("name", "grpo") if isinstance(algorithm, dict) else None
    return _over(PRESETS[name], tree) if isinstance(name, str) and name in PRESETS else tree


def _over(preset: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `preset`. A piece of another name takes none of the preset's options."""
    filled = copy.deepcopy(preset)
    for key, value in own.items():
        picked: Any = filled.get(key)
        if not isinstance(picked, dict) or not isinstance(value, dict):
            filled[key] = value
        else:
            is_other = "name" in picked and value.get("name", picked["name"]) != picked["name"]
            filled[key] = value if is_other else _over(picked, value)
    return filled
