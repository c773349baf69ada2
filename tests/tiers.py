"""What a session of tests runs: see "Tests" in docs/design.md.

`make test-unit` leaves out the marker `slow` and tests/integration; `make test` has both; `make test-long` also
runs what is marked `long`, and gives sampled properties their full number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
TOGETHER = {
    "test_learning.py": "quickstart",
    "test_preferences.py": "quickstart",
    "test_offline.py": "quickstart",
    "test_examples.py": "quickstart",
    "test_engine.py": "engine",
    "test_lockstep.py": "lockstep",
    "test_checkpoint.py": "ranks",
    "test_trainer.py": "ranks",
    "test_publish.py": "ranks",
    "test_audit.py": "ranks",
    "test_actor_critic.py": "ranks",
    "test_exact_splits.py": "ranks",
}
"""Files whose tests share a trained model, an engine, a run, or processes that are other ranks: one process runs them.
The longest come first.
"""
APART = ("test_endings.py", "test_auxiliary.py", "test_plugins.py")
"""Files of whole runs that share nothing. Tests of any other file share fixtures, and stay together."""
LONG = bool(os.environ.get("LEEWAY_LONG_TESTS"))


def slow_but_for(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `quick` are in `make test-unit` and all in `make test`."""
    quick = list(quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def sample(quick: T, whole: T) -> T:
    """How much to try: `whole` in `make test-long`, otherwise `quick`."""
    return whole if LONG else quick
