"""When engines get their cores for themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from leeway.driver.engines_alone import STEPS_TO_PLACE_BY, EnginesAlone


def left_alone(steps: list[tuple[float, float]]) -> list[Any]:
    told: list[Any] = []
    parts: Any = SimpleNamespace(
        trainers=[object(), object()],
        processes={"trainer-0": {"pid": 1}, "trainer-1": {"pid": 2}, "generator-0": {"pid": 3}},
        places=SimpleNamespace(leave_engines_alone=told.append),
    )
    watch = EnginesAlone(parts)
    for train_s, generate_s in steps:
        watch.step({"limit/train_s": train_s, "limit/generate_s": generate_s})
    return told


@pytest.mark.parametrize(
    ("steps", "are_left_alone"),
    [
        ([(0.2, 0.5)] * 8, True),
        ([(0.2, 0.5)] * (STEPS_TO_PLACE_BY - 1), False),
        ([(0.3, 0.5)] * 8, False),
        ([(0.9, 0.5)] + [(0.0, 0.5)] * 3, True),  # together
        ([(0.0, 0.5)] * 2 + [(0.9, 0.5)] * 2, False),
        ([(0.3, 0.5)] * STEPS_TO_PLACE_BY + [(0.0, 0.5)] * 20, False),  # the first ones alone
    ],
)
def test_engines_have_their_cores_to_themselves_once_steps_show_them_to_be_the_slower_side(
    steps: list[tuple[float, float]], are_left_alone: bool
) -> None:
    """The trainer's core, else, has no room for others."""
    assert left_alone(steps) == ([[{"pid": 1}, {"pid": 2}]] if are_left_alone else []), "once"
