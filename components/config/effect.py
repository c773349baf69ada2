"""Where a setting has an effect, said beside the setting. One that has none is refused, by this module alone.

    size: Annotated[PositiveInt, for_source("reasoning_gym", "python")] = Field(...)

Two kinds. What depends on other settings (a source, a schedule) is refused wherever it is set. What depends on the
recipe is refused where it was set for that recipe: on the command line, or in its stage. The rest of a file may serve
several recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..section import Section, sections_in
from .errors import ConfigError, words
from .recipe import Named, Recipe

if TYPE_CHECKING:
    from .schema import Config


@dataclass(frozen=True)
class OnlyWith:
    """It is read only where `holds` of the other settings; `where` says that in words."""

    holds: Callable[[Config], bool]
    where: str


@dataclass(frozen=True)
class OnlyIn:
    """It is read only by recipes of which `holds`; `where` says that in words.

    `in_files`: likely to be set by mistake, so that it is refused in a file too, where no stage reads it.
    """

    holds: Callable[[Recipe], bool]
    where: str
    fix: str = "leave it out"
    in_files: bool = False


Markers = tuple[OnlyWith | OnlyIn, ...]

ANY = OnlyIn(lambda recipe: True, "all recipes")
TRAINING = OnlyIn(lambda recipe: recipe.trains, "recipes that train")
ROLLOUTS = OnlyIn(lambda recipe: recipe.is_online, "recipes that train on rollouts")
ONE_RUN = OnlyIn(lambda recipe: recipe.is_online and recipe.study_of is None, "recipes that train on rollouts once")
GROUPS = OnlyIn(lambda recipe: recipe.has_groups, "recipes with a policy loss (async_rl, offline_rl)")
SAMPLED = OnlyIn(lambda recipe: recipe.generates or recipe.has_groups, "recipes with sampled answers")
EXPERIENCES = OnlyIn(lambda recipe: recipe.trains_on == "experiences", "the recipe offline_rl")
ANSWERS = OnlyIn(lambda recipe: recipe.is_offline and not recipe.has_groups, "recipes that train on answers (sft, dpo)")
BATCHES = OnlyIn(
    lambda recipe: not recipe.has_groups,
    "recipes that train on answers (sft, dpo)",
    fix="set train.groups_per_step: a batch of rollouts is train.groups_per_step x algorithm.group_size completions",
    in_files=True,
)
TASKS = OnlyIn(
    lambda recipe: recipe.trains_on != "experiences",
    "recipes that evaluate on tasks",
    fix="leave it out, and ask afterwards: leeway run evaluate --config F model.path=RUN; what task.holdout_frac holds "
    "out are experiences, whose loss is measured",
)
PAIRS = OnlyIn(lambda recipe: recipe.trains_on == "pairs", "the recipe dpo")
REFERENCE = OnlyIn(lambda recipe: recipe.trains_on == "pairs" or recipe.has_groups, "recipes with a reference policy")
GENERATION = OnlyIn(lambda recipe: recipe.generates, "recipes that generate")
JOBS = OnlyIn(lambda recipe: recipe.is_online, "recipes that train on rollouts, as jobs of their own (train, explore)")
STUDY = OnlyIn(lambda recipe: recipe.study_of is not None, "studies (frontier)")
EVALUATION = OnlyIn(lambda recipe: recipe.reads == "heldout", "the recipe evaluate")
SERVING = OnlyIn(lambda recipe: recipe.reads == "nothing", "`leeway serve`")


def for_source(*names: str) -> OnlyWith:
    """Of `task`: read by these sources, and handed on by a mix."""
    return OnlyWith(lambda c: c.task.name in (*names, "mix"), f"task.name is {' or '.join(names)}")


def settings_have_an_effect(config: Config, recipe: Recipe) -> None:
    """Refuse a setting that `recipe` reads, other than its default, and that the others leave without any effect."""
    for key, value, markers in _set(config):
        if not all(marker.holds(recipe) for marker in markers if isinstance(marker, OnlyIn)):
            continue
        for marker in markers:
            if isinstance(marker, OnlyWith) and not marker.holds(config):
                raise _refused(key, value, f"where {marker.where}")


def recipe_reads(
    config: Config, recipe: Recipe, keys: Collection[str], named: Named, *, in_files: bool = False
) -> None:
    """Refuse one of `keys`, set for `recipe` to anything but its default, that the recipe never looks at.

    The two jobs of a run share its settings, so a half of a run may be given those of the other half.

    `in_files`: also refuse the settings of which `OnlyIn` says so.
    """
    whole = recipe.whole
    for key, value, markers in _set(config):
        is_own = any(key == own or key.startswith(f"{own}.") or own.startswith(f"{key}.") for own in keys)
        for marker in markers:
            if isinstance(marker, OnlyIn) and (is_own or (in_files and marker.in_files)) and not marker.holds(whole):
                raise _refused(named(key), value, f"in {marker.where}, not in {recipe.name}", marker.fix)


def _refused(key: str, value: Any, where: str, fix: str = "leave it out") -> ConfigError:
    if isinstance(value, dict) and any(isinstance(own, Section) for own in value.values()):
        value = words(", ".join(value))  # their names
    return ConfigError(key, got=value, expected=f"nothing: it has an effect only {where}", fix=fix)


def _set(section: Section, prefix: str = "", inherited: Markers = ()) -> Iterator[tuple[str, Any, Markers]]:
    """(key, value, markers) of every setting that differs from its default. A field's own markers of a kind replace
    those of its section.
    """
    for name, default, own, may_be_section in _fields(type(section)):
        value = getattr(section, name)
        is_section = may_be_section and isinstance(value, Section)
        if not is_section and value == default:
            continue
        markers = own + tuple(m for m in inherited if not any(type(m) is type(o) for o in own))
        if is_section:
            yield from _set(value, f"{prefix}{name}.", markers)
        else:
            yield f"{prefix}{name}", value, markers


@cache
def _fields(section: type[Section]) -> list[tuple[str, Any, Markers, bool]]:
    """(name, default, own markers, whether it may hold a section) of each field: asked of pydantic once."""
    return [
        (
            name,
            field.get_default(call_default_factory=True),
            tuple(marker for marker in field.metadata if isinstance(marker, OnlyWith | OnlyIn)),
            bool(sections_in(field.annotation)),
        )
        for name, field in section.model_fields.items()
    ]
