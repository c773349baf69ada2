"""Every process of a run writes to a file of its own under `logs/`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


def log_to_file(path: Path, level: str) -> None:
    """Send this process's output, that of its future children and its logging to `path` (appended)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for client in ("httpx", "httpx2"):  # a line for each request of each agent
        logging.getLogger(client).setLevel(logging.WARNING)


def tail(path: Path, num_lines: int = 30) -> str:
    """The last lines of a log, for an error message; empty when there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
