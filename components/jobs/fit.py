"""What must be equal in the settings of a run's two jobs: what both sides compute with."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..config import Config, derive
from ..config.errors import ConfigError
from ..config.tree import value_at

EQUAL = (
    "staleness.max_policy_lag",
    "staleness.reorder_window",
    "train.groups_per_step",
    "train.updates_per_batch",
    "algorithm.group_size",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.top_p",
    "rollout.min_response_tokens",
    "rollout.max_model_len",
    "model.dtype",
    "model.head_dtype",
)


def must_be_equal(config: Config) -> dict[str, Any]:
    tree, sampled = config.model_dump(mode="json"), config.samplings
    written = config.param_server.publish_every
    return {key: value_at(tree, key) for key in EQUAL} | {
        # Of adapters an engine holds as many versions as are published within the bound.
        "param_server.publish_every": derive(config).publish_every if config.model.lora else written,
        "algorithm.greedy_baseline": config.algorithm.greedy_baseline,
        "task.mix": {name: asdict(own) for name, own in sampled.by_taskset.items() if own != sampled.default},
    }


def check_fit(config: Config, theirs: dict[str, Any]) -> None:
    """Raises a ConfigError for the first setting that is not as in the train job."""
    for key, own in must_be_equal(config).items():
        if key in theirs and theirs[key] != own:
            wanted = "null" if theirs[key] is None else theirs[key]
            raise ConfigError(key, got=own, expected=f"{wanted} as in the train job", fix=f"set {key}={wanted}")
