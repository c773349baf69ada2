"""Groups that clients committed, in a folder: one file each, in the form of a checkpoint's used groups."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

from ..failures import Refused
from ..group import Group
from ..monitor.jsonl import write_text_atomically
from ..replay.reuse import Used
from ..replay.saved_groups import groups_as_text, groups_from_text

_NAME = re.compile(r"group-(\d{8,12})\.safetensors64")


class GroupFolder:
    """`await folder(group)` returns when it is on disk. One process writes. Raises Refused for no such folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._next = max((number for number, _ in _files(folder)), default=-1) + 1
        except OSError as error:
            raise Refused(
                f"serve.groups: got {folder} ({error.strerror}), expected a folder that can be written to"
            ) from None

    @property
    def num_groups(self) -> int:
        """Its first group has the number 0."""
        return self._next

    async def __call__(self, group: Group) -> str:
        number, self._next = self._next, self._next + 1
        name = f"group-{number:08d}.safetensors64"
        await asyncio.to_thread(self._write, self._folder / name, group)
        return name

    def _write(self, path: Path, group: Group) -> None:
        oldest, _ = group.policy_versions()
        kept = Used(group=group, score=0.0, oldest_version=oldest, num_uses=0, last_batch=-1)
        write_text_atomically(path, groups_as_text([kept]))


def committed_groups(folder: Path) -> Iterator[Group]:
    """In the order in which they were committed. Raises Refused for a file that holds no group."""
    for _, path in sorted(_files(folder)):
        yield from (used.group for used in groups_from_text(path.read_text()))


def _files(folder: Path) -> list[tuple[int, Path]]:
    return [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
