"""What the answers to one prompt take of an engine in which those that are the same so far are one row of a pass."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

_Tokens = TypeVar("_Tokens", list[int], tuple[int, ...])


def num_rows(prompts: Sequence[Hashable], answers: Sequence[list[int]]) -> tuple[int, int]:
    """(rows of the first passes, of all passes) that these answers take, of each its prompt and its tokens.

    A row is a prompt and a beginning that some of its answers go on from.
    """
    by_prompt: dict[Hashable, list[list[int]]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer:
            by_prompt.setdefault(prompt, []).append(answer)
    return len(by_prompt), sum(map(_num_beginnings, by_prompt.values()))


def _num_beginnings(answers: Sequence[list[int]]) -> int:
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
