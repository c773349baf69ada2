"""Rules of the `algorithm` section: names must exist, options must fit, and the combination must be able to learn."""

from __future__ import annotations

from collections.abc import Callable

from .critic import CriticConfig
from .errors import ConfigError, words
from .names import check_name, nearest
from .presets import ADVANTAGE_OPTIONS, KEEP_BASELINE, NEED_CRITIC, NEED_NO_GROUP, OFF_POLICY, POLICY_LOSS_OPTIONS
from .schema import Config

Named = Callable[[str], str]


def pieces_exist(config: Config, named: Named) -> None:
    a = config.algorithm
    for piece, name, options, known in (
        ("advantage", a.advantage, a.advantage_options, ADVANTAGE_OPTIONS),
        ("policy_loss", a.policy_loss, a.policy_loss_options, POLICY_LOSS_OPTIONS),
    ):
        check_name(named(f"algorithm.{piece}"), name, known, kind="function")
        for option, value in options.items() if name in known else ():
            if option not in known[name]:
                guess = nearest(option, known[name])
                raise ConfigError(
                    named(f"algorithm.{piece}_options.{option}"),
                    got=value,
                    expected=f"an option of {name} ({', '.join(known[name]) or 'it has none'})",
                    fix=f"did you mean {guess}?" if guess else "leave it out",
                )


