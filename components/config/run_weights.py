"""A run's folder given as a model: its newest weights are used.

run/stages/STAGE/checkpoints/latest.json, step-000050/hf/        run/checkpoints/... without stages
"""

from __future__ import annotations

import re
from pathlib import Path

from ..integrity import DamagedFileError, read_sealed
from .errors import ConfigError, words
from .paths import is_file, is_folder, user_path
from .text import MAX_BYTES, TextError, parse_yaml


def newest_weights(key: str, path: str) -> str:
    """The folder of weights that `path` stands for; `path` itself if it is not a run, stage or checkpoint of Leeway.

    Raises ConfigError, naming `key`, for a run that has saved no weights.
    """
    folder = user_path(path)
    if is_file(folder / "config.json") or not is_folder(folder):
        return path
    if is_file(folder / "hf/config.json"):
        return str(folder / "hf")
    places = [folder, folder / "checkpoints", *reversed(stage_checkpoints(folder))]
    for place in places:
        step = _newest_step(place)
        if step is None:
            continue
        if not is_file(step / "hf/config.json"):
            raise _none(key, path, f"whose newest checkpoint {step.name} has no hf/", f"run `leeway convert {step}`")
        return str(step / "hf")
    if any(is_folder(place) for place in places[1:]) or is_file(folder / "run.json"):
        raise _none(key, path, "which has no checkpoints yet", "wait for one, or set checkpoint.every in that run")
    return path


def stage_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders of the stages of a run, in the order in which they ran."""
    try:
        with (folder / "config.yaml").open(encoding="utf-8") as opened:
            tree = parse_yaml(opened.read(MAX_BYTES + 1))
    except (OSError, ValueError, TextError):
        return []
    stages = tree.get("stages") if isinstance(tree, dict) else None
    names = [name for name in stages or () if re.fullmatch(r"\w[\w\-]*", str(name))]
    return [folder / "stages" / str(name) / "checkpoints" for name in names]


def _newest_step(checkpoints: Path) -> Path | None:
    """The checkpoint that latest.json names, or the one of the highest step."""
    try:
        named = read_sealed(checkpoints / "latest.json")["path"]
        if re.fullmatch(r"step-[0-9]+", named) and is_folder(checkpoints / named):
            return checkpoints / named
    except (DamagedFileError, KeyError, TypeError):
        pass  # latest.json is written last: a run that was killed may have none
    if not is_folder(checkpoints):
        return None
    steps = {int(m[1]): p for p in checkpoints.iterdir() if (m := re.fullmatch(r"step-([0-9]{1,12})", p.name))}
    return steps[max(steps)] if steps else None


def _none(key: str, path: str, what: str, fix: str) -> ConfigError:
    return ConfigError(key, got=words(f"{path}, {what}"), expected="a run that has saved weights", fix=fix)
