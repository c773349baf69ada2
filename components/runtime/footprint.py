"""What a run occupies on this machine, and its removal: processes, shared memory, sockets, temporary files.

Everything that a run starts inherits two variables: a mark, by which its processes are found wherever their parents
went, and TMPDIR, a scratch folder in which Ray, vLLM and everything else that uses `tempfile` keeps sockets and files.
Nothing that belongs to another run is ever touched. Loads the standard library only: the guardian runs it too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

MARK_ENV = "LEEWAY_RUN"
PREFIX_ENV = "LEEWAY_MEMORY_PREFIX"
SHARED_MEMORY = Path("/dev/shm")
# Ray's sockets lie 70 characters below the scratch folder, and a socket's path has at most 107.
LONGEST_SCRATCH = 36
LARGEST_LOG_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Footprint:
    """`mark`: what every process of the run has in its environment. `scratch`: the folder of its temporary files."""

    mark: str
    scratch: Path

    @classmethod
    def make(cls) -> Footprint:
        """A new scratch folder; nothing is marked yet."""
        folder = Path(tempfile.mkdtemp(prefix="leeway-"))
        if len(str(folder)) > LONGEST_SCRATCH and os.access("/tmp", os.W_OK):
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="leeway-", dir="/tmp"))
        return cls(secrets.token_hex(8), folder)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Processes that this process starts inside belong to the run."""
        before = dict(os.environ)
        # Compiled kernels outlive a run: they stay where they would be without it.
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
        os.environ[MARK_ENV] = self.mark
        # Ray and vLLM give their processes titles (setproctitle), by default in the memory of the environment too, from
        # where the kernel reads it to us: the mark would be gone.
        os.environ["SPT_NOENV"] = "1"
        os.environ[PREFIX_ENV] = self.memory_prefix
        os.environ["TMPDIR"] = str(self.scratch)
        try:
            yield
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})

    def process_ids(self) -> list[int]:
        """Living processes that were started with the mark; never the caller, nor its resource tracker.

        That one ends with the caller. If it is killed before, the caller complains at its end.
        """
        return marked(self.mark)

    def shared_memory(self) -> set[Path]:
        """Files in shared memory that the run's processes have open now: whoever is killed cannot remove them."""
        mapped = {number for pid in self.process_ids() for number in _mapped(pid)}
        return _files_of(mapped) | set(SHARED_MEMORY.glob(f"{self.memory_prefix}*"))

    @property
    def memory_prefix(self) -> str:
        """The prefix of the run's own files and folders in shared memory."""
        return f"leeway-engine-{self.mark}-"

    def remove(self, shared_memory: Iterable[Path] = (), *, within_s: float = 15.0) -> list[int]:
        """Kill all processes and remove all files; `shared_memory`: files that were seen in use before.

        Returns the ids of processes that are still there after `within_s`, because the kernel cannot end them.
        """
        deadline = time.monotonic() + within_s
        files = set(shared_memory) | self.shared_memory()
        while (left := self.process_ids()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            time.sleep(0.05)
        files |= set(SHARED_MEMORY.glob(f"{self.memory_prefix}*"))
        for path in files - _in_use():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return left

    def keep_ray_logs(self, folder: Path) -> None:
        """Copy what Ray and the processes that it started have written, before it is removed."""
        for source in sorted(self.scratch.glob("ray/session_2*/logs/*")):
            if source.is_file() and 0 < source.stat().st_size <= LARGEST_LOG_BYTES:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, folder / source.name)


def marked(mark: str) -> list[int]:
    """The processes of `Footprint.process_ids`, by the mark alone."""
    wanted = f"{MARK_ENV}={mark}".encode()
    own = {os.getpid(), getattr(resource_tracker._resource_tracker, "_pid", None)}
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) not in own:
            try:
                with open(f"/proc/{entry.name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(entry.name))
            except OSError:  # it has ended, or belongs to another user
                continue
    return found


def _mapped(pid: int) -> set[int]:
    """Inode numbers of the files of shared memory in a process's address space.

    Not names: a semaphore gets its name after it is mapped, and the map shows another.
    """
    found = set()
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                if b" /dev/shm/" in line:
                    found.add(int(line.split(None, 5)[4]))
    except OSError:
        pass
    return found


def _files_of(numbers: set[int]) -> set[Path]:
    """The files of shared memory with these inode numbers that still have a name."""
    if not numbers or not SHARED_MEMORY.is_dir():
        return set()
    return {SHARED_MEMORY / entry.name for entry in os.scandir(SHARED_MEMORY) if entry.inode() in numbers}


def _in_use() -> set[Path]:
    """What any living process has mapped: a program that shares the memory may still use it."""
    return _files_of({n for entry in os.scandir("/proc") if entry.name.isdigit() for n in _mapped(int(entry.name))})


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return str(os.getuid())
