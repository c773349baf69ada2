"""The inside of a jail for the answers to one reasoning-gym dataset: one process per answer, forked from one in which
the dataset is made already.

Loaded as a file, so that it imports nothing of the package (whose shared types would load torch).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

MOST_TRIED, TRY_S = 20, 1.0
_made: dict[str, Any] = {}


def prepare(dataset: str, module: str) -> None:
    """Import the dataset's module, make the dataset (which reads its files), and score some of its own answers, so that
    whatever is made when it is first needed is there.

    A fork costs what the memory of its parent is large, and the library's `__init__` imports a hundred datasets with
    sympy, numpy and matplotlib (90 MB). So the packages above the module are entered without running theirs: 8 MB for
    most datasets.
    """
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise ImportError("reasoning-gym is not installed")
    name, folder = "", Path(spec.origin).parents[1]
    for part in module.split(".")[:-1]:
        name, folder = f"{name}.{part}".lstrip("."), folder / part
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    importlib.import_module("reasoning_gym.coaching")  # first, because the library's imports go round in a circle
    importlib.import_module(module)
    scorer = _made[dataset] = _make(dataset, {})
    begun = time.process_time()
    for index in range(MOST_TRIED):
        entry = scorer[index]
        if entry["answer"] is not None:
            scorer.score_answer(entry["answer"], entry)
        if time.process_time() - begun > TRY_S:
            break


def score_entry(dataset: str, options: dict[str, Any], entry: dict[str, Any], as_tuples: bool, text: str) -> float:
    """What the dataset's own `score_answer` pays for `text` as the answer to `entry`; 0.0 where it raises.

    Some datasets raise on text that is not of the form they expect (prime_factorization on "nonsense").
    """
    if as_tuples:
        entry = {key: value if isinstance(value, str) else tuples(value) for key, value in entry.items()}
    answer = entry["answer"]
    if isinstance(answer, str) and text.strip() == answer.strip():
        text = answer  # datasets compare to the letter, and some answers end with a line's end
    scorer = _make(dataset, options) if options else _made[dataset]
    try:
        return float(scorer.score_answer(text, entry))
    except Exception:
        return 0.0


def _make(dataset: str, options: dict[str, Any]) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(dataset, size=MOST_TRIED, seed=0, **json.loads(json.dumps(options)))


def tuples(value: Any) -> Any:
    """JSON turned tuples into lists; some datasets compare tuples."""
    if isinstance(value, list | tuple):
        return tuple(tuples(item) for item in value)
    return {key: tuples(item) for key, item in value.items()} if isinstance(value, dict) else value
