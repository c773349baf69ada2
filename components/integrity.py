"""Files that are checked before they are believed: a checksum over every byte, and nothing in them that could run.

    SummedFile     written front to back; the SHA-256 of each block is computed on the way, without a second read
    SummedReader   any range of such a file; each block is checked before one of its bytes is handed out
    sealed         a JSON object as text that begins with its own SHA-256; `read_sealed` checks it

The aim is damage: a flipped bit, a lost block, a file of another checkpoint. It is no signature: whoever writes the
files can write their checksums. So what is read here is also treated as hostile: regular files only, no symbolic
links, limits on size, JSON and raw numbers.
SHA-256 does 1.5 GB/s on one core that has instructions for it: of a state of 18 GB, each of 8 ranks hashes for 1.5 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_BYTES = 16 << 20
MAX_SEALED_BYTES = 256 << 20
"""The largest JSON file that is read or written: parsed, it takes up to twenty times its size."""
CHECKSUMS_FILE = "checksums.json"
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DamagedFileError(ValueError):
    """A file is not the one that was written. One line that begins with its path."""


@dataclass(frozen=True)
class FileSums:
    """What a file must be: its size, and the SHA-256 of each block of `BLOCK_BYTES` (the last one is shorter)."""

    num_bytes: int
    sha256: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": list(self.sha256)}

    @staticmethod
    def from_json(value: Any, *, whose: str) -> FileSums:
        """Raises `DamagedFileError`, naming the file `whose` that holds `value`, for anything but sizes and digests."""
        sums = value if isinstance(value, dict) else {}
        size, digests = sums.get("bytes"), sums.get("sha256")
        if type(size) is not int or not 0 <= size < 2**60 or not isinstance(digests, list):
            raise DamagedFileError(f"{whose}: got {str(value)[:80]}, expected the size and checksums of a file")
        if len(digests) != -(-size // BLOCK_BYTES) or not all(_is_digest(digest) for digest in digests):
            raise DamagedFileError(f"{whose}: {len(digests)} checksums, expected one for each {BLOCK_BYTES} bytes")
        return FileSums(size, tuple(digests))


class SummedFile:
    """A new file, written from front to back. `close` flushes it to disk and returns its sums."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._block, self._num_bytes = hashlib.sha256(), 0
        self._sha256: list[str] = []

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            part = view[: BLOCK_BYTES - self._num_bytes % BLOCK_BYTES]
            self._block.update(part)
            self._file.write(part)
            self._num_bytes += len(part)
            if self._num_bytes % BLOCK_BYTES == 0:
                self._end_block()
            view = view[len(part) :]

    def close(self) -> FileSums:
        if self._num_bytes % BLOCK_BYTES:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileSums(self._num_bytes, tuple(self._sha256))

    def _end_block(self) -> None:
        self._sha256.append(self._block.hexdigest())
        self._block = hashlib.sha256()


class SummedReader:
    """Ranges of a file, checked against its sums. Raises `DamagedFileError`, naming the file."""

    def __init__(self, path: Path, sums: FileSums, *, follow: bool = False) -> None:
        self._path, self._sums = path, sums
        self._descriptor = open_regular(path, follow=follow)
        self._last: tuple[int, bytes] = (-1, b"")  # small tensors lie side by side in one block
        if (size := os.fstat(self._descriptor).st_size) != sums.num_bytes:
            self.close()
            raise DamagedFileError(f"{path}: {size} bytes, {sums.num_bytes} were written")

    def __enter__(self) -> SummedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill `memory` (bytes) with the file's content from `start` on."""
        filled = 0
        while filled < len(memory):
            index, offset = divmod(start + filled, BLOCK_BYTES)
            part = self._block(index)[offset : offset + len(memory) - filled]
            assert part, "ranges are checked against the file's size before they are read"
            memory[filled : filled + len(part)] = part
            filled += len(part)

    def check_all(self) -> None:
        for index in range(len(self._sums.sha256)):
            self._block(index)

    def _block(self, index: int) -> bytes:
        if self._last[0] != index:
            data = os.pread(self._descriptor, BLOCK_BYTES, index * BLOCK_BYTES)
            if hashlib.sha256(data).hexdigest() != self._sums.sha256[index]:
                raise DamagedFileError(
                    f"{self._path}: bytes {index * BLOCK_BYTES} to {index * BLOCK_BYTES + len(data)} do not match "
                    "their SHA-256: they are not what was written"
                )
            self._last = (index, data)
        return self._last[1]


