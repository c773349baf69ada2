"""Stages: recipes in sequence. Each is deep-merged over the rest of the file and starts from the last one's weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf

from ..failures import printable
from .effect import recipe_reads
from .errors import ConfigError, words
from .hardware import computes_bfloat16
from .keys import check_known
from .layers import OF_A_SOURCE, apply_overrides, lay_over
from .load import build_config, config_path, read_tree
from .names import nearest
from .overrides import Override, apply_override, parse_overrides
from .paths import MAX_NAME_BYTES
from .recipe import Recipe, find_recipe
from .schema import Config
from .tree import Tree, settings_in

DEFAULT = "async_rl"
"""The recipe of a config without stages, where the user names none."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One recipe to run: its checked settings, and the folder its own files go to.

    `notes`: non-obvious effects of the run's overrides; the same lines in every stage.
    """

    name: str
    recipe: Recipe
    config: Config
    dir: Path
    notes: tuple[str, ...] = field(default=(), compare=False)


def plan_run(name_or_file: str, recipe: str | None, overrides: Sequence[str] = ()) -> list[Stage]:
    """What `leeway run RECIPE --config NAME_OR_FILE ...` runs, in order; recipe None: every stage (or async_rl).

    `recipe`: a bundled name, a file, or a module (see `find_recipe`).
    """
    return resolve_stages(read_tree(config_path(name_or_file)), recipe, overrides)


def resolve_stages(
    raw: Tree, recipe: str | None, overrides: Sequence[str] = (), *, of_a_run: bool = False
) -> list[Stage]:
    """The stages of `raw` up to and including the last one whose recipe is `recipe`.

    If there is none, `recipe` takes the place of the last stage that needs the same (a study of async_rl, or a changed
    copy of it, that of async_rl); if there is none of these either, it runs alone, without stages.

    An override applies to every stage that does not set its key, and to the last stage that does (see
    `layers.apply_overrides`). `of_a_run`: `raw` is what a run wrote down, where each stage holds all of its settings.
    """
    asked = None if recipe is None else find_recipe(recipe)
    tree = copy.deepcopy(raw)
    settings = []
    for override in parse_overrides(overrides):
        _check_stage_exists(override, tree)
        if _shapes_the_run(override.key):
            apply_override(tree, override)
        else:
            settings.append(override)
    trees = _stage_trees(tree)
    recipes = {name: _recipe_of(name, stage) for name, stage in trees.items()}
    selected = list(recipes)
    if asked is not None:
        same = [name for name, own in recipes.items() if own.is_same(asked)]
        like = [name for name, own in recipes.items() if own.is_like(asked)]
        last = next(iter(same[-1:] or like[-1:]), None)
        selected = [] if last is None else selected[: selected.index(last) + 1]
        if last is not None:
            recipes[last] = asked
            if asked.explores:  # the stages before are the trainer's
                selected = selected[-1:]
    base = {name: value for name, value in tree.items() if name != "stages"}
    check_known(base)
    notes = tuple(apply_overrides(settings, base, trees, selected))
    typed = {leaf for override in settings for leaf in override.leaves()}
    check_known(base)
    _stage_trees(tree)
    if not selected:
        only = asked or find_recipe(DEFAULT)
        config = _config_alone(base, only, typed)
        notes += (*_weights_note(base, config), *_dtype_note(base, config))
        return [Stage(name=only.label, recipe=only, config=config, dir=config.run_dir, notes=notes)]
    stages = []
    for name in selected:
        own = {key: value for key, value in trees[name].items() if key != "recipe"}
        laid = lay_over(base, own)
        config = build_config(laid, recipe=recipes[name], stage=name, stage_tree=own)
        notes += (*_weights_note(laid, config), *_dtype_note(laid, config)) if name == selected[0] else ()
        stage_dir = config.run_dir / "stages" / name
        if not of_a_run:
            recipe_reads(config, recipes[name], {key for key, _ in settings_in(own, "")}, f"stages.{name}.{{}}".format)
        stages.append(Stage(name=name, recipe=recipes[name], config=config, dir=stage_dir, notes=notes))
    for keys in [{key} for key in typed] or [set[str]()]:
        _refuse_what_nobody_reads(keys, stages)
    for number, stage in enumerate(stages):
        _refuse_to_train_on_what_is_held_out_later(stage, stages[number + 1 :])
    return stages


def config_alone(tree: Tree, recipe: Recipe, overrides: Sequence[str] = ()) -> Config:
    """The settings of one recipe, of a tree without stages."""
    tree, settings = copy.deepcopy(tree), parse_overrides(overrides)
    check_known(tree)
    apply_overrides(settings, tree, {}, [])
    return _config_alone(tree, recipe, {leaf for override in settings for leaf in override.leaves()})


def _config_alone(tree: Tree, recipe: Recipe, typed: set[str]) -> Config:
    """`typed`: the keys that were set on the command line."""
    config = build_config(tree, recipe=recipe)
    recipe_reads(config, recipe, typed, str, in_files=True)
    return config


def _refuse_what_nobody_reads(keys: set[str], stages: Sequence[Stage]) -> None:
    """Refuse what was set for all stages, and has an effect in none. `keys`: set on the command line."""
    refused: list[ConfigError] = []
    for stage in stages:
        try:
            recipe_reads(stage.config, stage.recipe, keys, str, in_files=True)
        except ConfigError as error:
            refused.append(error)
    if refused and len(refused) == len(stages):
        raise refused[-1]


def _refuse_to_train_on_what_is_held_out_later(stage: Stage, later: Sequence[Stage]) -> None:
    """Of the same source, that is: what another one has in common with it is not known before it is read."""
    own = stage.config
    for other in (s.config for s in later if stage.recipe.trains):
        if any(getattr(own.task, key) != getattr(other.task, key) for key in ("name", *OF_A_SOURCE)):
            continue
        key, mine, its = "task.holdout_frac", own.task.holdout_frac, other.task.holdout_frac
        is_trained_on = mine < its
        if other.eval.path is not None:
            key, mine, its = "eval.path", own.eval.path, other.eval.path
            is_trained_on = mine != its
        if is_trained_on:
            raise ConfigError(
                f"stages.{stage.name}.{key}",
                got=mine,
                expected=f"{its} as in a later stage: it would be trained on what is held out there",
                fix=f"set {key} once, for all stages",
            )


def _weights_note(tree: Tree, config: Config) -> tuple[str, ...]:
    """Which weights the first stage starts from, where `model.path` names a run."""
    model = tree.get("model")
    asked, path = model.get("path") if isinstance(model, dict) else None, config.model.path
    return () if path is None or path == asked or "${" in str(asked) else (f"model.path: the newest weights, {path}",)


def _dtype_note(tree: Tree, config: Config) -> tuple[str, ...]:
    """What the first stage's type is, or costs, on a CPU without instructions for bfloat16."""
    if config.cluster.device != "cpu" or computes_bfloat16():
        return ()
    model = tree.get("model")
    if isinstance(model, dict) and model.get("dtype") == "auto":
        return ("model.dtype: auto is float32 here: this processor has no instructions for bfloat16",)
    if config.model.dtype == "bfloat16":
        return ("model.dtype: this processor has no instructions for bfloat16; float32 is many times as fast",)
    return ()


