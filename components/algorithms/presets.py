"""The names of everything that `algorithm` chooses, and what `algorithm.name` picks for settings that are left out.

Formulas and papers: docs/algorithms.md. GRPO and its closest relatives are in `grpo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import advantages, corrections, grpo, losses
from .piece import Own, one_of, registry

ADVANTAGES = registry(
    grpo.GRPO,
    advantages.Mean,
    advantages.BatchStd,
    advantages.RLOO,
    advantages.Whitened,
    advantages.WhitenedGroup,
    advantages.AsymRE,
    advantages.LogMeanExp,
    advantages.Balanced,
    advantages.Best,
    advantages.Reward,
    advantages.Zero,
    advantages.GiGPO,
    advantages.GAE,
)
POLICY_LOSSES = registry(
    grpo.PPOClip,
    losses.GSPO,
    losses.CISPO,
    losses.SAPO,
    losses.Reinforce,
    losses.TOPR,
    losses.OPMD,
    losses.OPMDKimi,
    losses.SPPO,
    losses.REC,
)
CORRECTIONS = registry(
    corrections.NoCorrection,
    corrections.Decoupled,
    corrections.TIS,
    corrections.IcePop,
    corrections.MIS,
    corrections.M2PO,
)
if TYPE_CHECKING:
    AnyAdvantage = advantages.Advantage | Own
    AnyLoss = losses.PolicyLoss | Own
    AnyCorrection = corrections.Correction | Own
else:
    AnyAdvantage = one_of(ADVANTAGES, "grpo")
    AnyLoss = one_of(POLICY_LOSSES, "ppo_clip")
    AnyCorrection = one_of(CORRECTIONS, "none")

Preset = dict[str, dict[str, Any]]
"""Settings by section."""


def _preset(advantage: str, loss: str | dict[str, Any], aggregation: str, **others: Any) -> Preset:
    chosen = {"name": loss} if isinstance(loss, str) else loss
    return {
        "algorithm": {"advantage": {"name": advantage}, "loss": chosen, "aggregation": aggregation, **others},
    }


def _teacher(estimator: str) -> dict[str, Any]:
    return {"coef": 1.0, "estimator": {"name": estimator}, "where": "token"}


PRESETS: dict[str, Preset] = {
    **grpo.PRESETS,
    "gspo": _preset("grpo", "gspo", "seq_mean_token_mean"),
    "cispo": _preset("grpo", "cispo", "token_mean"),
    "sapo": _preset("grpo", "sapo", "seq_mean_token_mean"),
    "rloo": _preset("rloo", "reinforce", "seq_mean_token_sum"),
    "reinforce_pp": _preset("whitened", "ppo_clip", "token_mean", kl={"where": "reward", "estimator": {"name": "k1"}}),
    "ppo": _preset("gae", {"name": "ppo_clip", "clip_high": 0.2, "dual_clip": 3.0}, "token_mean"),
    "remax": _preset("reward", "reinforce", "seq_mean_token_sum", greedy_baseline=True),
    "asymre": _preset("asymre", "reinforce", "seq_mean_token_sum"),
    "topr": _preset("mean", "topr", "seq_mean_token_sum"),
    "opmd": _preset("mean", "opmd", "seq_mean_token_sum"),
    "opmd_kimi": _preset("mean", "opmd_kimi", "seq_mean_token_sum"),
    "sppo": _preset("mean", "sppo", "seq_mean_token_mean"),
    "raft": _preset("best", "reinforce", "token_mean"),
    "on_policy_distill": _preset("zero", "cispo", "token_mean", kl=_teacher("k1")),
    "jsd": _preset("zero", "cispo", "token_mean", kl=_teacher("jsd")),
    "gigpo": _preset("gigpo", "ppo_clip", "turn_mean_token_mean"),
    "mix": _preset("grpo", "ppo_clip", "seq_mean_token_mean", expert={"weight": 0.5, "weight_end": 0.05}),
    "rec": _preset("mean", "rec", "token_mean"),
}
