"""The names of everything that `algorithm` chooses, and what `algorithm.name` picks for settings that are left out.

Formulas and papers: docs/algorithms.md. GRPO and its closest relatives are in `grpo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import advantages, corrections, grpo, losses
from .piece import Own, Preset, one_of, preset, registry

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


def _teacher(estimator: str) -> dict[str, Any]:
    return {"coef": 1.0, "estimator": {"name": estimator}, "where": "token"}


PRESETS: dict[str, Preset] = {
    **grpo.PRESETS,
    "gspo": preset("grpo", "gspo", "seq_mean_token_mean"),
    "cispo": preset("grpo", "cispo", "token_mean"),
    "sapo": preset("grpo", "sapo", "seq_mean_token_mean"),
    "rloo": preset("rloo", "reinforce", "seq_mean_token_sum"),
    "reinforce_pp": preset("whitened", "ppo_clip", "token_mean", kl={"where": "reward", "estimator": {"name": "k1"}}),
    "ppo": preset("gae", {"name": "ppo_clip", "clip_high": 0.2, "dual_clip": 3.0}, "token_mean"),
    "remax": preset("reward", "reinforce", "seq_mean_token_sum", greedy_baseline=True),
    "asymre": preset("asymre", "reinforce", "seq_mean_token_sum"),
    "topr": preset("mean", "topr", "seq_mean_token_sum"),
    "opmd": preset("mean", "opmd", "seq_mean_token_sum"),
    "opmd_kimi": preset("mean", "opmd_kimi", "seq_mean_token_sum"),
    "sppo": preset("mean", "sppo", "seq_mean_token_mean"),
    "raft": preset("best", "reinforce", "token_mean"),
    "on_policy_distill": preset("zero", "cispo", "token_mean", kl=_teacher("k1")),
    "jsd": preset("zero", "cispo", "token_mean", kl=_teacher("jsd")),
    "gigpo": preset("gigpo", "ppo_clip", "turn_mean_token_mean"),
    "mix": preset("grpo", "ppo_clip", "seq_mean_token_mean")
    | {"replay": {"buffers": {"experts": {"weight": 0.5, "weight_end": 0.05}}}},
    "rec": preset("mean", "rec", "token_mean"),
}
