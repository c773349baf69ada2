"""summary.json: the outcome of a run, in one file that is either complete or absent."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .jsonl import finite_or_null, write_text_atomically

FIRST_STEPS = 5
LAST_STEPS = 20

_ORDER = (
    "status",
    "cause",
    "learned",
    "warnings",
    "steps",
    "wall_s",
    "tokens",
    "reward_first",
    "reward_last",
    "eval",
    "max_policy_lag_observed",
    "dropped_stale",
    "served_gap_max",
    "served_tolerance_max",
    "served_tolerance_mean",
    "weights_sha256",
    "versions",
)


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write `summary` atomically: the well-known keys first, always in the same order, all others after them by name.

    Non-finite numbers become null, as in metrics.jsonl.
    """
    keys = [key for key in _ORDER if key in summary] + sorted(key for key in summary if key not in _ORDER)
    ordered = {key: finite_or_null(summary[key]) for key in keys}
    write_text_atomically(Path(path), json.dumps(ordered, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def reward_first(metrics: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean of train/reward/mean over a metrics.jsonl's first 5 RL steps (fewer if it has fewer; None if none)."""
    return _mean(_rewards(metrics)[:FIRST_STEPS])


def reward_last(metrics: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean of train/reward/mean over a metrics.jsonl's last 20 RL steps (fewer if it has fewer; None if none)."""
    return _mean(_rewards(metrics)[-LAST_STEPS:])


def weights_sha256(hf_dir: Path) -> str:
    """SHA-256 of a Hugging Face folder's weights; the same as `LC_ALL=C; cat hf_dir/*.safetensors | sha256sum`.

    Raises ValueError when the folder has no .safetensors file.
    """
    files = sorted(Path(hf_dir).glob("*.safetensors"), key=lambda path: path.name)
    if not files:
        raise ValueError(f"weights_sha256: no *.safetensors in {hf_dir}; expected a folder that save_pretrained wrote")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _rewards(metrics: Iterable[Mapping[str, Any]]) -> list[float]:
    """One reward per RL step, in order of steps; a step whose reward is missing or null does not count."""
    by_step: dict[int, float] = {}
    for row in metrics:
        value = row.get("train/reward/mean")
        if value is not None and math.isfinite(value):
            by_step[int(row["step"])] = float(value)
    return [by_step[step] for step in sorted(by_step)]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
