"""The admission rule's arithmetic, and the window that chooses a batch."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from leeway.replay.admission import AdmissionRule
from leeway.replay.window import Window

from ..tiers import sample


def rule(P=4, u=1, n=1, W=1, T=2, L=None) -> AdmissionRule:
    return AdmissionRule(
        groups_per_batch=P,
        updates_per_batch=u,
        publish_every=n,
        reorder_window=W,
        target_lag=T,
        max_lag=T if L is None else L,
    )


def is_possible(P: int, u: int, n: int, W: int, T: int, L: int) -> bool:
    """The design's formula, written with a ceiling of its own."""
    overtaken_batches = 0
    while overtaken_batches * P < W - 1:
        overtaken_batches += 1
    return u * (overtaken_batches + 1) + n - 2 <= T <= L


ALL_SETTINGS = [
    s
    for s in itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2, 3), (1, 2, 3, 6, 11), range(7), range(7))
    if is_possible(*s)
]


def test_every_setting_is_accepted_exactly_when_the_formula_holds():
    accepted = 0
    for settings in itertools.product((1, 2, 3, 5), (1, 2), (1, 2, 3), (1, 2, 4, 6), range(6), range(6)):
        try:
            rule(*settings)
        except ValueError:
            assert not is_possible(*settings), f"{settings} was refused"
        else:
            accepted += 1
            assert is_possible(*settings), f"{settings} was accepted"
    assert accepted > 100


def test_refusal_names_every_number_of_the_rule():
    with pytest.raises(ValueError, match=r"reorder_window=9, updates_per_batch=2, publish_every=3 need 7 <= .* 4.* 5"):
        rule(P=4, u=2, n=3, W=9, T=4, L=5)  # 2 * (ceil(8 / 4) + 1) + 3 - 2 = 7


def test_refuses_a_target_above_the_bound():
    with pytest.raises(ValueError, match="target 3, max 2"):
        rule(T=3, L=2)


def test_lockstep_is_possible_only_without_a_window_without_reuse_and_with_every_version_published():
    rule(T=0, L=0)
    for changed in ({"W": 2}, {"u": 2}, {"n": 2}):
        with pytest.raises(ValueError):
            rule(T=0, L=0, **changed)


@pytest.mark.parametrize(
    ("settings", "queue_index", "last_batch", "last_use", "oldest"),
    [
        # Strict order: queue index q is in batch q // P, used at version q // P.
        ({"P": 4, "W": 1, "T": 2}, 0, 0, 0, 0),
        ({"P": 4, "W": 1, "T": 2}, 3, 0, 0, 0),
        ({"P": 4, "W": 1, "T": 2}, 4, 1, 1, 0),
        ({"P": 4, "W": 1, "T": 2}, 12, 3, 3, 1),
        # A window of W lets a group slip by W - 1 places.
        ({"P": 4, "W": 4, "T": 2}, 0, 0, 0, 0),
        ({"P": 4, "W": 4, "T": 2}, 1, 1, 1, 0),
        ({"P": 4, "W": 4, "T": 2}, 12, 3, 3, 1),
        ({"P": 4, "W": 4, "T": 2}, 13, 4, 4, 2),
        # Two optimizer steps per batch: batch d is used at versions 2 d and 2 d + 1.
        ({"P": 4, "u": 2, "W": 1, "T": 3, "L": 4}, 0, 0, 1, 0),
        ({"P": 4, "u": 2, "W": 1, "T": 3, "L": 4}, 15, 3, 7, 3),
        # It follows the bound and not the target.
        ({"P": 1, "W": 1, "T": 1, "L": 5}, 9, 9, 9, 4),
    ],
)
def test_last_batch_last_use_and_min_policy_version(settings, queue_index, last_batch, last_use, oldest):
    r = rule(**settings)
    assert (r.last_batch(queue_index), r.last_use(queue_index), r.min_policy_version(queue_index)) == (
        last_batch,
        last_use,
        oldest,
    )


