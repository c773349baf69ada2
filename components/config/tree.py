"""Settings as plain dicts and lists, before they are checked: what is in them, by dotted key."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Tree = dict[str, Any]


def nodes(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of `tree` itself and of everything in it, in mappings and lists."""
    yield prefix, tree
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, child in children:
        yield from nodes(child, f"{prefix}.{name}" if prefix else str(name))


def value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key, or None; names may themselves have dots."""
    return next((value for found, value in nodes(tree) if found == key), None)


def settings_in(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is set at or below `prefix`; a list is one value."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from settings_in(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


def merge(base: Tree, over: Tree) -> Tree:
    """A new tree: `over` merged over `base`. Mappings are merged, anything else is replaced."""
    merged = copy.deepcopy(base)
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = merge(merged[name], value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged
