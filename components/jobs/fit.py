"""What must be equal in the settings of a run's two jobs: what both sides compute with."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..config.errors import ConfigError
from ..config.tree import value_at

EQUAL = (
    "staleness.max_policy_lag",
    "staleness.reorder_window",
    "train.groups_per_step",
    "train.updates_per_batch",
    "param_server.publish_every",
    "algorithm.group_size",
    "rollout.temperature",
    "rollout.max_model_len",
    "model.dtype",
    "model.head_dtype",
)


def must_be_equal(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    return {key: value_at(tree, key) for key in EQUAL} | {
        "algorithm.greedy_baseline": config.algorithm.greedy_baseline,
    }


def check_fit(config: Config, theirs: dict[str, Any]) -> None:
    """Raises a ConfigError for the first setting that is not as in the train job."""
    for key, own in must_be_equal(config).items():
        if key in theirs and theirs[key] != own:
            raise ConfigError(
                key, got=own, expected=f"{theirs[key]} as in the train job", fix=f"set {key}={theirs[key]}"
            )
