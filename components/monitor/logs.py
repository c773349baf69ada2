"""Every process of a run writes to its own file under `logs/`."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..failures import printable


class Printable(logging.Formatter):
    """What is logged may quote data, models and secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def say(text: str) -> None:
    """One line for the terminal."""
    print(f"leeway: {printable(text)}", flush=True)


def log_to_file(path: Path, level: str) -> None:
    """Send this process's output, that of its future children and its logging to `path` (appended)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # First, so that the log of a process that is killed at once still says which one it was.
    logging.getLogger("leeway").info("%s is process %d on %s", path.stem, os.getpid(), os.uname().nodename)
    for client in ("httpx", "httpx2"):  # a line for each request of each agent
        logging.getLogger(client).setLevel(logging.WARNING)


@contextmanager
def others_to_file(path: Path) -> Iterator[None]:
    """Within this context, libraries' stderr output goes to `path`, and Leeway's own warnings go to stdout.

    The terminal is reserved for the run's output. The file is removed if nothing was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    terminal, file = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 2)
    os.close(file)
    own = logging.StreamHandler(sys.stdout)
    own.setFormatter(Printable("leeway: %(levelname)s: %(message)s"))
    own.setLevel(logging.WARNING)
    ours = logging.getLogger("leeway")
    level = ours.level
    ours.setLevel(logging.WARNING)  # its own: a library may have set the root logger's
    ours.addHandler(own)
    try:
        yield
    finally:
        ours.removeHandler(own)
        ours.setLevel(level)
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        if path.exists() and not path.stat().st_size:
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()


def last_error(path: Path, *, but: str) -> str | None:
    """The last line of a log that names an exception and its message; lines that contain `but` are skipped."""
    if not path.exists():
        return None
    for line in reversed(path.read_text(errors="replace").splitlines()):
        said = re.search(r"(?:^|\s)(?:\w+\.)*(\w*(?:Error|Exception): \S.*)$", line)
        if said is not None and but not in line:
            return said[1]
    return None


def tail(path: Path, num_lines: int = 30) -> str:
    """The last lines of a log, for an error message; empty when there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
