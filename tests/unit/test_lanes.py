"""Tests on several processes: no result is lost, a process that dies is a failure, and long things come first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..tiers import APART, FIRST, RANKS, in_order

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import os
from pathlib import Path
import pytest
from tests import lanes

HERE = Path(__file__).parent

def pytest_runtestloop(session):
    scopes = {}
    for item in session.items:
        scopes.setdefault(item.path, []).append(item)
    lanes.run(session, 2, scopes.values())
    return True

@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    with (HERE / "said").open("a") as said:
        said.write(f"begun {os.getpid()} {tmp_path_factory.getbasetemp().name}\\n")
    yield
    with (HERE / "said").open("a") as said:
        said.write(f"ended {os.getpid()}\\n")
"""
FILES = {
    "test_a.py": """
import os, signal, warnings, pytest

def test_passes(shared):
    print("in a file of this process alone")

@pytest.mark.skip(reason="not now")
def test_is_skipped(): ...

def test_dies(shared):
    os.kill(os.getpid(), signal.SIGKILL)

def test_comes_after_one_that_died(shared):
    warnings.warn("I was heard")

def test_fails(shared):
    print("what it printed")
    assert sum([1, 2]) == 4
""",
    "test_b.py": """
import pytest

@pytest.mark.parametrize("i", range(20))
def test_many(shared, i): ...
""",
    "test_c.py": """
import pytest

@pytest.fixture(scope="session")
def cannot_end():
    yield
    raise RuntimeError("it does not end")

def test_last(cannot_end): ...
""",
}


@pytest.mark.slow
def test_every_result_is_told_and_a_process_that_dies_is_a_failure_of_its_test(tmp_path: Path) -> None:
    for name, text in {"conftest.py": CONFTEST, **FILES}.items():
        (tmp_path / name).write_text(text)
    done = pytest_on(tmp_path, "-q")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 23 passed, 1 skipped, 1 warning, 1 error" in done.stdout
    assert "test_dies: the process that ran it was killed by SIGKILL" in done.stdout
    assert "assert 3 == 4" in done.stdout, "with the values that were compared"
    assert "what it printed" in done.stdout
    assert "I was heard" in done.stdout
    assert "RuntimeError: it does not end" in done.stdout
    said = [line.split() for line in (tmp_path / "said").read_text().splitlines()]
    begun, ended = ([pid for verb, pid, *_ in said if verb == which] for which in ("begun", "ended"))
    assert len({*begun}) == len(begun) == 3, "once in each process, and in the one that took the place of the dead one"
    assert len({name for _, _, *names in said for name in names}) == 3, "temporary files of its own"
    assert len(ended) == 2
    assert {*ended} < {*begun}


@pytest.mark.slow
def test_the_first_failure_ends_all_where_that_is_asked_for(tmp_path: Path) -> None:
    later = "import pytest, time\n@pytest.mark.parametrize('i', range(50))\ndef test(i): time.sleep(i and 600)\n"
    for name, text in {"conftest.py": CONFTEST, "test_a.py": "def test_fails(): assert 0", "test_b.py": later}.items():
        (tmp_path / name).write_text(text)
    done = pytest_on(tmp_path, "-q", "-x")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "stopping after 1 failures" in done.stdout


def pytest_on(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *args, str(folder)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=250)


def item(file: str, name: str = "test", *fixtures: str, marks: tuple[str, ...] = ()) -> Any:
    path = ROOT / "tests" / file
    marked = {*marks, *(["integration"] if "integration" in file else [])}
    return SimpleNamespace(
        path=path, nodeid=f"{path}::{name}", fixturenames=fixtures, get_closest_marker=lambda mark: mark in marked
    )


def test_long_things_come_first_and_what_is_shared_stays_together() -> None:
    items = [
        item("unit/test_advantages.py"),
        item("unit/test_checkpoint.py", marks=("slow",)),
        item("unit/test_trainer.py"),
        item("unit/test_monitor.py", marks=("slow",)),
        item("integration/test_endings.py", "a"),
        item("integration/test_endings.py", "b"),
        item("integration/test_hosts.py"),
        item("integration/test_offline.py", "test", "warm", "quickstart"),
        item("integration/test_learning.py", "test", "quickstart"),
    ]
    order = [[str(i.nodeid).partition("tests/")[2] for i in scope] for scope in in_order(items)]
    assert order[0] == ["integration/test_learning.py::test", "integration/test_offline.py::test"]
    assert ["integration/test_endings.py::a"] in order
    assert ["integration/test_endings.py::b"] in order, "one by one"
    assert ["unit/test_checkpoint.py::test", "unit/test_trainer.py::test"] in order
    assert order[-3:] == [
        ["integration/test_hosts.py::test"],
        ["unit/test_monitor.py::test"],
        ["unit/test_advantages.py::test"],
    ]


def test_what_is_named_in_the_order_is_there() -> None:
    for name in {*APART, *RANKS, *FIRST} - {"quickstart", "ranks"}:
        assert (ROOT / "tests" / name).exists(), name
