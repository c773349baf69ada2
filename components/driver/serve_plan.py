"""What `leeway serve RUN|MODEL` runs: which weights, under which settings. Nothing heavy is loaded.

The folder of a train job that is running is joined, as by an explorer: its weights as they are learned, and what
clients commit is trained on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import Config, ConfigError, Recipe, Stage
from ..config.layers import lay_over
from ..config.load import read_tree
from ..config.paths import is_file, is_folder, user_path
from ..config.rules import JOB_RULES
from ..config.stages import config_alone
from ..config.tree import Tree
from ..failures import Refused
from ..jobs.folder import Meeting, seen_alive
from .context import StageContext, StageResult
from .run_record import RunIsRunning, check_not_running
from .saved_weights import SavedWeights, chosen_model

ALONE = (
    "this run is under way, and nobody can join it: its checkpoints can be served, not what it learns from now on; for "
    "that, and to have it learn from clients, start it with `leeway run train`, then `leeway serve RUN`"
)
OF_A_RUN = ("seed", "plugins", "model", "rollout", "staleness", "algorithm", "cluster", "log")
"""Sections of a run's settings under which its weights are served."""


def recipe_of(version: int) -> Recipe:
    """A recipe that serves `model.path`, whose weights have this version."""
    return Recipe(run=functools.partial(_run, version), generates=True, reads="nothing", name="serve")


async def _run(version: int, context: StageContext) -> StageResult:
    from .serving import serve  # loads Ray

    return await serve(context, version)


async def _join(context: StageContext) -> StageResult:
    from .serving import serve_train_job

    return await serve_train_job(context)


JOINING = Recipe(
    run=_join,
    generates=True,
    trains_on="rollouts",
    reads="nothing",
    elsewhere="trainer",
    rules=JOB_RULES,
    name="serve",
)


def plan_serving(target: str, step: int | None, overrides: Sequence[str], scratch: Path) -> Stage:
    """Shards are exported below `scratch`. Raises a one-line ValueError for what cannot be served."""
    run = user_path(target).absolute()
    if step is None and is_folder(target) and (stage := _joining(run, overrides)) is not None:
        return stage
    is_running = step is None and is_folder(target) and _is_running(run)
    try:
        recipe, config = _of_weights(target, step, overrides, scratch)
    except ValueError as error:
        raise Refused(f"{error}. {ALONE}") if is_running else error from None
    return Stage(name="serve", recipe=recipe, config=config, dir=scratch, notes=(ALONE,) if is_running else ())


def _is_running(run: Path) -> bool:
    try:
        check_not_running(run)
    except RunIsRunning:
        return True
    return False


def _joining(run: Path, overrides: Sequence[str]) -> Stage | None:
    """None unless a train job is running there."""
    if not is_file(run / "config.yaml"):
        return None
    tree = read_tree(run / "config.yaml")
    stages = tree.pop("stages", None) or {}
    trains = [own for own in stages.values() if isinstance(own, dict) and own.get("recipe") == "train"]
    tree = lay_over(tree, {key: value for key, value in trains[-1].items() if key != "recipe"} if trains else {})
    explorer = {**_section(tree, "explorer"), "name": "serve"}
    meeting = Meeting(user_path(explorer["folder"]) if explorer.get("folder") else run / "meeting")
    train = seen_alive(meeting)
    if train is None:
        return None
    served = _section(tree, "serve")
    served["model"] = served.get("model") or run.name
    model = {**_section(tree, "model"), "path": train.get("model") or str(meeting.model), "init": None}
    here = {"output_dir": str(run.parent.parent), "project": run.parent.name, "name": run.name}
    config = config_alone({**tree, **here, "model": model, "explorer": explorer, "serve": served}, JOINING, overrides)
    return Stage(name="serve", recipe=JOINING, config=config, dir=config.run_dir)


def _of_weights(target: str, step: int | None, overrides: Sequence[str], scratch: Path) -> tuple[Recipe, Config]:
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
