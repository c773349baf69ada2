"""What `leeway serve RUN|MODEL` runs: which weights, under which settings. Nothing heavy is loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import Config, ConfigError, Recipe
from ..config.layers import lay_over
from ..config.load import read_tree
from ..config.paths import is_file, is_folder, user_path
from ..config.stages import config_alone
from ..config.tree import Tree
from ..failures import Refused
from .context import StageContext, StageResult
from .saved_weights import SavedWeights, chosen_model

OF_A_RUN = ("seed", "plugins", "model", "rollout", "staleness", "algorithm", "cluster", "log")
"""Sections of a run's settings under which its weights are served."""


def recipe_of(version: int) -> Recipe:
    """A recipe that serves `model.path`, whose weights have this version."""
    return Recipe(run=functools.partial(_run, version), generates=True, reads="nothing", name="serve")


async def _run(version: int, context: StageContext) -> StageResult:
    from .serving import serve  # loads Ray

    return await serve(context, version)


def plan_serving(target: str, step: int | None, overrides: Sequence[str], scratch: Path) -> tuple[Recipe, Config]:
    """Shards are exported below `scratch`. Raises a one-line ValueError for what cannot be served."""
    if is_folder(target) and not is_file(f"{target}/config.json"):
        saved = chosen_model("RUN", target, step)
        tree, version, path = _settings_of(saved), saved.version, str(saved.as_model(scratch))
    elif step is not None:
        raise ConfigError("--step", got=step, expected="the folder of a run", fix="leave it out for a model")
    else:
        tree, version, path = {}, 0, target
    model = {key: value for key, value in _section(tree, "model").items() if key != "init"}
    own = {key: value for key, value in _section(tree, "serve").items()}
    own = {"model": _served_name(target), **own}
    recipe = recipe_of(version)
    return recipe, config_alone({**tree, "model": {**model, "path": path}, "serve": own}, recipe, overrides)


def _settings_of(saved: SavedWeights) -> Tree:
    """Those of the run that the checkpoint belongs to, and of its stage."""
    checkpoints = saved.step.absolute().parent
    stage_dir = checkpoints.parent
    is_stage = stage_dir.parent.name == "stages"
    run = stage_dir.parent.parent if is_stage else stage_dir
    if not is_file(run / "config.yaml"):
        raise Refused(
            f"RUN: got {saved.step}, expected a checkpoint in the folder of its run; {run} has no config.yaml"
        )
    tree = read_tree(run / "config.yaml")
    stages = tree.pop("stages", None) or {}
    own = {k: v for k, v in (stages.get(stage_dir.name) or {}).items() if k != "recipe"} if is_stage else {}
    laid = lay_over(tree, own)
    return {name: laid[name] for name in OF_A_RUN if name in laid}


def _section(tree: Tree, name: str) -> dict[str, Any]:
    section = tree.get(name)
    return dict(section) if isinstance(section, dict) else {}


def _served_name(target: str) -> str:
    """The name of the run's or the model's folder."""
    return user_path(target).absolute().name
