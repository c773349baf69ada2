"""When a run counts as lockstep: exactly where no group can be in flight while weights change."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leeway.config import Config, derive, load_config
from leeway.config.derived import least_target_policy_lag
from leeway.replay.admission import AdmissionRule

NUM_BATCHES = 14
"""Longer than any of these rules takes to come round: a multiple of every u and n fits in."""


def can_live_through_a_change(rule: AdmissionRule) -> bool:
    """Play the rule with generation as far ahead as it allows.

    A group sees other weights before it is taken if it may start under older ones than are published at its admission,
    or if new ones are published while it is outstanding.
    """
    u, n = rule.updates_per_batch, rule.publish_every
    alive, published = 0, 0
    for batch in range(NUM_BATCHES):
        for version in range(u * batch, u * (batch + 1)):
            if version and version % n == 0:
                if alive > batch_end(rule, version - 1):
                    return True
                published = version
            while rule.may_admit(alive, published=published):
                if any(rule.min_policy_version(alive) <= older < published for older in range(0, published, n)):
                    return True
                alive += 1
        assert alive >= batch_end(rule, u * batch), "a possible rule always fills the next batch"
    return False


def batch_end(rule: AdmissionRule, version: int) -> int:
    """How many groups have been taken when the step after `version` is under way."""
    return rule.groups_per_batch * (version // rule.updates_per_batch + 1)


@cache
def base() -> Config:
    return load_config("quickstart", recipe="async_rl")


def config_of(*, P: int, u: int, n: int, W: int, T: int, L: int) -> Config:
    def updated(section: str, **changes: int) -> object:
        return getattr(base(), section).model_copy(update=changes)

    return base().model_copy(
        update={
            "train": updated("train", groups_per_step=P, updates_per_batch=u),
            "param_server": updated("param_server", publish_every=n),
            "staleness": updated("staleness", max_policy_lag=L, target_policy_lag=T, reorder_window=W),
        }
    )


@pytest.mark.slow
@settings(deadline=None)
@given(
    P=st.integers(1, 3),
    u=st.integers(1, 3),
    n=st.integers(1, 3),
    W=st.integers(1, 4),
    extra=st.integers(0, 3),
    slack=st.sampled_from((0, 0, 1, 2)),
)
@example(P=2, u=1, n=1, W=1, extra=0, slack=0)
@example(P=2, u=1, n=1, W=1, extra=0, slack=1)  # may start under the version before, and meet the next one in flight
@example(P=2, u=1, n=1, W=3, extra=0, slack=0)  # a window of whole batches lets nothing overtake
@example(P=2, u=1, n=1, W=2, extra=0, slack=0)
def test_lockstep_is_where_no_group_meets_other_weights(P: int, u: int, n: int, W: int, extra: int, slack: int) -> None:
    T = least_target_policy_lag(P, u, n, W) + extra
    rule = AdmissionRule(
        groups_per_batch=P, updates_per_batch=u, publish_every=n, reorder_window=W, target_lag=T, max_lag=T + slack
    )
    expected = not can_live_through_a_change(rule)
    assert derive(config_of(P=P, u=u, n=n, W=W, T=T, L=T + slack)).lockstep == expected
