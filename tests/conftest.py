"""For all tests: what no test may do by accident, and which tier a test belongs to."""

from __future__ import annotations

import gc
import os

# Loaded later than now, and so parsed by pytest's own loader, they meet finalizers that upset CPython 3.11's parser.
import hypothesis.internal.observability
import hypothesis.strategies._internal.random  # noqa: F401
import pytest

from .tiers import LONG

# A Ray call outside of a run would start a cluster of its own inside pytest, and end pytest when that cluster goes.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not LONG and (mark := item.get_closest_marker("long")):
            item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}: make test-long"))


def pytest_collection_finish() -> None:
    """What is loaded now stays: torch and transformers are millions of objects, which each full collection, and each
    test that asks for one, would walk through again.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries that count their objects at the very end report each as leaked
