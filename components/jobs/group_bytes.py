"""A group as bytes and back: safetensors, bit for bit. No pickle: reading runs no code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors.torch

from ..failures import Refused
from ..group import Group
from ..samples import by_path, nested
from .folder import open_file

_LENGTH_BYTES = 8


def group_bytes(group: Group) -> bytes:
    tensors = {path: tensor.contiguous() for path, tensor in by_path(group.packed()).items()}
    return safetensors.torch.save(tensors)


def group_of(data: bytes) -> Group:
    """What `group_bytes` was given. Raises `Refused` for other bytes, or a group whose parts do not fit together."""
    try:
        group = Group.unpacked(nested(safetensors.torch.load(data)))
        group.check()
    except Exception as error:  # whatever the bytes provoke
        raise Refused(f"no group ({' '.join(str(error).split())[:120]})") from None
    return group


def laid_out(groups: Sequence[Group]) -> bytes:
    """Several groups, each behind its length."""
    parts = []
    for group in groups:
        data = group_bytes(group)
        parts += [len(data).to_bytes(_LENGTH_BYTES, "little"), data]
    return b"".join(parts)


def groups_of(data: bytes) -> list[Group]:
    """What `laid_out` was given. Raises `Refused` for other bytes."""
    return [group_of(own) for own in _each(data)]


def group_at(path: Path, place: int) -> Group:
    """The group at this place of a file of `laid_out`, counted from 0; the others are passed over unread.

    Raises ValueError naming the file.
    """
    try:
        with open_file(path) as (file, size):
            start, end = 0, 0
            for _ in range(place + 1):
                start = end + _LENGTH_BYTES
                file.seek(end)
                end = start + int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if start > size or end > size:
                    raise Refused(f"no group at place {place}")
            return group_of(file.read(end - start))
    except (Refused, OSError) as error:
        raise ValueError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None


def _each(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        at += _LENGTH_BYTES
        if at + length > len(data):
            raise Refused("no groups: the bytes end in the middle of one")
        yield data[at : at + length]
        at += length
