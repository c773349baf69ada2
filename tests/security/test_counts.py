"""How large the attack suite is: at least what docs/security.md says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import CASES, FILES, HERE


@pytest.fixture
def cases(pytestconfig: pytest.Config) -> dict[str, int]:
    missing = {path for path in HERE.glob("test_*.py") if path != Path(__file__)} - pytestconfig.stash[FILES]
    if missing:
        pytest.skip(f"counts need the whole folder, run: pytest tests/security (not collected: {len(missing)} files)")
    return dict(pytestconfig.stash[CASES])


def test_the_suite_says_how_large_it_is(cases: dict[str, int], record_property: Callable[[str, object], None]) -> None:
    """`pytest tests/security/ -k how_large -s` prints it."""
    for kind, number in sorted(cases.items()):
        print(f"{kind}: {number}")
        record_property(kind, number)
    assert all(number > 0 for number in cases.values())
