"""From a bundled name or a YAML file, and overrides, to a checked `Config`."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..redaction import hide
from ..section import Refused, Section, sections_in
from .algorithm import CHOICES
from .effect import settings_have_an_effect
from .errors import ConfigError, in_our_words, words
from .keys import check_known, default_of
from .names import nearest
from .paths import bundled_folder, is_file, user_path
from .recipe import Named, Recipe
from .rules import COMMON_RULES, TASK_RULES, check_rules
from .run_weights import newest_weights
from .schema import Config
from .secrets import references_in, secret_values
from .text import MAX_BYTES, TextError, parse_yaml
from .tree import Tree, nodes


# pydantic's phrases, as they read after "expected".
def bundled_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with the package."""
    return {file.stem: file for file in sorted(bundled_folder("configs").glob("*.yaml"))}


def config_path(name_or_file: str) -> Path:
    """The YAML file that `name_or_file` refers to: a bundled name, or a path."""
    bundled = bundled_configs()
    if name_or_file in bundled:
        return bundled[name_or_file]
    file = user_path(name_or_file)
    if is_file(file):
        return file
    guess = nearest(name_or_file, bundled)
    raise ConfigError(
        "--config",
        got=name_or_file,
        expected=f"a YAML file or one of {', '.join(bundled)}",
        fix=f"did you mean {guess}?" if guess else f"there is no file {file} here; `leeway ls` lists the bundled ones",
    )


def load_config(name_or_file: str, overrides: Sequence[str] = (), *, recipe: str = "async_rl") -> Config:
    """The checked settings of `recipe`: of its last stage where the file has stages, else of the file itself.

    Raises a one-line ConfigError (a ValueError) for anything that is wrong.
    """
    from .stages import resolve_stages  # stages are built with this module's build_config

    return resolve_stages(read_tree(config_path(name_or_file)), recipe, overrides)[-1].config


def read_tree(file: Path) -> Tree:
    """The YAML of `file` as plain dicts and lists, interpolations not yet resolved."""
    try:
        with file.open(encoding="utf-8") as opened:
            tree = parse_yaml(opened.read(MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), got=words(str(error)), expected="a YAML file in UTF-8", fix="check it") from None
    except TextError as error:  # yaml's errors carry line and column
        raise ConfigError(str(file), got=words("text that does not parse"), expected="YAML", fix=str(error)) from None
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(
            str(file), got=words(type(tree).__name__), expected="sections", fix="see `leeway cat quickstart`"
        )
    return tree  # pyright: ignore[reportReturnType]


def build_config(tree: Tree, *, recipe: Recipe, stage: str = "", stage_tree: Tree | None = None) -> Config:
    """Resolve, validate and check one recipe's tree; errors name `stages.STAGE.key` for what the stage itself sets."""
    tree = {name: value for name, value in tree.items() if name != "stages"}
    check_known(tree)
    resolved = copy.deepcopy(tree)
    try:
        if any(isinstance(leaf, str) and "${" in leaf for _, leaf in nodes(resolved)):  # most files have none
            resolved = OmegaConf.to_container(OmegaConf.create(resolved), resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError) as error:
        key = str(getattr(error, "full_key", "") or "config")
        raise ConfigError(
            key,
            got=words("an interpolation that cannot be resolved"),
            expected="a key that exists, or ${oc.env:NAME,default}",
            fix=(str(error).splitlines() or [type(error).__name__])[0][:300],
        ) from None
    prefix = f"stages.{stage}." if stage else ""

    def named(key: str) -> str:
        return f"{prefix}{key}" if any(found == key for found, _ in nodes(stage_tree)) else key

    references = references_in(tree, resolved)
    hide(secret_values(resolved, references))
    _take_newest_weights(resolved, named)
    try:
        config = Config.model_validate(resolved).from_environment(references)
        if recipe.elsewhere is not None:
            config = config.of_half(recipe.elsewhere)
        settings_have_an_effect(config, recipe)
    except ValidationError as error:
        raise _first_error(error, named) from None
    except ConfigError as error:
        raise error.where_set(named) from None
    if config.eval.address is not None and recipe.reads == "heldout":
        config = config.evaluated_at_address()
    _check_rules(config, recipe, named)
    return config


def _check_rules(config: Config, recipe: Recipe, named: Named) -> None:
    try:
        of_tasks = () if recipe.reads == "nothing" else TASK_RULES
        check_rules(config, (*of_tasks, *COMMON_RULES, *recipe.rules), named)
    except ConfigError:
        raise
    except Exception as error:  # in a rule of the user's own
        frames = traceback.extract_tb(error.__traceback__)
        frame = frames[min(2, len(frames) - 1)]  # this function, check_rules, the rule
        raise ConfigError(
            "RECIPE",
            got=words(f"{recipe.name}, whose rule {frame.name} fails: {type(error).__name__}: {error}"),
            expected="rules that raise leeway.ConfigError or nothing",
            fix=f"fix {frame.filename}:{frame.lineno}",
        ) from error


def _take_newest_weights(tree: Any, named: Any) -> None:
    """Wherever a model setting names a run's folder, replace it with that run's newest weights."""
    for section, key in (("model", "path"), ("algorithm", "reference_path"), ("critic", "path")):
        own = tree.get(section)
        if isinstance(own, dict) and isinstance(path := own.get(key), str):
            own[key] = newest_weights(named(f"{section}.{key}"), path)


def to_yaml(config: Config) -> str:
    """The settings, every default written out and secrets as references, as YAML that loads again."""
    return OmegaConf.to_yaml(OmegaConf.create(config.written(loads_again=True)))


def _first_error(error: ValidationError, named: Any) -> ConfigError:
    """One line for the first error, with the number of further errors."""
    details = error.errors(include_url=False)
    first: ErrorDetails = details[0]
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    refused = first.get("ctx", {}).get("error")
    if isinstance(refused, Refused):
        fix = refused.fix + more
        return ConfigError(named(refused.key), got=refused.got, expected=refused.expected, fix=fix)
    key, section = _key_of(first["loc"])
    if first["type"] == "extra_forbidden":
        parent, _, option = key.rpartition(".")
        options = [name for name in section.model_fields if name != "name" or parent not in CHOICES]
        guess = nearest(option, options)
        owner = section.model_fields["name"].default if parent in CHOICES else parent
        return ConfigError(
            named(key),
            got=first["input"],
            expected=f"an option of {owner} ({', '.join(options) or 'it has none'})",
            fix=(f"did you mean {guess}?" if guess else "leave it out") + more,
        )
    expected = in_our_words(first["msg"])
    default = default_of(key)
    plain = isinstance(default, bool | int | float | str | list | tuple)
    fix = f"leave it out for the default {default}" if plain else f"change or leave out {named(key)}"
    if first["type"] == "missing":
        return ConfigError(named(key), got=None, expected=expected, fix=f"set {named(key)}{more}")
    return ConfigError(named(key), got=first["input"], expected=expected, fix=fix + more)


def _key_of(place: tuple[int | str, ...]) -> tuple[str, type[Section]]:
    """The dotted key of pydantic's path, and the innermost section on it."""
    key, section, held = "", Config, Config
    for part in map(str, place):
        sections = sections_in(held)
        if len(sections) > 1:  # a name chose one of them, and the path names the choice too
            held = CHOICES[key].get(part)
            continue
        key = f"{key}.{part}" if key else part
        if sections:
            section = sections[0]
            field = section.model_fields.get(part)
            held = field.annotation if field else None
        else:
            held = get_args(held)[1] if get_origin(held) is dict else None
    return key or "config", section