def _shapes_the_run(key: str) -> bool:
    """Whether an override decides which stages exist, and their recipes, rather than a setting inside a stage."""
    head, *rest = key.split(".")
    return head == "stages" and (len(rest) < 2 or rest[1:] == ["recipe"])


def run_yaml(stages: Sequence[Stage], *, command: str = "") -> str:
    """The settings of a whole run as YAML that loads again: what stages share, then each one's own. No secrets.

    `command`: for people, as comments before them. A setting in it may have several lines.
    """
    trees = [stage.config.written(loads_again=True) for stage in stages]
    shared = trees[0]
    for tree in trees[1:]:
        shared = _shared(shared, tree)
    if len(stages) > 1 or stages[0].dir != stages[0].config.run_dir:
        shared["stages"] = {
            stage.name: {"recipe": stage.recipe.name, **_difference(tree, shared)}
            for stage, tree in zip(stages, trees, strict=True)
        }
    comment = "".join(f"# {printable(line)}\n" for line in command.splitlines())
    return comment + OmegaConf.to_yaml(OmegaConf.create(shared))


def _stage_trees(tree: Tree) -> dict[str, Tree]:
    stages = tree.get("stages") or {}
    if not isinstance(stages, dict):
        raise ConfigError("stages", got=stages, expected="a mapping of stages", fix="see `leeway cat quickstart`")
    trees: dict[str, Tree] = {}
    for name, own in stages.items():
        if own is None:  # stages.NAME=null leaves a stage out
            continue
        key = f"stages.{name}"
        if not isinstance(own, dict):
            raise ConfigError(key, got=own, expected="a mapping of settings", fix=f"write {key}.train.steps=100")
        if not re.fullmatch(r"\w[\w\-]*", str(name)) or len(str(name).encode()) > MAX_NAME_BYTES:
            raise ConfigError(
                f"stages.{str(name)[:40]}",
                got=str(name),
                expected=f"letters, digits, - and _ (first no -), at most {MAX_NAME_BYTES} bytes",
                fix="rename the stage",
            )
        for forbidden in ("project", "name", "output_dir", "stages"):
            if forbidden in own:
                raise ConfigError(
                    f"{key}.{forbidden}",
                    got=own[forbidden],
                    expected="one value for the whole run",
                    fix=f"set {forbidden} at the top of the file; the stage's folder is stages/{name}/",
                )
        check_known({k: v for k, v in own.items() if k != "recipe"}, where=f"{key}.")
        trees[name] = own
    return trees


def _recipe_of(name: str, own: Tree) -> Recipe:
    return find_recipe(own.get("recipe", name), key=f"stages.{name}.recipe")


def _check_stage_exists(override: Override, tree: Tree) -> None:
    head, *rest = override.key.split(".")
    if head != "stages" or not rest:
        return
    known = tree.get("stages") or {}
    if rest[0] not in known:
        names = ", ".join(known) or "none"
        guess = nearest(rest[0], known)
        raise ConfigError(
            override.key,
            got=words(f"stage {rest[0]}"),
            expected=f"a stage of the file ({names})",
            fix=f"nearest: stages.{guess}" if guess else "add the stage to a copy of the file (`leeway cp`)",
        )


def _shared(a: Tree, b: Tree) -> Tree:
    """The settings that are equal in both trees."""
    out: Tree = {}
    for name in a.keys() & b.keys():
        if isinstance(a[name], dict) and isinstance(b[name], dict):
            out[name] = _shared(a[name], b[name])
        elif a[name] == b[name]:
            out[name] = a[name]
    return {name: out[name] for name in a if name in out}


def _difference(tree: Tree, shared: Tree) -> Tree:
    """The settings of `tree` that are not in `shared`."""
    out: Tree = {}
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(shared.get(name), dict):
            inner = _difference(value, shared[name])
            if inner:
                out[name] = inner
        elif name not in shared:
            out[name] = value
    return out
