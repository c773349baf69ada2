"""`leeway watch`: a local page over runs that live, are finished or died."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs; several are overlaid."),
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")] = 0,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; the default is this machine alone.")] = (
        "127.0.0.1"
    ),
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let every user of this machine in; without --host only.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="The folders may not exist yet: wait for them.")] = False,
) -> None:
    """Show runs on a local page: who waits for whom, curves, lanes, every rollout, and what a dead run died of.

    Only files are read, at the lowest priority; nothing is asked of the run.

    Example: leeway watch runs/leeway/quickstart
    """
    serve = importlib.import_module("leeway.watch.serve")
    serve.watch([run.expanduser() for run in runs], host=host, port=port, open_to_all=no_token, must_exist=not wait)


def watch_beside(run_dir: Path) -> None:
    """Start `leeway watch` for a run that this process is about to run; it ends with this process."""
    package = Path(sys.modules["leeway"].__file__ or "").absolute().parents[1]
    subprocess.Popen(
        # -P: no module in the working directory can shadow one of Python's own.
        [sys.executable, "-P", "-c", "from leeway.cli.main import main; main()", "watch", "--wait", str(run_dir)],
        env={**os.environ, "PYTHONPATH": str(package), "LEEWAY_WATCH_PARENT": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the driver
    )
