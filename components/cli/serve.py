"""`leeway serve`: a model, or a run's newest weights, behind one OpenAI-compatible address."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..config import ConfigError
from ..driver.serve_plan import plan_serving
from ..failures import printable


def serve(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="The folder of a run or of one of its checkpoints, or a model.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, e.g. serve.port=8001."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, metavar="N", help="Of a run: the checkpoint of this step, not the newest."),
    ] = None,
) -> None:
    """Serve a model, or a run's newest weights, to OpenAI's clients, until Ctrl-C.

    Example: leeway serve runs/leeway/quickstart rollout.num_generators=2
    """
    scratch = Path(tempfile.mkdtemp(prefix="leeway-serve-"))
    code = 2
    try:
        try:
            stage = plan_serving(target, step, overrides or [], scratch)
        except ConfigError:
            raise
        except ValueError as error:
            print(f"leeway: refused: {printable(' '.join(str(error).split()))}", file=sys.stderr)
            raise typer.Exit(2) from None
        for note in stage.notes:
            print(f"leeway: note: {note}")
        runner = importlib.import_module("leeway.driver.runner")
        code = runner.run_stages([stage], stage.dir, target, sys.argv, is_scratch=stage.dir == scratch)
    finally:
        if code != 1:  # keep the logs of a failure
            shutil.rmtree(scratch, ignore_errors=True)
    raise typer.Exit(code)
