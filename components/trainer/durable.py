"""Files that survive a machine crash: replaced atomically, and flushed to disk rather than left in caches."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace `path` atomically; after a crash it has either the old content or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Flush everything below `folder` to disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file's content to disk; for a folder: what was created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
