"""What the answers to one prompt take of an engine in which those that are the same so far are one row of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_Tokens = TypeVar("_Tokens", list[int], tuple[int, ...])


def num_rows(answers: Sequence[list[int]]) -> int:
    """Rows of all passes: different beginnings that some of these answers, by their tokens, go on from."""
    total, before = 0, list[int]()
    for answer in sorted(answers):  # what an answer has in common with any before it, it has with the last one
        same = num_same(before, answer)
        total += len(answer) - min(len(answer), len(before), same + 1)
        before = answer
    return total


def num_same(one: _Tokens, other: _Tokens) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
