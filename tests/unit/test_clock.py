"""Where a collector's time goes: every moment belongs to the first activity that anything is in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leeway.collector.clock import ACTIVITIES, ActivityClock

DOABLE = ACTIVITIES[:-1]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(DOABLE), st.booleans(), st.booleans()), max_size=40))
def test_each_second_belongs_to_the_first_activity_that_something_is_in(events):
    now = [0.0]
    clock = ActivityClock(lambda: now[0])
    under_way: list[str] = []
    expected = dict.fromkeys(ACTIVITIES, 0.0)
    found = dict.fromkeys(ACTIVITIES, 0.0)
    for seconds, activity, begins, drains in events:
        now[0] += seconds
        expected[next((a for a in DOABLE if a in under_way), ACTIVITIES[-1])] += seconds
        if begins:
            clock.doing(activity).__enter__()
            under_way.append(activity)
        elif activity in under_way:
            clock.doing(activity).__exit__(None, None, None)
            under_way.remove(activity)
        if drains:
            found = {a: found[a] + s for a, s in clock.drain().items()}
    found = {a: found[a] + s for a, s in clock.drain().items()}
    assert found == expected


def test_what_goes_wrong_inside_an_activity_ends_it_and_comes_out():
    now = [0.0]
    clock = ActivityClock(lambda: now[0])
    try:
        with clock.doing("generate"):
            now[0] = 2.0
            raise KeyError("lost")
    except KeyError:
        now[0] = 5.0
    assert clock.drain() == dict.fromkeys(ACTIVITIES, 0.0) | {"generate": 2.0, "wait_for_slot": 3.0}
