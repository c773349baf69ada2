"""Preference pairs from the quickstart's task for `leeway run dpo`: the right answer, and one that is slightly off.

    python preference_pairs.py > pairs.jsonl
    leeway run dpo --config dpo.yaml model.path=WEIGHTS

Results: docs/algorithms.md, "Preference pairs".
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import reasoning_gym

NEAR_MISSES = (-20, -10, -2, -1, 1, 2, 10, 20)


def pairs(count: int, *, seed: int = 0) -> Iterator[dict[str, str]]:
    """One line of `task.path` for each of `count` two-digit sums and differences, without duplicate questions."""
    rng = random.Random(seed)
    numbers = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    tasks = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **numbers)
    for question, answer in {task["question"]: int(task["answer"]) for task in tasks}.items():
        yield {"question": question, "answer": str(answer), "rejected": str(answer + rng.choice(NEAR_MISSES))}


if __name__ == "__main__":
    for line in pairs(20_000):
        print(json.dumps(line))
