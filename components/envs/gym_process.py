"""The inside of the jail of reasoning-gym's answers: one process per answer, forked from one that imported this file.

Loaded as a file, so that it imports nothing of the package (whose shared types would load torch).
"""

from __future__ import annotations

import json
from typing import Any

import reasoning_gym


def score_entry(dataset: str, options: dict[str, Any], entry: dict[str, Any], as_tuples: bool, text: str) -> float:
    """What the dataset's own `score_answer` pays for `text` as the answer to `entry`; 0.0 where it raises.

    Some datasets raise on text that is not of the form they expect (prime_factorization on "nonsense").
    """
    if as_tuples:
        entry = {key: value if isinstance(value, str) else tuples(value) for key, value in entry.items()}
    answer = entry["answer"]
    if isinstance(answer, str) and text.strip() == answer.strip():
        text = answer  # datasets compare to the letter, and some answers end with a line's end
    scorer = reasoning_gym.create_dataset(dataset, size=1, seed=0, **json.loads(json.dumps(options)))
    try:
        return float(scorer.score_answer(text, entry))
    except Exception:
        return 0.0


def tuples(value: Any) -> Any:
    """JSON turned tuples into lists; some datasets compare tuples."""
    if isinstance(value, list | tuple):
        return tuple(tuples(item) for item in value)
    return {key: tuples(item) for key, item in value.items()} if isinstance(value, dict) else value
