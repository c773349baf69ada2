"""What a process has loaded is not walked again, and a few thousand objects start no collection."""

from __future__ import annotations

import gc

from leeway.garbage import settle


def test_small_objects_start_no_collection_and_old_ones_are_not_walked():
    threshold, begun = gc.get_threshold(), []

    def seen(phase: str, info: dict[str, int]) -> None:
        begun.append((phase, info["generation"]))

    try:
        settle()
        assert gc.get_freeze_count() > 10_000
        gc.callbacks.append(seen)
        kept = [[] for _ in range(5_000)]
        assert begun == []
        kept += [[] for _ in range(40_000)]
        assert ("start", 0) in begun, "cycles are found all the same"
    finally:
        gc.callbacks.remove(seen)
        gc.unfreeze()
        gc.set_threshold(*threshold)
    del kept
