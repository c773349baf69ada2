"""`leeway prepare`: the tasks of a config through Data-Juicer's operators, into a file that a run reads."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..config import ConfigError, plan_run
from ..config.paths import user_path
from ..config.text import MAX_BYTES, TextError, parse_yaml
from ..failures import printable

IGNORED = ("project_name", "dataset_path", "export_path", "np", "text_keys", "open_tracer")
"""Of a config of Data-Juicer: where its data is, and how many processes it takes, which the rest does not depend on."""


def prepare(
    config: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A config; its `task` says how rows are read.")],
    operators: Annotated[
        Path, typer.Argument(metavar="OPERATORS", help="A YAML file with `process:`, as Data-Juicer's own configs.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The jsonl file to write; it must not exist.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, e.g. task.limit=1000.")
    ] = None,
    text: Annotated[
        Literal["prompt", "answer"], typer.Option("--text", help="What the operators see of a row.")
    ] = "prompt",
) -> None:
    """Prepare tasks before a run: leave out and rewrite rows with Data-Juicer's operators (the extra `data-juicer`).

    Example: leeway prepare mine.yaml operators.yaml data/prepared.jsonl && leeway run async_rl --config mine.yaml
    task.name=jsonl task.path=data/prepared.jsonl
    """
    (stage,) = plan_run(config, "score_tasks", overrides or [])[-1:]
    file = user_path(out)
    if file.exists():
        raise ConfigError("OUT", got=str(out), expected="a file that does not exist yet", fix="name another")
    if not file.absolute().parent.is_dir():
        raise ConfigError("OUT", got=str(out), expected="a file in a folder that exists", fix="make the folder")
    process = _process(user_path(operators))
    tasks: Any = importlib.import_module("leeway.tasks.prepare")
    task = stage.config.task
    try:
        total, rows = tasks.prepared(task, process, seed=stage.config.seed, text=text)
    except (ValueError, FileNotFoundError) as error:
        print(printable(f"leeway: refused: {error}"), file=sys.stderr)
        raise typer.Exit(2) from None
    tasks.write_rows(file, task, ((row, {}) for row in rows))
    print(printable(f"{len(rows)} of {total} tasks are left: task.name=jsonl task.path={out}"))


def _process(file: Path) -> list[Any]:
    try:
        with file.open(encoding="utf-8") as opened:
            tree: Any = parse_yaml(opened.read(MAX_BYTES + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("OPERATORS", got=str(file), expected="a YAML file", fix=str(error)) from None
    except TextError as error:
        raise ConfigError("OPERATORS", got=str(file), expected="YAML", fix=str(error)) from None
    if not isinstance(tree, dict) or "process" not in tree:
        raise ConfigError("OPERATORS", got=str(file), expected="a mapping with `process`", fix="write process: [...]")
    if unknown := sorted(str(key) for key in tree if key not in ("process", *IGNORED)):
        raise ConfigError(
            f"{file.name}: {unknown[0]}", got=tree[unknown[0]], expected="`process` alone", fix="leave it out"
        )
    return tree["process"]
