"""`leeway watch`: a local page over runs that live, are finished or died."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

END_S = 60.0
"""As long as the server waits for the thread that reads, at its end."""


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
    if has_autogroups() and os.getsid(0) != os.getpid():
        flags = [name for name, is_set in (("--no-token", no_token), ("--wait", wait)) if is_set]
        server = _in_its_own_session([f"--port={port}", f"--host={host}", *flags, "--", *map(str, runs)])
        raise typer.Exit(_until_it_ends(server))
    serve = importlib.import_module("leeway.watch.serve")
    serve.watch([run.expanduser() for run in runs], host=host, port=port, open_to_all=no_token, must_exist=not wait)


def watch_beside(run_dir: Path) -> None:
    """Start `leeway watch` for a run that this process is about to run; it ends with this process."""
    _in_its_own_session(["--wait", "--", str(run_dir)])


def has_autogroups() -> bool:
    """Whether Linux shares processors between sessions first: a priority then counts within a session alone, so one
    server in a terminal of its own would get half of a core that a run needs, whatever its priority.
    """
    try:
        return Path("/proc/sys/kernel/sched_autogroup_enabled").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


def _in_its_own_session(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """A server that can lower its session as a whole, that Ctrl-C does not reach, and that ends with this process."""
    package = Path(sys.modules["leeway"].__file__ or "").absolute().parents[1]
    return subprocess.Popen(
        # -P: no module in the working directory can shadow one of Python's own.
        [sys.executable, "-P", "-c", "from leeway.cli.main import main; main()", "watch", *arguments],
        env={**os.environ, "PYTHONPATH": str(package), "LEEWAY_WATCH_PARENT": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _until_it_ends(server: subprocess.Popen[bytes]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return server.wait()
    except KeyboardInterrupt:
        server.terminate()
        try:
            return server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            return server.wait()
