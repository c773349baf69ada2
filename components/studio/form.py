"""The form: every setting as the schema describes it, so that a new one is there by itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ..config import Config, bundled_configs, bundled_recipes
from ..config.engines import ENGINES
from ..config.load import read_tree
from ..config.reference import Schema, section_of, sections
from ..config.tree import settings_in

KINDS = {"boolean": "switch", "integer": "number", "number": "number", "string": "text"}


@cache
def form() -> dict[str, Any]:
    """`presets` and `recipes` with their first lines; `sections`: each with its settings, see `_setting`."""
    schema = Config.model_json_schema()
    first = _first_settings()
    plain = {name: field for name, field in schema["properties"].items() if not _is_section(field)}
    parts = [("", {"description": "The run itself.", "properties": plain}), *sections(schema), *_engines()]
    return {
        "presets": [{"name": name, "says": _first_line(path)} for name, path in bundled_configs().items()],
        "recipes": [{"name": name, "says": says} for name, says in bundled_recipes().items()],
        "sections": [
            {"name": name, "says": part["description"], "settings": settings}
            for name, part in parts
            if "<name>" not in name and (settings := _settings(name, part["properties"], first))
        ],
    }


def _engines() -> Iterator[tuple[str, Schema]]:
    for name, kind in ENGINES.items():
        own = kind.options.model_json_schema()["properties"]
        yield "rollout.engine", {"description": f"Settings of {name}.", "properties": own}


def _settings(section: str, fields: Schema, first: set[str]) -> list[dict[str, Any]]:
    """Those of a section. Of an option that several choices have, the first one's words."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in fields.items():
        key = ".".join(filter(None, (section, name.split()[0])))
        if key not in found and not _is_section(field):
            found[key] = _setting(key, field) | {"is_first": key in first}
    return list(found.values())


def _setting(key: str, field: Schema) -> dict[str, Any]:
    """`kind`: switch, choice, number, text or yaml (anything else, as it is written in a file)."""
    options = field.get("anyOf", [field])
    given = [option for option in options if option.get("type") != "null"]
    one = given[0] if len(given) == 1 else {}
    choices = one.get("enum") or ([one["const"]] if "const" in one else [])
    kind = "choice" if choices else KINDS.get(str(one.get("type")), "yaml")
    return {
        "key": key,
        "kind": kind,
        "choices": choices,
        "may_be_null": len(given) < len(options),
        "says": field.get("description", ""),
    }


def _is_section(field: Schema) -> bool:
    return section_of(field) is not None or "oneOf" in field


def _first_settings() -> set[str]:
    """What the bundled configs set: the settings that people begin with."""
    keys: set[str] = set()
    for path in bundled_configs().values():
        tree = dict(read_tree(path))
        stages = tree.pop("stages", None) or {}
        for part in (tree, *stages.values()):
            keys |= {key for key, _ in settings_in(part)}
    return keys


def _first_line(path: Any) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")
