"""Formulas of any size have a verdict: none makes the reward fail, which would drop its whole group."""

from __future__ import annotations

import pytest

from leeway.envs.rewards import math_verify
from leeway.types import Task


@pytest.mark.attack
@pytest.mark.parametrize(
    "text", ["10000000!", "(10^{60})!", "10^{10^{10}}", "-10^{10^{10}}", "\\frac{1}{10^{10^{10}}}"]
)
@pytest.mark.parametrize("gold", ["5", "x^2-1", "2\\sqrt{3}"])
def test_a_number_of_any_size_has_a_verdict(gold: str, text: str) -> None:
    assert math_verify(Task(task_id="t", prompt="q", answer=gold), f"\\boxed{{{text}}}") == 0.0


@pytest.mark.honest("mathematics")
@pytest.mark.parametrize(
    ("gold", "text"), [("2^{100}", "4^{50}"), ("20!", "2432902008176640000"), ("10^{-30}", "10^{-30}")]
)
def test_a_large_number_equals_itself(gold: str, text: str) -> None:
    assert math_verify(Task(task_id="t", prompt="q", answer=gold), f"\\boxed{{{text}}}") == 1.0
