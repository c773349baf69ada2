"""`leeway import`: a config of Trinity-RFT, veRL or torchtune as one of ours."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..config import ConfigError
from ..config.errors import words
from ..failures import printable


def import_config(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="trinity, verl or torchtune.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Their YAML; for veRL also the shell script that starts the run.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of theirs, as on their command line.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where the config goes. Default: it is printed.")
    ] = None,
) -> None:
    """Turn another system's config into ours, and say what became of each key.

    Nothing is run: files are read as data. The exit code is 0 if every key means something here or changes nothing, 1
    if something was refused or is unknown (the config is written all the same), and 2 if the file cannot be read.

    Example: leeway import verl run_qwen2-7b.sh trainer.total_epochs=3 -o mine.yaml
    """
    from ..elsewhere import importer

    if system not in importer.SYSTEMS:
        known = ", ".join(importer.SYSTEMS)
        raise ConfigError("SYSTEM", got=system, expected=f"one of {known}", fix="e.g. leeway import verl FILE")
    if out is not None and out.exists():
        raise ConfigError("--out", got=words(f"{out}, which exists"), expected="a new file", fix="choose another name")
    found = importer.import_file(system, file.expanduser(), overrides or [])
    command = shlex.join(["leeway", "import", system, str(file), *(overrides or [])])
    text = importer.as_yaml(found, command) if found.tree else ""
    if out is None:
        print(text)
    elif text:
        out.write_text(text, encoding="utf-8")
    typer.echo(importer.as_table(found), err=out is None)
    for name in found.missing:
        typer.echo(f"leeway: needs the environment variable {name}", err=out is None)
    if found.problem is not None:
        typer.echo(f"leeway: refused: {printable(found.problem)}", err=True)
    if out is not None and text:
        print(f"{out}: leeway run {found.recipe} --config {out}")
    if not found.is_whole:
        raise typer.Exit(1)
