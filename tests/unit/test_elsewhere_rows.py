"""docs/from_elsewhere.md: every row of its tables has a command that holds, or says why there is none."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from leeway.cli.main import app
from leeway.config import plan_run

ROOT = Path(__file__).resolve().parents[2]
TABLES = (
    (ROOT / "docs/from_elsewhere.md").read_text(encoding="utf-8").split("\n## What is where\n")[1].split("\n## ")[0]
)
ROWS = [line for line in re.findall(r"^\| (.+) \|$", TABLES, re.M) if not line.startswith(("there |", "---"))]
COMMAND = re.compile(r"`(leeway [^`]+)`")
COMMANDS = [command for row in ROWS for command in COMMAND.findall(row)]


def arguments(command: str) -> tuple[str, dict[str, Any]]:
    """The subcommand and its parameters, as the program itself parses them; nothing is run."""
    _, name, *rest = shlex.split(command)
    program: Any = typer.main.get_command(app)
    return name, program.commands[name].make_context(name, rest).params


def test_the_tables_are_those_of_three_systems() -> None:
    assert re.findall(r"^### (.+)$", TABLES, re.M) == ["Trinity-RFT", "veRL", "torchtune"]
    assert len(ROWS) > 100
    assert all(row.count(" | ") == 1 for row in ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_command_or_a_reason(row: str) -> None:
    _, here = row.split(" | ")
    assert COMMAND.search(here) or re.match(r"not here, because .{20,}", here), row


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_holds(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, given = arguments(command)
    if name == "run":
        stages = plan_run(given["config"], given["recipe"], given["overrides"] or [])
        assert stages[-1].recipe.name == given["recipe"]
