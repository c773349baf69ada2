"""A reward for random weights, which are never right: it differs within a group, so that there is a gradient."""

from __future__ import annotations

from typing import Any


def share_of_vowels(task: Any, answer: str) -> float:
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))
