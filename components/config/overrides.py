"""`key=value` on the command line: parsed as YAML, put into the tree before anything is resolved."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, words
from .keys import all_keys, is_free_form, takes_text, unknown_key
from .secrets import is_typed_secret, shown_argument, variable_of
from .text import TextError, parse_yaml
from .tree import Tree, merge, settings_in


@dataclass(frozen=True, kw_only=True)
class Override:
    """One `key=value`, its value parsed."""

    text: str
    key: str
    value: Any

    def leaves(self) -> list[str]:
        """The dotted keys it sets: itself, or those inside its mapping."""
        return [key for key, _ in settings_in(self.value, self.key)]


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Parse each text at its first `=`; the value may hold more of them."""
    return [_parse(text) for text in texts]


def apply_override(tree: Tree, override: Override) -> None:
    """Set the value in `tree`, in place: mappings are merged, list items are reached by index."""
    *path, last = override.key.split(".")
    node: Any = tree
    for depth, name in enumerate(path):
        if isinstance(node, list):
            node = node[_index(override, node, name)]
            continue
        if not isinstance(node.get(name), dict | list):
            if path[depth + 1 :] == [] and is_index(last) and not _free(override.key):
                raise ConfigError(
                    override.key,
                    got=override.value,
                    expected="an existing list",
                    fix=f"set {'.'.join(path)}=[...] first",
                )
            node[name] = {}
        node = node[name]
    if isinstance(node, list):
        node[_index(override, node, last)] = override.value
    elif isinstance(override.value, dict) and isinstance(node.get(last), dict):
        node[last] = merge(node[last], override.value)
    else:
        node[last] = copy.deepcopy(override.value)


def _parse(text: str) -> Override:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError(text, got=text, expected="key=value", fix="write for example train.steps=100")
    schema_key = _schema_key(key)
    if schema_key is None and not key.startswith("stages."):  # those are checked with their stage
        raise unknown_key(key, value=raw)
    is_text = schema_key is not None and takes_text(schema_key)
    value = _text(key, raw) if is_text else _yaml(key, raw)
    for name, leaf in settings_in(value, key):
        if is_typed_secret(name, leaf) and "${" not in leaf:
            raise ConfigError(
                name,
                got=words("a secret on the command line, which other users of the machine can read"),
                expected="a reference to an environment variable",
                fix=f"export it, and write '{name}=${{oc.env:{variable_of(name)}}}'",
            )
    return Override(text=shown_argument(text), key=key, value=value)


def _schema_key(key: str) -> str | None:
    """The schema key that `key` sets (without a stage's prefix and list indices); None if there is none."""
    parts = key.split(".")
    if parts[0] == "stages" and len(parts) > 2:
        parts = parts[2:]
        if parts == ["recipe"]:
            return "name"  # any key that takes text
    for end in range(len(parts), 0, -1):
        candidate = ".".join(parts[:end])
        if candidate in all_keys():
            rest = parts[end:]
            if not rest or is_free_form(candidate):
                return candidate if not rest else "stages"
            return candidate if len(rest) == 1 and is_index(rest[0]) else None
    return None


def _free(key: str) -> bool:
    return _schema_key(key) == "stages"


def _text(key: str, raw: str) -> str | None:
    """The text as typed, unless YAML reads it as null or strips quotes: "Q: {prompt}", 007 and off are all text."""
    try:
        value = _yaml(key, raw)
    except ConfigError:
        return raw.strip()
    return value if value is None or isinstance(value, str) else raw.strip()


def _yaml(key: str, raw: str) -> Any:
    try:
        value = parse_yaml(f"value: {raw}" if raw.strip() else "value: ''")
    except TextError as error:
        raise ConfigError(key, got=raw, expected="a YAML value", fix=f"put it in quotes ({error})") from None
    if not isinstance(value, dict) or set(value) != {"value"}:
        raise ConfigError(key, got=raw, expected="one YAML value", fix="put it in quotes")
    return value["value"]


def _index(override: Override, items: list[Any], name: str) -> int:
    if is_index(name) and int(name) < len(items):
        return int(name)
    raise ConfigError(
        override.key, got=name, expected=f"an index from 0 to {len(items) - 1}", fix="or set the whole list: [..., ...]"
    )


def is_index(name: str) -> bool:
    """Whether a part of a key is a list index."""
    return re.fullmatch(r"[0-9]{1,6}", name) is not None
