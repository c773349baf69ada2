"""YAML text to plain values, for files and overrides alike, and back. Any text gives a value or one error.

With aliases, a short YAML text can stand for a tree of any size. Deep nesting crashes yaml's C reader and with it the
process. So both are counted before anything is built.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml
from omegaconf import OmegaConf

MAX_BYTES = 4 << 20
MAX_DEPTH = 50
MAX_NODES = 100_000
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TextError(Exception):
    """Why a text cannot be read as YAML, in one line."""


def parse_yaml(text: str) -> Any:
    """The mapping or list of `text`, interpolations not resolved; {} for an empty one. Raises TextError.

    OmegaConf's reader, so that 1e-6 is a number in files and overrides alike.
    """
    if len(text) > MAX_BYTES:
        raise TextError(f"longer than {MAX_BYTES >> 20} MiB")
    try:
        return deepcopy(_parse(text))
    except TextError:
        raise
    except AssertionError:
        raise TextError("one value where a mapping or a list is expected") from None
    except Exception as error:  # from yaml or OmegaConf, or a number or date that Python refuses: the text is at fault
        raise TextError(" ".join(str(error).split())[:300] or type(error).__name__) from None


def to_text(tree: dict[str, Any]) -> str:
    """`tree` as YAML, in its order; `parse_yaml` reads it back."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


@lru_cache(maxsize=100)  # a command reads the same file and overrides several times, at 10 ms each
def _parse(text: str) -> Any:
    _measure(text)
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _measure(text: str) -> None:
    """Refuse text that is nested too deeply, or too large once every alias is expanded."""
    sizes: dict[str, int] = {}  # nodes of each anchored value, with aliases expanded
    open_values: list[tuple[str | None, int]] = []  # (anchor, nodes before it)
    nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_values):
                raise TextError(f"the alias *{event.anchor} refers to a value that contains it")
            nodes += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_values.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_values.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        if len(open_values) > MAX_DEPTH:
            raise TextError(f"nested more than {MAX_DEPTH} levels deep")
        if nodes > MAX_NODES:
            raise TextError(f"more than {MAX_NODES:,} values with aliases expanded")
