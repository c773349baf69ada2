"""The settings as a page or a form shows them: sections in order, and of each setting what the schema says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

Schema = dict[str, Any]
"""A JSON schema, or a part of one."""


def sections(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(dotted name, definition) of every section of the settings' JSON schema, each followed by those inside it."""
    yield from _walk(schema, schema["properties"], prefix="")


def _walk(schema: Schema, fields: Schema, *, prefix: str) -> Iterator[tuple[str, Schema]]:
    """(dotted name, definition) of every section in `fields`, each followed by those inside it."""
    for name, field in fields.items():
        section = section_of(field)
        if "oneOf" in field:
            yield f"{prefix}{name}", _choice(schema, field)
        elif section is not None:
            definition = schema["$defs"][section]
            yield f"{prefix}{name}", definition
            yield from _walk(schema, definition["properties"], prefix=f"{prefix}{name}.")
        elif isinstance(each := field.get("additionalProperties"), dict) and (of := section_of(each)):
            yield f"{prefix}{name}.<name>", schema["$defs"][of]


def _choice(schema: Schema, field: Schema) -> Schema:
    """A section whose `name` chooses which options there are, as one definition: each option once for each choice."""
    classes = [schema["$defs"][section_of(option)] for option in field["oneOf"]]
    built_in = [c for c in classes if not c.get("additionalProperties")]
    names = {c["properties"]["name"]["const"]: c for c in built_in}
    own = {"name": {"type": "string", "description": f"one of {_names(names)}, or your own class as `pkg.mod:Name`"}}
    takers: dict[tuple[str, str], list[str]] = {}  # an option with all that is said of it -> the names that take it
    for name, definition in names.items():
        for option, inner in definition["properties"].items():
            if option != "name":
                takers.setdefault((option, json.dumps(inner)), []).append(name)
    for (option, inner), of in takers.items():
        field = json.loads(inner)
        own[f"{option} {of[0]}"] = field | {"description": f"{_names(of)}: {field['description']}"}
    return {"description": "Options belong to the `name` beside them.", "properties": own}


def section_of(field: Schema) -> str | None:
    """The name of the section that a field holds, if it holds one."""
    options = [field, *field.get("anyOf", [])]
    return next((option["$ref"].rpartition("/")[2] for option in options if "$ref" in option), None)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
