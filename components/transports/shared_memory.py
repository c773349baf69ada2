"""A folder in shared memory through which weights reach an engine; it does not outlive the process that made it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
            if lock is not None:
                os.close(lock)

    def new_name(self) -> str:
        """Of a folder inside, for the files of one version."""
        return Path(tempfile.mkdtemp(dir=self.path)).name

    def new_file(self, name: str, index: int, num_bytes: int) -> np.ndarray:
        """One more file in the folder of that name, mapped as a uint8 array. Raises OSError if there is no room."""
        try:
            return _new_file(self.path / name / bucket_name(index), num_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.path.parent} has no room for {num_bytes} bytes of a published version ({error.strerror}); "
                "enlarge it, or free some of it",
            ) from None

    def new_files(self, sizes: Sequence[int]) -> tuple[str, list[np.ndarray]]:
        """A new folder inside, with a file of each size (bytes). Raises OSError if there is no room for all of them."""
        name = self.new_name()
        try:
            return name, [self.new_file(name, index, size) for index, size in enumerate(sizes)]
        except OSError:
            self.remove_files(name)
            raise

    def link_files(self, files: Sequence[Path]) -> tuple[str, list[np.ndarray]]:
        """The same with files that are in this memory already: they are mapped here too, and stay as they are."""
        name = self.new_name()
        try:
            for index, file in enumerate(files):
                os.link(file, self.path / name / bucket_name(index))
            return name, [mapped(self.path / name / bucket_name(index)) for index in range(len(files))]
        except OSError:
            self.remove_files(name)
            raise

    def remove_files(self, name: str) -> None:
        """Who has them mapped keeps the memory until it lets go."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def bucket_name(index: int) -> str:
    return f"{index:05d}.bucket"


def mapped(file: Path) -> np.ndarray:
    """A file's bytes, uint8. What is written into them is not written into the file."""
    if not file.stat().st_size:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(file, dtype=np.uint8, mode="c")


def _new_file(path: Path, size: int) -> np.ndarray:
    if not size:
        path.touch()
        return np.empty(0, dtype=np.uint8)
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # else a write where no memory is left would kill this process
        return np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))


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
