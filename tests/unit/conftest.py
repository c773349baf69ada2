"""For unit tests: one thread for tiny tensors, the command in this process, and ranks started once for all."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from leeway.cli.main import main

from .loaded_models import remember_loads
from .other_ranks import OtherRanks

# Else transformers starts four threads for the few tensors of each tiny model.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.fixture(scope="session", autouse=True)
def models_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        remember_loads(monkeypatch)
        yield


@pytest.fixture(scope="session", autouse=True)
def command_line_built_once() -> Iterator[None]:
    """Typer builds it anew at each call, as if a process gave more than one command."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    """An actor that is made in this process sets the root logger's level; the tests after it have their own."""
    root = logging.getLogger()
    level = root.level
    yield
    if root.level != level:  # setting it has every logger forget what it knew, and torch brings a thousand of them
        root.setLevel(level)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def leeway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command, started in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*args: str) -> Done:
        with pytest.raises(SystemExit) as end:
            main([*args])
        printed = capsys.readouterr()
        return Done(int(end.value.code or 0), printed.out, printed.err)

    return command


@pytest.fixture(scope="session")
def ranks_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherRanks]:
    ranks = OtherRanks(tmp_path_factory.mktemp("other-ranks"))
    yield ranks
    ranks.end()


@pytest.fixture
def other_ranks(ranks_of_this_session: OtherRanks) -> Iterator[OtherRanks]:
    """The ranks beside the one in this process; those that a failed test left at work are ended."""
    from ..trainers import end_group

    end_group()  # this process is about to meet them in another
    yield ranks_of_this_session
    ranks_of_this_session.end_busy()
    end_group()
