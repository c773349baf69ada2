"""The folder in which the jobs of a run meet. Whoever can write it takes part in the run: it is for its jobs alone.

    FOLDER/train.json                     the train job: who it is, what must be equal, a beat every second
    FOLDER/model/                         config and tokenizer (and the weights to start with)
    FOLDER/weights/                       versions of the policy (`transports.files`)
    FOLDER/groups/                        finished groups (`store`)
    FOLDER/explorers/NAME/explorer.json   an explorer: its session, its state, a beat every second
    FOLDER/explorers/NAME/calls/          what it asks of the replay buffer: SESSION-NUMBER.json, .groups beside it
    FOLDER/explorers/NAME/answers/        the answers, under the same names; each side removes what it has read

Files are renamed into place when they are whole, nothing is locked, and no clock of one host is compared with that of
another: so any file system that renames atomically will do, shared by whatever means.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..failures import Refused

UP, STOPPED, ENDED, LEFT = "up", "stopped", "ended", "left"
"""States of a job: at work; gone, and may come back; done, for good. An explorer that has `LEFT` may come back too."""
TRAINERS, OWN, CLIENTS = "trainer", "own", "clients"
"""What an explorer makes groups of: the train job's tasks, its own, or what clients of its address commit."""
BEAT_S = 1.0
"""How often each side gives a sign of life."""
ALIVE_S = 5.0
MOST_JSON_BYTES = 1 << 24
MOST_GROUP_BYTES = 1 << 32
MOST_VERSIONS = 1 << 62
MOST_LIVES = 1000


class Meeting:
    """The paths in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.train = folder / "train.json"
        self.model = folder / "model"
        self.weights = folder / "weights"
        self.groups = folder / "groups"
        self.explorers = folder / "explorers"

    def explorer(self, name: str) -> ExplorerFiles:
        return ExplorerFiles(self.explorers / name)

    def all_explorers(self) -> list[ExplorerFiles]:
        try:
            with os.scandir(self.explorers) as entries:
                return [ExplorerFiles(Path(e.path)) for e in entries if e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []


class ExplorerFiles:
    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.folder = folder
        self.about = folder / "explorer.json"
        self.calls = folder / "calls"
        self.answers = folder / "answers"


def good_until(lives: list[Any], life: str) -> int:
    """The newest policy version of this life of the train job whose weights every later life has continued from; -1 if
    it is unknown. `lives`: (life, the version that it began with) of each, oldest first.
    """
    names = [str(name) for name, _ in lives]
    if life not in names:
        return -1
    return min([MOST_VERSIONS, *(int(began) for _, began in lives[names.index(life) + 1 :])])


@contextmanager
def claimed(meeting: Meeting, key: str) -> Iterator[None]:
    """Be the only train job there, until the end of the context. Raises Refused, naming `key`, while there is another.

    A lock tells of one on this host. Not every shared disk has locks, so that of another host is known by its beats.
    """
    meeting.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(meeting.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        about = read_json(meeting.train) or {}
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = about.get("host") == socket.gethostname() or seen_alive(meeting) is None
        except OSError:
            is_free = False
        if not is_free:
            raise Refused(
                f"{key}: got {meeting.folder}, where a train job is running (process {about.get('pid')} on "
                f"{str(about.get('host'))[:80]}); expected a folder of this run's own"
            )
        yield
    finally:
        os.close(lock)


def seen_alive(meeting: Meeting) -> dict[str, Any] | None:
    """What the train job says of itself, if it gives signs of life; None takes some seconds where one was killed."""
    first = read_json(meeting.train)
    deadline = time.monotonic() + ALIVE_S
    while first is not None and first.get("state") == UP and time.monotonic() < deadline:
        time.sleep(BEAT_S / 10)
        now = read_json(meeting.train)
        if now is not None and now.get("beat") != first.get("beat"):
            return now
    return None


class Beats:
    """Whether somebody whose counter one reads is alive. Only this process's own clock is asked."""

    def __init__(self, silent_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._silent_s, self._now = silent_s, now
        self._last: object = None
        self._since = now()

    def saw(self, beat: object) -> None:
        if beat != self._last:
            self._last, self._since = beat, self._now()

    @property
    def silent_for_s(self) -> float:
        return self._now() - self._since

    @property
    def is_silent(self) -> bool:
        return self.silent_for_s > self._silent_s


def write_whole(path: Path, data: bytes) -> None:
    """On disk before it is seen, and seen whole or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """None: there is no such file (now). Raises ValueError for a file that no job of ours has written."""
    data = read_bytes(path, MOST_JSON_BYTES)
    if data is None:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: no JSON object")
    return content


def read_bytes(path: Path, most: int) -> bytes | None:
    """None: there is no such file (now). Raises ValueError for one that is no file, too large, or cannot be read."""
    try:
        with open_file(path) as (file, size):
            if size > most:
                raise ValueError(f"{path}: no file of at most {most} bytes")
            return file.read(most + 1)
    except FileNotFoundError:
        return None
    except OSError as error:  # on a shared disk, also one that was replaced in this moment
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


@contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """(the file, its size in bytes). Raises ValueError for what is no file, or a link to one; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path}: no file")
        yield file, about.st_size
