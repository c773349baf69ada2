"""The runs that make up the recipe `frontier`: one per lag bound, correction and seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..algorithms.presets import CORRECTIONS
from ..config import Config, ConfigError
from ..config.derived import least_target_policy_lag
from ..config.rules import COMMON_RULES, RL_RULES, Rule, a_queue_feeds_rollouts, check_rules, something_is_held_out

ON_DEMAND = 1_000_000_000
"""`rollout.pull_every` for runs whose engines pull only what a group cannot start without: the lag is the bound."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the study. `lockstep`: its bound is the smallest that its batches allow."""

    name: str
    max_policy_lag: int
    lockstep: bool
    correction: str
    seed: int
    config: Config


def lag_trials(config: Config) -> list[Trial]:
    """All runs, seed by seed (so that an interrupted study still allows comparisons), the smallest bound first.

    In each run the real lag is forced to the bound: strict order, target at the bound, each group generated entirely by
    the oldest version that it allows. Only lockstep is evaluated during the run: an evaluation serves the newest
    weights, and the lag would have to grow again afterwards. Raises ConfigError for the first impossible run.
    """
    study, train = config.frontier, config.train
    least = least_target_policy_lag(
        train.groups_per_step, train.updates_per_batch, config.param_server.publish_every or 1, 1
    )
    lags = sorted({least if lag == "lockstep" else lag for lag in study.max_policy_lags})
    return [
        _trial(config, lag=lag, least=least, correction=correction, seed=config.seed + i)
        for i in range(study.seeds)
        for lag in lags
        for correction in dict.fromkeys(study.corrections)
    ]


def _trial(config: Config, *, lag: int, least: int, correction: str, seed: int) -> Trial:
    lockstep = lag == least
    changed = _updated(
        config,
        seed,
        {
            "staleness": {
                "max_policy_lag": lag,
                "target_policy_lag": None,
                "reorder_window": 1,
                "in_flight": "off",
            },
            "algorithm": {"correction": CORRECTIONS[correction]()},
            "rollout": {"pull_every": ON_DEMAND, "pull": "oldest"},
            "eval": {"at_start": True, "at_end": True, "every": _eval_every(config) if lockstep else 0},
            "checkpoint": {"save_hf": "never", "save_state": "never", "every": 0},
            "monitor": {
                **dict.fromkeys(("console", "wandb", "mlflow", "trackio"), "off"),
                "tensorboard": False,
                "sinks": [],
                "rollouts_per_step": 0,
            },
        },
    )
    rules = (*COMMON_RULES, *RL_RULES)
    check_rules(changed, rules, lambda key: "frontier.max_policy_lags" if key.startswith("staleness") else key)
    return Trial(
        name=f"lag-{lag}-{correction}-seed-{seed}",
        max_policy_lag=lag,
        lockstep=lockstep,
        correction=correction,
        seed=seed,
        config=changed,
    )


def _eval_every(config: Config) -> int:
    """Steps between evaluations during the run: whole batches, and only published versions."""
    train, n = config.train, config.param_server.publish_every or 1
    if train.steps is None or config.frontier.evaluations == 1:
        return 0
    unit = train.updates_per_batch * n
    return -(-train.steps // (config.frontier.evaluations * unit)) * unit  # rounded up: no more of them than asked for


def _updated(config: Config, seed: int, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    return config.model_copy(update={"seed": seed, **sections})


def studies_start_anew(config: Config) -> None:
    if config.checkpoint.resume != "never":
        raise ConfigError(
            "checkpoint.resume",
            expected="never: all runs of a study start from the same weights",
            fix="set checkpoint.resume=never, and another name",
        )


def every_trial_is_possible(config: Config) -> None:
    lag_trials(config)


LAG_STUDY_RULES: tuple[Rule, ...] = (
    a_queue_feeds_rollouts,
    something_is_held_out,
    studies_start_anew,
    every_trial_is_possible,
)