@pytest.mark.slow
def test_num_admissible_counts_the_ranks_that_may_be_admitted():
    for settings in ALL_SETTINGS:
        r = rule(*settings)
        for published in (-1, 0, 1, 2, 7):
            brute_force = sum(r.may_admit(queue_index, published=published) for queue_index in range(120))
            assert r.num_admissible(published=published) == brute_force, (settings, published)


def test_ranks_that_may_be_admitted_are_the_first_ones():
    for settings in ALL_SETTINGS[::7]:
        r = rule(*settings)
        for published in range(-1, 5):
            answers = [r.may_admit(queue_index, published=published) for queue_index in range(100)]
            assert answers == sorted(answers, reverse=True)


def test_an_admitted_group_may_be_generated_by_the_newest_published_weights():
    for settings in ALL_SETTINGS:
        r = rule(*settings)
        for published in range(6):
            for queue_index in range(r.num_admissible(published=published)):
                assert r.min_policy_version(queue_index) <= published, (settings, queue_index)


def test_the_next_batch_can_always_be_admitted_before_the_next_publication():
    """After k batches the version is u k, of which n - 1 may be unpublished: P (k + 1) groups must be admissible."""
    for P, u, n, W, T, L in ALL_SETTINGS:
        r = rule(P, u, n, W, T, L)
        for k in range(8):
            published = u * k // n * n
            assert r.num_admissible(published=published) >= P * (k + 1)


