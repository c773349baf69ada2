"""Sums and differences of two-digit numbers, each with its working: what a small model can learn step by step.

A model that has seen few of them is right far more often behind a working than at once: each part is a sum that a
pretrained model knows, and its numbers stand beside it, where they need not be found in the question again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

SMALLEST, LARGEST = 10, 99


def worked_sums(*, seed: int = 0) -> Iterator[dict[str, str]]:
    """Every sum and difference of two numbers of two digits once, in an order that `seed` decides: 16,200 items.

    An item is {"question": "52 - 87 =", "answer": "5-8=-3,2-7=-5,-30-5=-35"}: tens, ones, and both together. With
    `task.answer_after="="` the task's answer is what follows the last "=", and supervised training learns all of it.
    """
    numbers = range(SMALLEST, LARGEST + 1)
    sums = [(a, sign, b) for a in numbers for sign in "+-" for b in numbers]
    random.Random(seed).shuffle(sums)
    for a, sign, b in sums:
        yield {"question": f"{a} {sign} {b} =", "answer": working(a, sign, b)}


def working(a: int, sign: str, b: int) -> str:
    factor = 1 if sign == "+" else -1
    tens, ones = a // 10 + factor * (b // 10), a % 10 + factor * (b % 10)
    parts = (f"{a // 10}{sign}{b // 10}={tens}", f"{a % 10}{sign}{b % 10}={ones}", f"{10 * tens}{ones:+d}")
    return f"{','.join(parts)}={10 * tens + ones}"
