"""Rules of the `replay` section: groups are used as often as asked for, within the bound, by a priority that acts."""

from __future__ import annotations

from collections.abc import Callable

from .derived import derive, least_target_policy_lag
from .errors import ConfigError, words
from .names import PRIORITIES, check_name
from .schema import Config

Named = Callable[[str], str]


def uses_divide_the_batch(config: Config, named: Named) -> None:
    P, u, uses = config.train.groups_per_step, config.train.updates_per_batch, config.replay.max_uses
    if P % uses or P // uses < u:
        raise ConfigError(
            named("replay.max_uses"),
            got=uses,
            expected=f"a divisor of train.groups_per_step {P} that leaves at least train.updates_per_batch {u} new "
            "groups in each batch",
            fix="change one of them",
        )


def uses_fit_the_bound(config: Config, named: Named) -> None:
    """The lag of a group's first use, plus what is added until its last use, must fit within the bound."""
    uses, stride = config.replay.max_uses, config.replay.cooldown + 1
    if uses == 1:
        return
    d, u, n = derive(config), config.train.updates_per_batch, config.param_server.publish_every
    later = u * stride * (uses - 1)
    least = least_target_policy_lag(d.fresh_groups_per_batch, u, n, d.reorder_window)
    if d.first_use_policy_lag < least:
        raise ConfigError(
            named("staleness.max_policy_lag"),
            got=d.max_policy_lag,
            expected=f"at least {least + later}: {least} for a group's first use and {later} more until its last one "
            f"(replay.max_uses {uses}, {stride} batches apart, of {u} steps)",
            fix=f"raise it to {least + later}, or lower replay.max_uses or replay.cooldown",
        )
    if d.target_policy_lag > d.first_use_policy_lag:
        raise ConfigError(
            named("staleness.target_policy_lag"),
            got=d.target_policy_lag,
            expected=f"at most {d.first_use_policy_lag}: replay.max_uses {uses} needs the other {later} of "
            f"staleness.max_policy_lag {d.max_policy_lag}",
            fix="set staleness.target_policy_lag=null",
        )


def a_priority_has_something_to_choose_from(config: Config, named: Named) -> None:
    replay = config.replay
    check_name(named("replay.priority"), replay.priority, PRIORITIES, kind="function")
    if replay.sampling == "priority" and replay.max_uses == 1 and derive(config).reorder_window == 1:
        raise ConfigError(
            named("replay.sampling"),
            got=words("priority with staleness.reorder_window 1 and replay.max_uses 1"),
            expected="a reorder window, or several uses: in strict order there is nothing to choose from",
            fix="set staleness.reorder_window=8, or replay.sampling=admission",
        )


def parts_of_torchrl_exist(config: Config, named: Named) -> None:
    for key, name in (("replay.sampler", config.replay.sampler), ("replay.storage", config.replay.storage)):
        if name is not None:
            check_name(named(key), name, (), kind="function")


REPLAY_RULES = (
    uses_divide_the_batch,
    uses_fit_the_bound,
    a_priority_has_something_to_choose_from,
    parts_of_torchrl_exist,
)
