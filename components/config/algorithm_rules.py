"""Rules between the `algorithm` section and others; those within it are in `algorithm`."""

from __future__ import annotations

from .errors import ConfigError, words
from .recipe import Named, Rule
from .schema import Config


def a_loss_without_a_ratio_is_on_policy(config: Config, named: Named) -> None:
    a, bound = config.algorithm, config.staleness.max_policy_lag
    if bound > 0 and not a.works_off_policy:
        raise ConfigError(
            named("staleness.max_policy_lag"),
            got=bound,
            expected=f"0, or a correction: algorithm.loss {a.loss.name} with advantage {a.advantage.name} has no "
            "ratio, and treats samples of older policies as its own",
            fix="set staleness.max_policy_lag=0 (with train.updates_per_batch=1), or algorithm.correction.name=tis",
        )


def filters_leave_something(config: Config, named: Named) -> None:
    if "filter_zero_variance" in config.replay.operators and config.algorithm.group_size < 2:
        raise ConfigError(
            named("replay.operators"),
            got=words("filter_zero_variance"),
            expected="something else where algorithm.group_size is 1: the rewards of a group of one are all equal",
            fix="leave filter_zero_variance out of replay.operators",
        )


def a_reference_is_used(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.reference_path is not None and not a.kl.coef:
        raise ConfigError(
            named("algorithm.kl.coef"),
            got=a.kl.coef,
            expected="more than 0 where algorithm.reference_path names a reference policy",
            fix="set algorithm.kl.coef=0.01, or algorithm.reference_path=null",
        )


def a_critic_leaves_the_policy_time(config: Config, named: Named) -> None:
    steps, warmup = config.train.steps, config.critic.warmup_steps
    if steps is not None and warmup >= steps:
        raise ConfigError(
            named("critic.warmup_steps"),
            got=warmup,
            expected=f"less than train.steps {steps}: the policy does not learn during the critic's warm-up",
            fix=f"use {steps // 10}",
        )


ALGORITHM_RULES: tuple[Rule, ...] = (
    a_loss_without_a_ratio_is_on_policy,
    filters_leave_something,
    a_reference_is_used,
    a_critic_leaves_the_policy_time,
)
