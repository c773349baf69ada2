"""The attack suite. Each case is marked with what it is, so that test_counts.py can say how many there are:

    @pytest.mark.attack                     a program, answer, file, request: never paid, runs, freezes, leaks nothing
    @pytest.mark.honest                     an honest one, which must still be paid
    @pytest.mark.honest("mathematics")      an honest answer in another form of mathematics
    @pytest.mark.attack(cases=len(TABLE))   a test that goes through a table itself; without `cases` a test is one case

A mark may stand at a test, at one of its parameters (`pytest.param(..., marks=...)`) or at a module (`pytestmark`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ..unit.conftest import leeway, root_logger_as_it_was  # noqa: F401

HERE = Path(__file__).parent
CASES = pytest.StashKey[Counter[str]]()
FILES = pytest.StashKey[set[Path]]()


@pytest.hookimpl(tryfirst=True)  # before -m and -k take items away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count the cases by kind: "attack", "honest", "honest: mathematics"."""
    cases: Counter[str] = Counter()
    for item in items:
        if HERE not in item.path.parents:
            continue
        for mark in item.iter_markers():
            if mark.name in ("attack", "honest"):
                number = mark.kwargs.get("cases", 1)
                cases[mark.name] += number
                cases.update({f"{mark.name}: {form}": number for form in mark.args})
    config.stash[CASES] = cases
    config.stash[FILES] = {item.path for item in items}


@pytest.fixture
def nothing_written(tmp_path: Path) -> Iterator[Path]:
    """The path of a file that an attack tries to create; the test fails when it is there afterwards."""
    marker = tmp_path / "the-attack-was-here"
    yield marker
    assert not marker.exists(), "the attack ran: it created its file"


@pytest.fixture
def at_most() -> Callable[[float], AbstractContextManager[None]]:
    """`with at_most(0.5):` fails where its body takes more seconds of this process's processor time.

    Not of wall time: a busy machine is no freeze.
    """

    @contextmanager
    def limit(seconds: float) -> Iterator[None]:
        begun = time.process_time()
        yield
        spent = time.process_time() - begun
        assert spent <= seconds, f"took {spent:.2f} s of processor time; at most {seconds:g} s is allowed"

    return limit
