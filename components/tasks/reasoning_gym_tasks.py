"""Procedural tasks: any reasoning-gym dataset by name.

Trap: item i of a dataset with seed s is drawn with seed s + i, so datasets with neighbouring seeds share nearly all
items. That is harmless here: repeats are removed and questions are held out by their text, not by their index.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from .questions import Row

MOST_KEPT = 4
_kept: dict[tuple[Any, ...], list[Row]] = {}


def generate_rows(dataset: str | None, *, options: dict[str, Any], size: int, seed: int) -> list[Row]:
    """`size` items of a reasoning-gym dataset, in its order, repeats included.

    `info` holds {"source_dataset", "options", "entry"}: what the dataset's own `score_answer` needs, as plain JSON.
    Costs about 0.2 s per 20,000 items for arithmetic, after 1.5 s for importing reasoning-gym. The last few results are
    kept: a run's checks, its training and its evaluation each ask for the same rows, which nobody changes.
    Raises ValueError for an unknown dataset or an option that it refuses.
    """
    key = (dataset, repr(options), size, seed)
    if key not in _kept:
        if len(_kept) == MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = _generate(dataset, options=options, size=size, seed=seed)
    return list(_kept[key])


def _generate(dataset: str | None, *, options: dict[str, Any], size: int, seed: int) -> list[Row]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        near = get_close_matches(str(dataset), DATASETS, n=1, cutoff=0.0)
        raise ValueError(
            f"task.dataset: got {dataset!r}, expected a dataset of reasoning-gym (docs/reasoning_gym.md lists them); "
            f"nearest: {near[0]}"
        )
    if dataset == "composite":
        raise ValueError(
            "task.dataset: got 'composite', which takes objects, not settings; expected one dataset; for several, "
            "use task.mix"
        )
    try:
        source = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
    except (TypeError, AssertionError, ValueError, AttributeError) as error:
        raise ValueError(
            f"task.options: reasoning-gym's {dataset} refuses {options}: {error}; see its config class"
        ) from None

    as_tuples = _needs_tuples(source)
    rows = []
    for index in range(size):
        entry = source[index]
        # Some datasets have no single answer (answer None): Task.answer is text, so the entry keeps the original.
        info = {"source_dataset": dataset, "options": options, "entry": entry, "as_tuples": as_tuples}
        rows.append(
            Row(question=entry["question"], answer="" if entry["answer"] is None else str(entry["answer"]), info=info)
        )
    return rows


def _needs_tuples(source: Any) -> bool:
    """Whether scoring compares tuples, which JSON turns into lists (arc_agi, rearc): the reward converts them back."""
    entry = source[0]
    answer = entry["answer"]
    if answer is None:
        return False
    return source.score_answer(answer, json.loads(json.dumps(entry, default=str))) != source.score_answer(answer, entry)