def test_one_lag_less_than_the_rule_asks_would_get_stuck():
    for P, u, n, W, _, _ in ALL_SETTINGS:
        least = rule(P, u, n, W, 50, 50).min_target_lag
        if least == 0 or math.gcd(u, n) > 1:
            # With a common factor no batch starts n - 1 steps after a publication: the rule has room to spare.
            continue
        stuck = [
            k
            for k in range(30)
            # the rule's own condition with a target of least - 1, for the last group of batch k
            if u * ((P * (k + 1) - 1 + W - 1) // P + 1) - 1 - (least - 1) > u * k // n * n
        ]
        assert stuck, (P, u, n, W)


# -------------------------------------------------------------------------------------------------------- window


def filled(number: int, finished=(), **settings) -> Window:
    window = Window(rule(**settings))
    for group_id in range(number):
        window.admit(group_id)
    for group_id in finished:
        window.finish(group_id)
    return window


def test_admit_gives_the_min_policy_version_of_the_rank():
    window = Window(rule(P=2, W=1, T=1))
    assert [window.admit(i) for i in range(7)] == [0, 0, 0, 0, 1, 1, 2]
    assert window.next_queue_index == window.num_outstanding == 7
    assert window.num_finished == 0


def test_strict_order_waits_for_the_first_groups_and_names_one():
    window = filled(8, finished=[1, 2, 3, 4, 5, 6, 7], P=4, W=1)
    assert "group 0" in str(window.missing_for_batch(last=False))
    with pytest.raises(AssertionError, match="group 0"):
        window.take_batch(last=False)
    window.finish(0)
    assert window.missing_for_batch(last=False) is None
    assert window.take_batch(last=False) == [0, 1, 2, 3]
    assert window.take_batch(last=False) == [4, 5, 6, 7]


def test_a_finished_group_overtakes_within_the_window_only():
    # P = 2, W = 3: candidates are the first 4 outstanding; queue index 0 must be in batch 1 at the latest.
    window = filled(8, finished=[4, 5, 6, 7], P=2, W=3, T=3)
    assert "2 more finished groups for batch 0" in str(window.missing_for_batch(last=False))
    window.finish(2)
    window.finish(3)
    assert window.take_batch(last=False) == [2, 3]
    # Queue indices 0 and 1 must be in batch 1: nothing else will do, however much is finished.
    assert "group 0 and 1 more that must be in batch 1" in str(window.missing_for_batch(last=False))
    window.finish(0)
    assert "group 1 and 0 more" in str(window.missing_for_batch(last=False))
    window.finish(1)
    assert window.take_batch(last=False) == [0, 1]
    assert window.take_batch(last=False) == [4, 5]


def test_a_batch_prefers_the_oldest_finished_groups_and_is_in_admission_order():
    window = filled(6, finished=[4, 3, 1, 2, 0], P=3, W=3, T=3)
    assert window.take_batch(last=False) == [0, 1, 2]


def test_a_group_that_must_be_taken_displaces_earlier_finished_ones_that_need_not():
    # P = 4, W = 4: only queue index 0 must be in batch 0, so it is there beside three of the others.
    window = filled(7, finished=[0, 3, 5, 6], P=4, W=4, T=1)
    assert window.take_batch(last=False) == [0, 3, 5, 6]


def test_dropping_moves_those_behind_up_one_rank():
    window = filled(4, P=2, W=1, T=2)
    window.drop(1)
    assert window.next_queue_index == 3
    window.finish(0)
    window.finish(2)
    assert window.take_batch(last=False) == [0, 2]
    # Queue index 3, not 4: what left does not count.
    assert window.admit(4) == rule(P=2, W=1, T=2).min_policy_version(3)


def test_a_drop_can_make_a_group_due_at_once():
    # P = 2, W = 2: queue index 0 is due in batch 0 (1 // 2), queue index 1 in batch 1. Without group 0, group 1 is due
    # in batch 0.
    window = filled(4, finished=[2, 3], P=2, W=2, T=2)
    assert "group 0" in str(window.missing_for_batch(last=False))
    window.drop(0)
    assert "group 1 and 0 more that must be in batch 0" in str(window.missing_for_batch(last=False))


def test_an_incomplete_batch_is_served_only_when_nothing_more_can_come():
    window = filled(3, finished=[0, 1, 2], P=4, W=1)
    assert "1 more finished groups for batch 0 (of 3 outstanding)" in str(window.missing_for_batch(last=False))
    assert window.missing_for_batch(last=True) is None
    assert window.take_batch(last=True) == [0, 1, 2]
    assert window.num_outstanding == 0
    assert window.num_taken == 3


def test_the_last_batch_waits_for_everything_that_is_left():
    window = filled(3, finished=[0, 2], P=4, W=4, T=1)
    assert window.missing_for_batch(last=True) is not None
    window.finish(1)
    assert window.take_batch(last=True) == [0, 1, 2]


def test_a_group_that_is_not_outstanding_is_refused():
    window = filled(2, finished=[0, 1], P=2)
    window.take_batch(last=False)
    for change in (window.finish, window.drop):
        with pytest.raises(KeyError, match="group 0 is not outstanding"):
            change(0)


@pytest.mark.slow
def test_no_group_is_overtaken_more_often_than_the_window_allows_nor_taken_after_its_last_batch():
    for seed in range(sample(60, 300)):
        rng = random.Random(seed)
        P, W = rng.randint(1, 5), rng.randint(1, 12)
        window = Window(rule(P=P, W=W, T=30))
        admitted_index: dict[int, int] = {}
        running: list[int] = []
        overtaken: dict[int, int] = {}
        for _ in range(80):
            for _ in range(rng.randint(0, P)):
                queue_index = window.next_queue_index
                group_id = len(admitted_index)
                window.admit(group_id)
                admitted_index[group_id] = queue_index
                overtaken[group_id] = 0
                running.append(group_id)
            rng.shuffle(running)
            for _ in range(rng.randint(0, len(running))):
                group_id = running.pop()
                if rng.random() < 0.15:
                    window.drop(group_id)
                    del overtaken[group_id]
                else:
                    window.finish(group_id)
            while window.missing_for_batch(last=False) is None:
                batch = window.num_batches
                chosen = window.take_batch(last=False)
                assert len(chosen) == P
                assert chosen == sorted(chosen)
                for group_id in chosen:
                    del overtaken[group_id]
                    assert batch <= (admitted_index[group_id] + W - 1) // P
                for group_id in overtaken:
                    overtaken[group_id] += sum(other > group_id for other in chosen)
                    assert overtaken[group_id] <= W - 1, (seed, group_id)
