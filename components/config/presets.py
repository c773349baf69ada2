"""What `algorithm.name` picks, as data: each preset's settings, and what its pieces take and need.

A preset fills in what the user left out; anything that the user sets wins. Formulas and papers: docs/algorithms.md.
The functions behind the names are in the algorithms part, which loads torch and is therefore not imported here; a test
holds both sides together.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, dict[str, Any]]
"""Settings by section."""

PRESETS: dict[str, Preset] = {
    "grpo": {},
    "dr_grpo": {"algorithm": {"advantage": "mean", "aggregation": "fixed_length"}},
    "dapo": {
        "algorithm": {"aggregation": "token_mean", "overlong_buffer_frac": 0.2},
        "replay": {"operators": ["filter_zero_variance"]},
    },
    "gspo": {"algorithm": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}},
    "cispo": {
        "algorithm": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"},
    },
    "sapo": {"algorithm": {"policy_loss": "sapo"}},
    "rloo": {"algorithm": {"advantage": "rloo", "policy_loss": "reinforce", "aggregation": "seq_mean_token_sum"}},
    "reinforce_pp": {
        "algorithm": {"advantage": "whitened", "aggregation": "token_mean", "kl_where": "reward", "kl_estimator": "k1"},
    },
    "ppo": {
        "algorithm": {"advantage": "gae", "aggregation": "token_mean", "clip_high": 0.2, "dual_clip": 3.0},
    },
    "remax": {
        "algorithm": {
            "greedy_baseline": True,
            "advantage": "reward",
            "policy_loss": "reinforce",
            "aggregation": "seq_mean_token_sum",
        },
    },
    "asymre": {"algorithm": {"advantage": "asymre", "policy_loss": "reinforce", "aggregation": "seq_mean_token_sum"}},
    "topr": {"algorithm": {"advantage": "mean", "policy_loss": "topr", "aggregation": "seq_mean_token_sum"}},
    "opmd": {"algorithm": {"advantage": "mean", "policy_loss": "opmd", "aggregation": "seq_mean_token_sum"}},
    "opmd_kimi": {"algorithm": {"advantage": "mean", "policy_loss": "opmd_kimi", "aggregation": "seq_mean_token_sum"}},
    "sppo": {"algorithm": {"advantage": "mean", "policy_loss": "sppo"}},
    "raft": {"algorithm": {"advantage": "best", "policy_loss": "reinforce", "aggregation": "token_mean"}},
    "on_policy_distill": {
        "algorithm": {
            "advantage": "zero",
            "policy_loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "aggregation": "token_mean",
            "kl_coef": 1.0,
            "kl_estimator": "k1",
            "kl_where": "token",
        },
    },
    "jsd": {
        "algorithm": {
            "advantage": "zero",
            "policy_loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "aggregation": "token_mean",
            "kl_coef": 1.0,
            "kl_estimator": "jsd",
            "kl_where": "token",
        },
    },
    "step_grpo": {"algorithm": {"aggregation": "turn_mean_token_mean"}},
    "gigpo": {"algorithm": {"advantage": "gigpo", "aggregation": "turn_mean_token_mean"}},
    "mix": {"algorithm": {"expert_weight": 0.5, "expert_weight_end": 0.05}},
    "rec": {"algorithm": {"advantage": "mean", "policy_loss": "rec", "clip_high": 0.2, "aggregation": "token_mean"}},
}

# Registered names, and the options that each takes in addition to the common arguments.
ADVANTAGE_OPTIONS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "mean": (),
    "batch_std": (),
    "rloo": (),
    "whitened": (),
    "whitened_group": (),
    "asymre": ("delta",),
    "log_mean_exp": ("tau",),
    "balanced": (),
    "best": ("least",),
    "reward": (),
    "zero": (),
    "gigpo": ("omega", "gamma", "std"),
    "gae": (),
}
POLICY_LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "clip": (),
    "gspo": (),
    "cispo": (),
    "sapo": ("tau_pos", "tau_neg"),
    "reinforce": (),
    "topr": (),
    "opmd": ("tau",),
    "opmd_kimi": ("tau",),
    "sppo": ("epsilon",),
    "rec": ("clip", "importance_weight", "ring_low", "ring_high"),
}
NEED_NO_GROUP = ("whitened", "reward", "zero", "gae")
"""Advantages that work with groups of one; the others compare a trajectory with the rest of its group."""
NEED_CRITIC = ("gae",)
"""Advantages that the trainer's critic computes from unmodified rewards."""
OFF_POLICY = ("asymre", "best")
"""Advantages whose `-A logp` may learn from another policy's samples; with the others, the loss needs a ratio."""
KEEP_BASELINE = ("whitened", "reward")
"""Advantages that do not cancel a number subtracted from all rewards of a group."""
NOT_PROPORTIONAL = ("opmd_kimi",)
"""Policy losses with a gradient even for a trajectory whose advantage is 0."""


def with_preset(tree: Any) -> Any:
    """Fill in `tree` (settings by section) with what its `algorithm.name` picks; its own settings win."""
    if not isinstance(tree, dict):
        return tree
    algorithm = tree.get("algorithm", {})
    name = algorithm.get("name", "grpo") if isinstance(algorithm, dict) else None
    filled = dict(tree)
    for section, settings in PRESETS.get(name, {}).items() if isinstance(name, str) else ():
        own = tree.get(section, {})
        if isinstance(own, dict):
            filled[section] = settings | own
    return filled