def sums_of(path: Path) -> FileSums:
    """Those of a (small) file that another library wrote."""
    digests, size = [], 0
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            digests.append(hashlib.sha256(data).hexdigest())
            size += len(data)
    return FileSums(size, tuple(digests))


def sealed(data: Mapping[str, Any]) -> str:
    """`data` as one line of JSON whose first entry is the SHA-256 of what follows it."""
    assert data, "an empty object has nothing to seal"
    assert "sha256" not in data, "the name is taken"
    body = json.dumps(data)[1:] + "\n"
    if len(body) > MAX_SEALED_BYTES - 128:  # json.dumps writes ASCII
        raise ValueError(f"{len(body)} bytes of JSON, expected at most {MAX_SEALED_BYTES}: it could not be read again")
    return f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}", {body}'


def read_sealed(path: Path) -> dict[str, Any]:
    """What was `sealed`, with the entry sha256. Raises `DamagedFileError` for any other file, by its path."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if (size := os.fstat(descriptor).st_size) > MAX_SEALED_BYTES:
            raise DamagedFileError(f"{path}: {size} bytes, expected at most {MAX_SEALED_BYTES}")
        content = file.read(MAX_SEALED_BYTES)
    seal = _SEAL.match(content)
    if seal is None:
        raise DamagedFileError(f"{path}: it does not begin with its own SHA-256, expected a file written by Leeway")
    if hashlib.sha256(memoryview(content)[seal.end() :]).hexdigest() != seal[1].decode():
        raise DamagedFileError(f"{path}: it does not match its own SHA-256: it is not what was written")
    try:
        data = json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: no JSON ({' '.join(str(error).split())[:120]})") from None
    assert isinstance(data, dict), "it begins with a brace"
    return data


def write_checksums(folder: Path, known: Mapping[str, FileSums]) -> None:
    """Seal what every file of `folder` must be; `known`: of those that were summed while they were written."""
    others = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in known]
    files = {**known, **{path.name: sums_of(path) for path in others if path.name != CHECKSUMS_FILE}}
    (folder / CHECKSUMS_FILE).write_text(sealed({"files": {name: files[name].as_json() for name in sorted(files)}}))


def check_folder(folder: Path) -> None:
    """Compare every file of a folder with what was written, if it says what that was. Raises `DamagedFileError`.

    Reads all of them. Symbolic links are followed: caches keep files that way, and what is read is only hashed.
    """
    note = folder / CHECKSUMS_FILE
    if not os.path.lexists(note):
        return
    files = read_sealed(note.resolve()).get("files")
    for name, value in (files if isinstance(files, dict) else {}).items():
        if not re.fullmatch(r"[\w][\w.\-]*", name):
            raise DamagedFileError(f"{note}: got the file name {name[:80]!r}, expected one of a file in this folder")
        sums = FileSums.from_json(value, whose=str(note))
        try:
            with SummedReader(folder / name, sums, follow=True) as reader:
                reader.check_all()
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}; if the change is yours, remove {note}") from None


def open_regular(path: Path, *, follow: bool = False) -> int:
    """A descriptor to read a file that is neither a symbolic link (unless `follow`) nor a pipe nor a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        why = "a symbolic link" if path.is_symlink() and not follow else error.strerror
        raise DamagedFileError(f"{path}: cannot be read ({why})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(f"{path}: no regular file")
    return descriptor


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a name is there twice")
    return data
