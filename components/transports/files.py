"""Weights in a folder, which other jobs and other hosts may read.

    FOLDER/v000012-1f0c9a3e/bucket-00000.bin ...   raw bytes, as the manifest says
    FOLDER/v000012-1f0c9a3e/manifest.json
    FOLDER/newest.json                             the versions that are there, oldest first, replaced atomically

A version is written under another name and renamed when it is on disk, so that a reader sees all of it or nothing,
whenever the writer is killed. Readers lock nothing: one that is slower than the last `keep` versions loses its files
and asks again. Whoever can write the folder can write weights that fit their own manifest. A run is not fooled by
that, because its manifests travel on another way, and their checksums are SHA-256 by default here.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from io import FileIO
from pathlib import Path

import numpy as np

from ..weights import Manifest, Publication
from .transport import Held, TransportSettings

NEWEST = "newest.json"
VERSION = re.compile(r"v\d{6,}-[0-9a-f]{8}")
PARTIAL = ".partial-"
MOST_JSON_BYTES = 1 << 28
DEFAULT_KEEP = 2


class Files:
    """`keep` is raised to the number of versions that a run asks for. A reader never writes."""

    uses_held = False
    memory_bytes = 0

    def __init__(self, folder: Path, *, keep: int, fsync: bool = True) -> None:
        self.folder = folder
        self.keep = keep
        self._fsync = fsync
        self._lock: int | None = None

    @classmethod
    def open(cls, settings: TransportSettings) -> Files:
        o = settings.options
        folder = Path(o["folder"]).expanduser() if "folder" in o else settings.folder / "weights"
        return cls(folder.absolute(), keep=max(o.get("keep", DEFAULT_KEEP), settings.keep), fsync=o.get("fsync", True))

    def places(self, publication: Publication) -> tuple[()]:
        return ()

    def begin(self, policy_version: int) -> _Writing:
        if self._lock is None:
            self._claim(policy_version)
        return _Writing(self, policy_version)

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        await asyncio.to_thread(read_whole, Path(publication.bucket_refs[index]), into)
        return into.nbytes

    def close(self) -> None:
        """Another run may write this folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self, policy_version: int) -> None:
        """One writer at a time, which begins with this version. What a killed one left unfinished is removed; its whole
        versions before this one may still be read, and the others are of weights that have been given up.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise RuntimeError(
                f"param_server.transport_options.folder: {self.folder} is written by another run, expected a folder "
                "of this run's own; choose another"
            ) from None
        self._lock = lock
        there = _versions(self.folder)
        kept = [version for version in there if version[0] < policy_version]
        if kept != there:
            self._replace(self.folder / NEWEST, json.dumps({"versions": kept}).encode())
        known = {name for _, name, _ in kept}
        for entry in os.scandir(self.folder):
            left = entry.name.startswith(PARTIAL) or (VERSION.fullmatch(entry.name) and entry.name not in known)
            if left and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)

    def _announce(self, policy_version: int, name: str, sha256: str) -> None:
        versions = [*_versions(self.folder), (policy_version, name, sha256)]
        gone, kept = versions[: -self.keep], versions[-self.keep :]
        self._replace(self.folder / NEWEST, json.dumps({"versions": kept}).encode())
        for _, old, _ in gone:
            shutil.rmtree(self.folder / old, ignore_errors=True)  # whose removal fails is removed by the next writer

    def _replace(self, path: Path, content: bytes) -> None:
        partial = path.with_name(f"{PARTIAL}{path.name}")
        with partial.open("wb") as file:
            file.write(content)
            self._to_disk(file.fileno())
        partial.replace(path)
        self._folder_to_disk(path.parent)

    def _to_disk(self, descriptor: int) -> None:
        if self._fsync:
            os.fsync(descriptor)

    def _folder_to_disk(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._to_disk(descriptor)
        finally:
            os.close(descriptor)


class _Writing:
    def __init__(self, files: Files, policy_version: int) -> None:
        self._files = files
        # A resumed run may make a version that an earlier life of it has made: its name is another.
        self._name = f"v{policy_version:06d}-{secrets.token_hex(4)}"
        self._partial = files.folder / f"{PARTIAL}{self._name}"
        self._partial.mkdir()
        self._names: list[str] = []

    def put(self, bucket: np.ndarray) -> None:
        name = f"bucket-{len(self._names):05d}.bin"
        with (self._partial / name).open("wb") as file:
            file.write(bucket.data)
            file.flush()
            self._files._to_disk(file.fileno())
        self._names.append(name)

    def commit(self, manifest: Manifest) -> Publication:
        files, content = self._files, manifest.to_json().encode()
        files._replace(self._partial / "manifest.json", content)
        folder = files.folder / self._name
        self._partial.rename(folder)
        files._folder_to_disk(files.folder)
        files._announce(manifest.policy_version, self._name, hashlib.sha256(content).hexdigest())
        return Publication(manifest, [str(folder / name) for name in self._names])

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


def newest_publication(folder: Path, *, newer_than: int = -1, at_most: int | None = None) -> Publication | None:
    """What another job reads: the newest whole version in `folder`; None if it is not newer than `newer_than`.

    `at_most`: no newer one than this, because only up to there they are known to be of this life of the run.

    Raises ValueError for a folder whose files do not belong together, or are no such files at all.
    """
    for policy_version, name, sha256 in reversed(_versions(folder)):
        if policy_version <= newer_than:
            return None
        if at_most is not None and policy_version > at_most:
            continue
        content = _read_json(folder / name / "manifest.json")
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"{folder / name}: manifest.json does not match its SHA-256 in {NEWEST}")
        manifest = Manifest.from_json(content)
        if manifest.policy_version != policy_version:
            raise ValueError(f"{folder / name}: holds version {manifest.policy_version}, expected {policy_version}")
        if manifest.entries:  # else differences, which mean nothing by themselves
            names = [f"bucket-{index:05d}.bin" for index in range(len(manifest.bucket_bytes))]
            return Publication(manifest, [str(folder / name / bucket) for bucket in names])
    return None


def _versions(folder: Path) -> list[tuple[int, str, str]]:
    """(policy version, folder's name, SHA-256 of its manifest) of every version that is announced, oldest first."""
    if not (folder / NEWEST).exists():
        return []
    try:
        given = json.loads(_read_json(folder / NEWEST))["versions"]
        versions = [(int(version), str(name), str(sha256)) for version, name, sha256 in given]
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(f"{folder / NEWEST}: not a list of published versions: {error}") from None
    for _, name, _ in versions:
        if not VERSION.fullmatch(name):
            raise ValueError(f"{folder / NEWEST}: got the version {name[:60]!r}, expected a name like v000012-1f0c9a3e")
    return versions


def _read_json(path: Path) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_JSON_BYTES:
            raise ValueError(f"{path}: {size} bytes, expected at most {MOST_JSON_BYTES}")
        return file.read(size)


def read_whole(path: Path, into: np.ndarray) -> None:
    """Read a file into memory of exactly its size. Raises OSError or ValueError naming the file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != into.nbytes:
            raise ValueError(f"{path.name} has {size} bytes, expected {into.nbytes}")
        memory, filled = memoryview(into.data), 0
        while filled < size:
            filled += (got := file.readinto(memory[filled:]))
            if not got:
                raise ValueError(f"{path.name} ended after {filled} bytes, expected {size}")


def open_regular(path: Path) -> FileIO:
    """To read. A regular file, never a link, a pipe or a device. Raises OSError or ValueError naming it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is not a file")
    return FileIO(descriptor, "r")
