"""Dotted keys: which exist, what type each takes, and which one a mistyped key most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any

from ..section import Section, leaf_types, sections_in
from .errors import ConfigError, words
from .schema import Config
from .vocabulary import KEY_OF, NEVER


@cache
def all_keys() -> dict[str, Any]:
    """Every dotted key of the tree, sections included, with its annotation."""
    return dict(_walk(Config, ""))


def default_of(key: str) -> Any:
    """The default of a dotted key (of a section: all of it), or None where the key is below a free-form one."""
    models: list[type[Section]] = [Config]
    *sections, last = key.split(".")
    for name in sections:
        held = [model.model_fields[name].annotation for model in models if name in model.model_fields]
        models = [section for annotation in held for section in sections_in(annotation)]
    fields = [model.model_fields[last] for model in models if last in model.model_fields]
    return fields[0].get_default(call_default_factory=True) if fields else None


def is_free_form(key: str) -> bool:
    """Whether what is below `key` may be the user's own (env.options, rollout.engine, stages, algorithm.loss, ...)."""
    annotation = all_keys()[key]
    return dict in leaf_types(annotation) or is_choice(annotation)


def is_choice(annotation: Any) -> bool:
    """Whether a `name` chooses which options there are."""
    return any(section.model_config.get("extra") == "allow" for section in sections_in(annotation))


def takes_text(key: str) -> bool:
    """Whether `key` takes text, so that an override such as name=007 or monitor.wandb=off means just those letters."""
    kinds = leaf_types(all_keys().get(key, int)) - {NoneType}
    return bool(kinds) and all(kind is str or isinstance(kind, str) for kind in kinds)


def check_known(tree: dict[str, Any], *, prefix: str = "", where: str = "") -> None:
    """Refuse the first key of `tree` that does not exist; `where` is put before keys in the message ("stages.sft.")."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in all_keys():
            raise unknown_key(key, where=where)
        if isinstance(value, dict) and not is_free_form(key) and sections_in(all_keys()[key]):
            check_known(value, prefix=f"{key}.", where=where)


def unknown_key(key: str, *, where: str = "", value: str | None = None) -> ConfigError:
    """The error for a key that does not exist, naming the nearest one that does: as an override of `value` if given."""
    key = key if len(key) <= 120 else f"{key[:117]}..."
    if (word := key.rpartition(".")[2]) in NEVER:
        return ConfigError(f"{where}{key}", got=words("a key"), expected=f"nothing: {NEVER[word]}", fix="leave it out")
    guess = nearest_key(key)
    fix = f"nearest: {where}{guess}" if guess else f"sections: {', '.join(Config.model_fields)}"
    if guess and value is not None and len(value) <= 60 and not is_section(guess):
        fix += f"; write {where}{guess}={value}"
    return ConfigError(f"{where}{key}", got=words("an unknown key"), expected="a key of the config", fix=fix)


def nearest_key(key: str) -> str:
    """The key that was most likely meant, or ""."""
    known = list(all_keys())
    section, _, last = key.rpartition(".")
    word = last.lower().replace("-", "_").lstrip("_")
    same_section = [k for k in known if k.rpartition(".")[0] == section]
    ordered = sorted(known, key=lambda k: k.split(".")[0] in ("eval", "critic", "frontier"))
    by_last = {k.rpartition(".")[2]: k for k in reversed(ordered)}  # prefer the section that all runs have
    # Another trainer's term is translated; a forgotten or mistyped section keeps its last word; a mistyped last word
    # stays in its section.
    return next(
        iter(
            ([KEY_OF[word]] if word in KEY_OF else [])
            or ([by_last[word]] if word in by_last else [])
            or difflib.get_close_matches(key, same_section, n=1, cutoff=0.75)
            or (difflib.get_close_matches(key, known, n=1, cutoff=0.7) if section else [])
            or [by_last[w] for w in difflib.get_close_matches(word, by_last, n=1, cutoff=0.75)]
            or [KEY_OF[w] for w in difflib.get_close_matches(word, KEY_OF, n=1, cutoff=0.8)]
            or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            or same_section[:1]
        ),
        "",
    )


def is_section(key: str) -> bool:
    """Whether `key` holds further keys of ours."""
    return key in all_keys() and bool(sections_in(all_keys()[key]))


def _walk(model: type[Section], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field.annotation
        for section in sections_in(field.annotation):
            yield from _walk(section, f"{prefix}{name}.")
