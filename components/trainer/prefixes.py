"""Sequences of tokens as a prefix tree: what several of them begin with is there once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Path = tuple[tuple[int, int], ...]
"""A sequence by the branches that it follows, in order: (number of the branch, how many of its first tokens)."""


@dataclass(frozen=True)
class Branch:
    """What was new in a sequence: its `length` tokens from `begin` on, after those of `before`.

    `sequence`: its number, in the order in which they were added.
    """

    sequence: int
    begin: int
    length: int
    before: Path


class PrefixTree:
    """Each sequence that is added adds one branch at most, and no branch changes any more."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self.num_tokens = 0
        self._sequences: list[Sequence[int]] = []
        self._next: dict[tuple[int, int, int], int] = {}  # (branch, how many of its tokens, the one after) -> branch

    def num_new(self, sequence: Sequence[int]) -> int:
        """How many tokens `add` would add."""
        return len(sequence) - _length(self._known(sequence))

    def add(self, sequence: Sequence[int]) -> Path:
        path = self._known(sequence)
        self._sequences.append(sequence)
        begin = _length(path)
        if begin == len(sequence):
            return path
        new = Branch(len(self._sequences) - 1, begin, len(sequence) - begin, path)
        self._next[*_end(path), sequence[begin]] = len(self.branches)
        self.branches.append(new)
        self.num_tokens += new.length
        return (*path, (len(self.branches) - 1, new.length))

    def _known(self, sequence: Sequence[int]) -> Path:
        """The path of what it begins with that is there."""
        path: Path = ()
        at = 0
        while at < len(sequence) and (number := self._next.get((*_end(path), sequence[at]))) is not None:
            branch = self.branches[number]
            length = _same(self._sequences[branch.sequence], branch.begin, sequence, at)
            path = (*path, (number, length))
            at += length
        return path


def _length(path: Path) -> int:
    return sum(length for _, length in path)


def _end(path: Path) -> tuple[int, int]:
    return path[-1] if path else (-1, 0)


def _same(a: Sequence[int], first_a: int, b: Sequence[int], first_b: int) -> int:
    """How many tokens are the same from these places on."""
    most = min(len(a) - first_a, len(b) - first_b)
    return next((k for k in range(most) if a[first_a + k] != b[first_b + k]), most)
