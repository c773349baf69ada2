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
APART = tuple(
    f"integration/test_{name}.py"
    for name in ("auxiliary", "endings", "examples", "explorers", "operator_pool", "plugins", "serving")
)
"""Files of whole runs that share nothing. Tests of any other file share fixtures, and stay together."""
RANKS = tuple(
    f"unit/test_{name}.py" for name in ("checkpoint", "trainer", "publish", "audit", "actor_critic", "exact_splits")
)
"""Files whose tests share the processes that are other ranks."""
FIRST = (
    "quickstart",
    "integration/test_lockstep.py",
    "unit/test_watch_page.py",
    "ranks",
    "integration/test_engine.py",
    "integration/test_lora.py",
    "integration/test_explorers.py",
    "integration/test_plugins.py",
    "integration/test_operator_pool.py",
    "integration/test_lora_engine.py",
    "integration/test_studio.py",
    "integration/test_auxiliary.py",
    "integration/test_serving.py",
    "unit/test_benchmarks.py",
    "integration/test_endings.py",
    "security/test_code_attacks.py",
    "integration/test_examples.py",
    "integration/test_against_trl.py",
    "integration/test_buffer_actor.py",
    "unit/test_hf_engine.py",
    "unit/test_families.py",
    "unit/test_memory.py",
    "unit/test_rewards.py",
    "unit/test_plan_command.py",
    "unit/test_jail.py",
    "unit/test_hf_decode.py",
)
"""What takes longest is begun first, so that no process still has one of these when the others have nothing to do."""
LONG = bool(os.environ.get("LEEWAY_LONG_TESTS"))


def in_order(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """What one process runs at a time, because it shares fixtures, and what is begun first."""
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(_scope(item), []).append(item)
    for scope in scopes.values():
        scope.sort(key=_within)
    return sorted(scopes.values(), key=_when)


def _file(item: pytest.Item) -> str:
    return f"{item.path.parent.name}/{item.path.name}"


def _scope(item: pytest.Item) -> str:
    if "quickstart" in getattr(item, "fixturenames", ()):
        return "quickstart"
    if _file(item) in RANKS:
        return "ranks"
    return item.nodeid if _file(item) in APART else str(item.path)


def _within(item: pytest.Item) -> bool:
    """Who looks at the quickstart while it runs comes before those who wait for its end."""
    return "warm" in getattr(item, "fixturenames", ())


def _when(scope: list[pytest.Item]) -> tuple[int, int]:
    for name in (_scope(scope[0]), _file(scope[0])):
        if name in FIRST:
            return FIRST.index(name), 0
    later = ("integration", "slow")
    marked = [any(item.get_closest_marker(mark) for item in scope) for mark in later]
    return len(FIRST) + (marked.index(True) if any(marked) else len(later)), -len(scope)


def slow_but_for(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `quick` are in `make test-unit` and all in `make test`."""
    quick = list(quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def sample(quick: T, whole: T) -> T:
    """How much to try: `whole` in `make test-long`, otherwise `quick`."""
    return whole if LONG else quick
