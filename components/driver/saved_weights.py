"""The weights that a run saved, by checkpoint: a Hugging Face folder, or shards that are exported where needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..config.paths import is_file, user_path
from ..config.run_weights import stage_checkpoints
from ..failures import Refused

STATE = "trainer/state.json"


@dataclass(frozen=True)
class SavedWeights:
    """Of one checkpoint, the folder `step`: its policy version is its number of steps."""

    version: int
    step: Path

    @property
    def exported(self) -> Path | None:
        """The Hugging Face folder that is there already."""
        return self.step / "hf" if is_file(self.step / "hf/config.json") else None

    def as_model(self, scratch: Path) -> Path:
        """A Hugging Face folder of them: the exported one, else a new one below `scratch`. Raises Refused."""
        if self.exported is not None:
            return self.exported
        from ..trainer.checkpoint import CheckpointError  # loads torch
        from ..trainer.convert import export

        target = scratch / self.step.name
        try:
            export(self.step, target)
        except CheckpointError as error:
            raise Refused(str(error)) from None
        return target


def saved_models(key: str, folder: str | Path) -> list[SavedWeights]:
    """Every checkpoint at or below `folder` (a run, a stage, its checkpoints, one of them), by version.

    Raises a one-line ValueError, naming `key`, if there is none, or if two stages have checkpoints.
    """
    root = user_path(folder)
    found: dict[int, SavedWeights] = {}
    for step in [root, *sorted(root.glob("**/step-*"))]:
        match = re.fullmatch(r"step-(\d{1,12})", step.name)
        if match is None or not (is_file(step / "hf/config.json") or is_file(step / STATE)):
            continue
        saved = SavedWeights(int(match[1]), step)
        if saved.version in found:
            raise ValueError(
                f"{key}: {found[saved.version].step} and {step} are both of step {saved.version}; "
                "name the folder of one stage"
            )
        found[saved.version] = saved
    if not found:
        raise ValueError(f"{key}: got {folder}, expected a run's folder with checkpoints/step-* in it")
    return [found[version] for version in sorted(found)]


def chosen_model(key: str, folder: str | Path, step: int | None) -> SavedWeights:
    """The newest checkpoint (of a run's last stage that has any), or that of this step. Raises ValueError."""
    root = user_path(folder)
    places = [place for place in reversed(stage_checkpoints(root)) if any(place.glob("step-*/*"))] or [root]
    found = saved_models(key, places[0])
    if step is None:
        return found[-1]
    chosen = next((saved for saved in found if saved.version == step), None)
    if chosen is None:
        versions = ", ".join(str(saved.version) for saved in found)
        raise ValueError(f"--step: got {step}, expected a checkpoint of {places[0]} ({versions})")
    return chosen
