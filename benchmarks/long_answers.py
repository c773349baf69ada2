"""A reward that an untrained model earns in part, with answers long enough to live through several policy versions."""

from __future__ import annotations

from leeway import Task


def digits(task: Task, text: str) -> float:
    """Share of the characters that are digits."""
    return sum(c.isdigit() for c in text) / max(1, len(text))
