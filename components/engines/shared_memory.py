"""A folder in shared memory through which weights reach an engine; it does not outlive the process that made it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "leeway-engine-"
RUN_PREFIX_ENV = "LEEWAY_MEMORY_PREFIX"
"""A longer one of the run's own, by which its ending finds what a killed engine leaves."""


class SharedFolder:
    """A new folder under `parent`, locked for as long as this process lives; those of dead processes are removed.

    A killed process removes nothing, but the kernel drops its lock: whoever gets the lock may remove the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
        remove_abandoned(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=os.environ.get(RUN_PREFIX_ENV, PREFIX), dir=parent))
            lock = _locked(self.path)
            if lock is not None and self.path.exists():  # nobody took it for abandoned before it was locked
                self._lock = lock
                return

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parent: Path) -> None:
    """Remove the folders under `parent` whose process is gone. Those of other users are left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock on `folder`; None where another process holds it, or it may not be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
