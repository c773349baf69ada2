"""`leeway ps` and `leeway scale`: the parts of a run that is running, through files in its folder."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import ConfigError
from ..driver.run_record import RunIsRunning, check_not_running
from ..failures import printable
from ..monitor.jsonl import write_text_atomically
from ..runtime.parts_files import MOST_GENERATORS, PARTS, SCALE, read_json

STALE_S = 30.0
"""A stage that can be scaled writes every two seconds."""
ANSWER_S = 15.0
"""It answers at its next write, unless it follows an earlier request."""
POLL_S = 0.2
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, e.g. runs/leeway/quickstart.")]


def ps(run: Run) -> None:
    """Show the parts of a run: host, process, state, the version that is served, and the groups in flight.

    Example: leeway ps runs/leeway/quickstart
    """
    seen = _seen(run)
    columns = {"part": "role", "host": "host", "pid": "pid", "state": "state", "version": "policy_version"}
    columns["groups"] = "groups"
    rows = [list(columns), *([str(part.get(key, "")) for key in columns.values()] for part in seen["parts"])]
    age_s = time.time() - seen["time"]
    state = "; the stage has ended" if seen.get("is_over") else ""
    state = state if _is_running(run) else "; it is not running now"
    print(printable(f"{run}, stage {seen['stage']}, {age_s:.0f} s ago{state}"))
    print(printable(table_of(rows)))
    if seen["said"]:
        print(printable(seen["said"]))


def scale(
    run: Run,
    setting: Annotated[str, typer.Argument(metavar="generators=N", help="How many generators there shall be.")],
    now: Annotated[
        bool, typer.Option("--now", help="Those that leave do not finish what they hold; others are given it.")
    ] = False,
) -> None:
    """Change how many generators a running stage has. New ones serve when they have passed every check.

    Example: leeway scale runs/leeway/quickstart generators=2
    """
    name, _, value = setting.partition("=")
    if name != "generators" or not value.isdecimal() or not 1 <= int(value) <= MOST_GENERATORS:
        expected = f"generators=N, N from 1 to {MOST_GENERATORS}"
        raise ConfigError("leeway scale", got=setting, expected=expected, fix="e.g. generators=2")
    seen = _seen(run)
    if not _is_running(run):
        raise ConfigError("RUN", got=str(run), expected="a run that is running", fix=f"leeway resume {run}")
    if seen.get("is_over") or time.time() - seen["time"] > STALE_S:
        got, expected = f"{run}, whose stage {seen['stage']} has ended", "a run that is training on rollouts now"
        raise ConfigError("RUN", got=got, expected=expected, fix="wait for such a stage")
    asked = secrets.token_hex(8)
    write_text_atomically(run / SCALE, json.dumps({"generators": int(value), "at_once": now, "id": asked}) + "\n")
    refusal = _answer(run, asked)
    if refusal is None:
        return print(printable(f"leeway: asked for {value} generators; it has not answered yet, see leeway ps {run}"))
    if refusal:
        expected = f"{seen['generators']} as it is: {refusal}"
        raise ConfigError("generators", got=int(value), expected=expected, fix=f"see leeway ps {run}")
    print(printable(f"leeway: generators: {seen['generators']} -> {value}, under way; see leeway ps {run}"))


def _answer(run: Path, asked: str) -> str | None:
    """Why a request is not followed, "" if it is; None: the run follows an earlier one until then."""
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        seen = read_json(run / PARTS)
        answered = seen.get("answered") or {}
        if answered.get("id") == asked:
            return str(answered.get("refusal", ""))
        if seen.get("is_over") or not _is_running(run):  # it was not seen: nobody shall follow it later
            (run / SCALE).unlink(missing_ok=True)
            return "the stage has ended"
        time.sleep(POLL_S)
    return None


def table_of(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _seen(run: Path) -> dict[str, Any]:
    seen = read_json(run / PARTS)
    if not isinstance(seen.get("parts"), list):
        expected = "the folder of a run whose training has begun"
        raise ConfigError("RUN", got=f"{run} (no {PARTS} in it)", expected=expected, fix="e.g. runs/leeway/quickstart")
    return seen


def _is_running(run: Path) -> bool:
    try:
        check_not_running(run)
    except RunIsRunning:
        return True
    return False
