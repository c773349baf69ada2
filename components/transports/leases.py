"""Memory that its writer uses again and again, while other processes read it: who still reads, and what it holds now.

    the writer                                   a reader
    claim: nobody reads it; number + 1
    fill it, announce (path, number)    -->      Lease(path, number): a shared lock, and the number is still that
                                                 read; `check`: it still is, so nothing was written meanwhile
    claim: somebody reads it            <--      end

A lease is a lock of the kernel's on a small file, which ends with the process that holds it, however that ends: who is
dead keeps no memory. From one that lives and does not go on, memory is taken back: the number changes before the first
byte does, so whoever reads on finds that out.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from .transport import NotKept

NUMBER_BYTES = 8


class LeaseFile:
    """The writer's end. `number`: what readers are told, another one each time that the memory is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.number = 0
        self.take_back()

    def claim(self) -> bool:
        """Whether nobody reads it: then it may be written or freed, and nobody will begin to read what it held."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.take_back()
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def take_back(self) -> None:
        """From now on it may be written, but not freed: who reads it finds out when it asks."""
        self.number += 1
        os.pwrite(self._file, self.number.to_bytes(NUMBER_BYTES, "little"), 0)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


class Lease:
    """A reader's end, until `end`. Raises NotKept if the memory holds something else by now."""

    def __init__(self, path: Path, number: int) -> None:
        self._number = number
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotKept("the trainer has given its memory up") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.check()
        except BlockingIOError:  # its writer is about to use it again
            self.end()
            raise NotKept("the trainer uses its memory for another version by now") from None
        except BaseException:
            self.end()
            raise

    def check(self) -> None:
        """Raises NotKept unless all that was read so far was what it says."""
        if os.pread(self._file, NUMBER_BYTES, 0) != self._number.to_bytes(NUMBER_BYTES, "little"):
            raise NotKept("the trainer uses its memory for another version by now")

    def end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
