"""The weights that a run saved: one Hugging Face folder per checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from ..config.paths import user_path


def saved_models(folder: str | Path) -> dict[int, Path]:
    """Policy version -> Hugging Face folder of every checkpoint below `folder` (a run, a stage, its checkpoints).

    Raises a one-line ValueError if there is none, or if two stages have checkpoints.
    """
    root = user_path(folder)
    found: dict[int, Path] = {}
    for model in sorted(root.glob("**/step-*/hf")):
        match = re.fullmatch(r"step-(\d+)", model.parent.name)
        if match is None or not (model / "config.json").exists():
            continue
        version = int(match[1])
        if version in found:
            raise ValueError(
                f"eval.checkpoints: {found[version]} and {model} are both of step {version}; "
                "name the folder of one stage"
            )
        found[version] = model
    if not found:
        raise ValueError(
            f"eval.checkpoints: got {folder}, expected a run's folder with checkpoints/step-*/hf in it; "
            "train with checkpoint.save_hf=always"
        )
    return dict(sorted(found.items()))
