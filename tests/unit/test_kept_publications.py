"""Publications kept for the next audit: all that it needs are there, and no others are held until then."""

from __future__ import annotations

import random
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.driver.audit import KeptPublications
from leeway.weights import Canary, CanaryPrompts, Manifest, Publication

NO_CANARY = Canary(CanaryPrompts(scored=[], cached=[]), [], [], [])


def publication(version: int) -> Publication:
    return Publication(Manifest(version, [], [], NO_CANARY, ""), [])


def versions(publications: list[Publication]) -> list[int]:
    return [p.manifest.policy_version for p in publications]


@settings(deadline=None)
@given(
    every=st.integers(0, 9),
    reach=st.integers(0, 7),
    publish_every=st.integers(1, 4),
    updates=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
def test_each_audit_has_all_publications_within_reach_and_nothing_else_is_held(
    every: int, reach: int, publish_every: int, updates: int, seed: int
) -> None:
    rng = random.Random(seed)
    kept = KeptPublications(every=every, reach=reach)
    held: dict[int, weakref.ref[Publication]] = {}
    next_audit = every
    audits = 0

    def add(version: int) -> None:
        new = publication(version)
        held[version] = weakref.ref(new)
        kept.add(new)

    def check_memory() -> None:
        alive = [v for v, ref in held.items() if ref() is not None]
        # What the next audit or a batch of now can still reach.
        assert all(every and v >= max(next_audit, max(held)) - reach for v in alive), alive
        assert len(alive) <= reach // publish_every + 1

    add(0)
    for batch in range(1, 25):
        for version in range(updates * (batch - 1) + 1, updates * batch + 1):
            late = version == updates * batch and rng.random() < 0.5  # the newest may still be on its way
            if version % publish_every == 0 and not late:
                add(version)
                check_memory()
        now = updates * batch
        due = versions(kept.due(now))
        if every and now >= next_audit:
            assert due == [v for v in range(max(0, now - reach), now) if v % publish_every == 0]
            audits += 1
            next_audit = (now // every + 1) * every
        else:
            assert due == []
        check_memory()
        if now % publish_every == 0 and now not in held:
            add(now)
            check_memory()
    assert audits == 0 if not every else audits >= 24 * updates // (every + updates)


def test_nothing_is_kept_or_due_where_there_are_no_audits() -> None:
    kept = KeptPublications(every=0, reach=3)
    for version in range(9):
        new = publication(version)
        kept.add(new)
        gone = weakref.ref(new)
        del new
        assert gone() is None
        assert kept.due(version) == []
