"""What `leeway resume RUN` runs: the run's own settings, with overrides, from the newest complete checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ConfigError, Stage, derive, find_recipe, resolve_stages
from ..config.errors import words
from ..config.load import read_tree
from .context import finished_length, length_of
from .run_record import BadRecord, RunIsRunning, check_not_running, saved_recipe, saved_recipe_files


@dataclass(frozen=True)
class Continuation:
    """The stages of the run, including finished ones; `notes`: lines that say where it resumes, and what changes."""

    stages: list[Stage]
    notes: list[str]


def plan_resume(folder: Path, overrides: Sequence[str]) -> Continuation:
    """Read the run in `folder`. Raises a one-line ConfigError if there is nothing to resume."""
    file = folder / "config.yaml"
    if not file.is_file():
        what = "no config.yaml in it" if folder.is_dir() else "a file" if folder.exists() else "nothing there"
        raise _refused(f"{folder} ({what})", "the folder of a run", "e.g. leeway resume runs/leeway/quickstart")
    try:
        check_not_running(folder)
    except RunIsRunning as error:
        raise _refused(str(error), "a run that has ended", "or start another one under another name") from None
    tree = read_tree(file)
    named = [own.get("recipe", name) for name, own in (tree.get("stages") or {}).items()]
    try:
        recipe = saved_recipe(folder) or (named[-1] if named else None)
        files = saved_recipe_files(folder)
    except BadRecord as error:
        raise _refused(str(error), "a run's folder as it was left", "see above") from None
    if recipe is None:
        fix = f"leeway run RECIPE --config {file} checkpoint.resume=auto"
        raise _refused(f"{folder} (no run.json in it)", "a run that says its recipe", fix)
    for own in (tree.get("stages") or {}).values():
        if own.get("recipe") in files:  # a path may be relative to another folder than this one
            own["recipe"] = files[own["recipe"]]
    recipe = files.get(recipe, recipe)
    if not find_recipe(recipe, key="RUN").can_resume:
        raise _refused(f"a run of {recipe}", "one that trains a single policy", "start it anew under another name")
    _go_on(tree, folder)
    before, stages = resolve_stages(tree, recipe, of_a_run=True), resolve_stages(tree, recipe, overrides, of_a_run=True)
    return Continuation(stages, [*stages[-1].notes, *_notes(folder, before, stages)])


def _go_on(tree: dict[str, Any], folder: Path) -> None:
    """The settings of the run in `folder`, even if it was moved, to resume from its newest checkpoint."""
    whole = folder if len(folder.parts) > 2 and ".." not in folder.parts else folder.absolute().resolve()
    tree |= {"output_dir": str(whole.parent.parent), "project": whole.parent.name, "name": whole.name}
    tree["checkpoint"] = {**(tree.get("checkpoint") or {}), "resume": "auto"}
    for own in (tree.get("stages") or {}).values():
        (own.get("checkpoint") or {}).pop("resume", None)


def _notes(folder: Path, before: Sequence[Stage], stages: Sequence[Stage]) -> list[str]:
    """Where the first unfinished stage resumes. Raises ConfigError if there is none, or no state to start from."""
    from .checkpoints import newest_state, saved_version  # loads torch

    unfinished = [s for s in stages if finished_length(s.dir) != length_of(s.config)]
    if not unfinished:
        last = stages[-1]
        done = last.config.train.steps
        more = f"train.steps={2 * done}" if done else f"train.epochs={2 * (last.config.train.epochs or 1):g}"
        raise _refused(
            f"{folder} (finished: {_length(last)})",
            "a run that was stopped, or more to do",
            f"leeway resume {folder} {more}",
        )
    stage = unfinished[0]
    later = [s for s in stages[stages.index(stage) + 1 :] if (s.dir / "metrics.jsonl").exists()]
    if finished_length(stage.dir) is not None and later:
        raise _refused(
            f"{stage.name}: {_length(stage)}",
            f"as it was, because {later[0].name} started from its weights",
            "start a run under another name",
        )
    newest = newest_state(stage.dir / "checkpoints")
    if newest is None:
        if stage is stages[0] or finished_length(stage.dir) is not None:
            fix = "start it anew under another name, with checkpoint.every=N to be safe from kills"
            raise _refused(f"{folder} (no checkpoint in it)", "a run that has saved its state", fix)
        return [f"{stage.name}: no state was saved; starts from the weights of {stages[stages.index(stage) - 1].name}"]
    step, asked = saved_version(newest), stage.config.train.steps
    if asked is not None and asked < step:
        raise _refused(f"train.steps={asked}", f"at least {step}, the steps done", f"set train.steps={2 * step}")
    notes = [f"{stage.name}: resumes from step {step} of {_length(stage)}, {newest}"]
    was = next((s for s in before if s.name == stage.name), stage)
    return notes + _rate_note(was, stage, step) + _publish_note(was, stage)


def _rate_note(was: Stage, stage: Stage, step: int) -> list[str]:
    """How additional steps change the learning-rate schedule."""
    from ..trainer.optimizer import learning_rate

    o, before, now = stage.config.optimizer, was.config.train.steps, stage.config.train.steps
    if o.schedule == "constant" or length_of(was.config) == length_of(stage.config):
        return []
    said = f"{stage.name}: the {o.schedule} learning-rate schedule now runs over {_length(stage)}"
    if before is None or now is None:
        return [said]
    old, new = learning_rate(o, step - 1, total_steps=before), learning_rate(o, step, total_steps=now)
    return [f"{said}: {new:.3g} at step {step + 1}, after {old:.3g} at step {step}"]


def _publish_note(was: Stage, stage: Stage) -> list[str]:
    """Evaluations may be moved freely; but without `param_server.publish_every`, they decide with the bound how often
    weights are published, which is what groups are generated by.
    """
    if not stage.recipe.is_online:
        return []
    before, now = derive(was.config).publish_every, derive(stage.config).publish_every
    if before == now:
        return []
    pulled, every = stage.config.rollout.pull_every, stage.config.eval.every
    return [
        f"{stage.name}: eval.every={every} has weights published every {now} step(s), before every {before}; "
        f"a multiple of rollout.pull_every={pulled} has them published every {pulled}"
    ]


def _length(stage: Stage) -> str:
    train = stage.config.train
    return f"{train.steps} steps" if train.steps is not None else f"{train.epochs:g} epochs"


def _refused(got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError("RUN", got=words(got), expected=expected, fix=fix)