def groups_are_large_enough(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.group_size < 2 and a.advantage in ADVANTAGE_OPTIONS and a.advantage not in NEED_NO_GROUP:
        raise ConfigError(
            named("algorithm.group_size"),
            got=a.group_size,
            expected=f"at least 2, because advantage {a.advantage} compares completions of one task",
            fix="use 8, or algorithm.name=reinforce_pp, which needs no group",
        )


def a_loss_without_a_ratio_is_on_policy(config: Config, named: Named) -> None:
    a, bound = config.algorithm, config.staleness.max_policy_lag
    known = a.advantage in ADVANTAGE_OPTIONS and a.advantage not in OFF_POLICY
    if a.policy_loss == "reinforce" and known and a.correction == "none" and bound > 0:
        raise ConfigError(
            named("staleness.max_policy_lag"),
            got=bound,
            expected=f"0, or a correction: algorithm.policy_loss reinforce with advantage {a.advantage} has no ratio, "
            "and treats samples of older policies as its own",
            fix="set staleness.max_policy_lag=0 (with train.updates_per_batch=1), or algorithm.correction=tis",
        )


def asymmetry_leans_towards_good_answers(config: Config, named: Named) -> None:
    delta = config.algorithm.advantage_options.get("delta", -0.1)
    if config.algorithm.advantage == "asymre" and (not isinstance(delta, int | float) or delta >= 0):
        raise ConfigError(
            named("algorithm.advantage_options.delta"),
            got=delta,
            expected="a number below 0: at 0 or above, bad answers of older policies are pushed away without limit",
            fix="leave it out for -0.1, or set algorithm.advantage=mean with another algorithm.policy_loss",
        )


def a_kl_in_the_loss_has_a_gradient(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.kl_coef and a.kl_estimator == "k1" and a.kl_where == "loss":
        raise ConfigError(
            named("algorithm.kl_estimator"),
            got=a.kl_estimator,
            expected="another one where algorithm.kl_where is loss: the gradient of k1 is zero on average",
            fix="set algorithm.kl_estimator=k3, or algorithm.kl_where=reward",
        )


def filters_leave_something(config: Config, named: Named) -> None:
    if "filter_zero_variance" in config.replay.operators and config.algorithm.group_size < 2:
        raise ConfigError(
            named("replay.operators"),
            got=words("filter_zero_variance"),
            expected="something else where algorithm.group_size is 1: the rewards of a group of one are all equal",
            fix="leave filter_zero_variance out of replay.operators",
        )


def kl_target_has_something_to_move(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.kl_target is not None and not a.kl_coef:
        raise ConfigError(
            named("algorithm.kl_coef"),
            got=a.kl_coef,
            expected="more than 0 where algorithm.kl_target is set: the coefficient is multiplied from step to step",
            fix="set algorithm.kl_coef=0.01, or algorithm.kl_target=null",
        )


def interpolation_fits_the_correction(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.correction_proximal == "interpolate" and a.correction == "m2po":
        raise ConfigError(
            named("algorithm.correction_proximal"),
            got=a.correction_proximal,
            expected="recompute where algorithm.correction is m2po, which looks at all ratios before the step",
            fix="set algorithm.correction_proximal=recompute, or another correction",
        )


def a_reference_is_used_and_a_teacher_is_named(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.reference_path is not None and not a.kl_coef:
        raise ConfigError(
            named("algorithm.kl_coef"),
            got=a.kl_coef,
            expected="more than 0 where algorithm.reference_path names a reference policy",
            fix="set algorithm.kl_coef=0.01, or algorithm.reference_path=null",
        )
    if a.advantage == "zero" and (not a.kl_coef or a.kl_where == "loss" or a.reference_path is None):
        raise ConfigError(
            named("algorithm.reference_path"),
            got=a.reference_path,
            expected="a teacher, with algorithm.kl_coef above 0 in the token: advantage zero has no other signal",
            fix="set algorithm.reference_path=/path/to/teacher, or another algorithm.advantage",
        )


def jsd_is_a_teachers(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.kl_estimator == "jsd" and a.kl_where != "token":
        raise ConfigError(
            named("algorithm.kl_where"),
            got=a.kl_where,
            expected="token where algorithm.kl_estimator is jsd: its gradient is right only as a token's advantage",
            fix="set algorithm.kl_where=token, or another algorithm.kl_estimator",
        )


def expert_data_is_named(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.name == "mix" and a.expert_path is None:
        raise ConfigError(
            named("algorithm.expert_path"),
            got=None,
            expected="a .jsonl file of expert answers, because algorithm.name is mix",
            fix="set algorithm.expert_path=experts.jsonl, or another algorithm.name",
        )


def a_greedy_baseline_is_seen(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.greedy_baseline and a.advantage in ADVANTAGE_OPTIONS and a.advantage not in KEEP_BASELINE:
        why = "a critic is already a baseline" if a.advantage in NEED_CRITIC else "it cancels out in the others"
        raise ConfigError(
            named("algorithm.advantage"),
            got=a.advantage,
            expected=f"{' or '.join(KEEP_BASELINE)} where algorithm.greedy_baseline is true: {why}",
            fix="set algorithm.advantage=reward, or algorithm.greedy_baseline=false",
        )


def a_critic_is_used(config: Config, named: Named) -> None:
    if config.algorithm.advantage in NEED_CRITIC:
        return
    defaults = CriticConfig()
    for name in CriticConfig.model_fields:
        if (value := getattr(config.critic, name)) != getattr(defaults, name):
            raise ConfigError(
                named(f"critic.{name}"),
                got=value,
                expected=f"nothing where algorithm.advantage is {config.algorithm.advantage}, which uses no critic",
                fix="set algorithm.name=ppo (or algorithm.advantage=gae), or leave the critic section out",
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


def a_critic_has_rollouts_only(config: Config, named: Named) -> None:
    a = config.algorithm
    if a.advantage in NEED_CRITIC and a.expert_path is not None:
        raise ConfigError(
            named("algorithm.expert_path"),
            got=a.expert_path,
            expected=f"null where algorithm.advantage is {a.advantage}: expert answers have no reward",
            fix="set algorithm.expert_path=null, or another algorithm.advantage",
        )


ALGORITHM_RULES = (
    pieces_exist,
    groups_are_large_enough,
    a_loss_without_a_ratio_is_on_policy,
    asymmetry_leans_towards_good_answers,
    a_kl_in_the_loss_has_a_gradient,
    filters_leave_something,
    kl_target_has_something_to_move,
    interpolation_fits_the_correction,
    a_reference_is_used_and_a_teacher_is_named,
    jsd_is_a_teachers,
    expert_data_is_named,
    a_greedy_baseline_is_seen,
    a_critic_is_used,
    a_critic_leaves_the_policy_time,
    a_critic_has_rollouts_only,
)
