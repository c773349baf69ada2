"""How large the attack suite is: at least what docs/security.md says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import CASES, FILES, HERE

PAGE = HERE.parents[1] / "docs" / "security.md"
SAID = re.compile(r"at least (\d+) attacks and (\d+) honest answers, of which at least (\d+) are forms of mathematics")


@pytest.fixture
def cases(pytestconfig: pytest.Config) -> dict[str, int]:
    missing = {path for path in HERE.glob("test_*.py") if path != Path(__file__)} - pytestconfig.stash[FILES]
    if missing:
        pytest.skip(f"counts need the whole folder, run: pytest tests/security (not collected: {len(missing)} files)")
    return dict(pytestconfig.stash[CASES])


def test_the_suite_is_as_large_as_the_page_says(cases: dict[str, int]) -> None:
    """`pytest tests/security -k as_large -s` prints the numbers."""
    for kind, number in sorted(cases.items()):
        print(f"{kind}: {number}")
    found = SAID.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    attacks, honest, mathematics = map(int, found.groups())
    assert (attacks, honest, mathematics) >= (60, 200, 60)
    assert cases["attack"] >= attacks
    assert cases["honest"] >= honest
    assert cases["honest: mathematics"] >= mathematics
