"""What the shell offers after TAB: recipes, bundled configs, YAML files, and the keys of the config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..config import RECIPES, bundled_configs
from ..config.keys import all_keys, is_section


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    return [(name, text) for name, text in RECIPES.items() if name.startswith(incomplete)]


def complete_bundled(incomplete: str) -> list[str]:
    return [name for name in bundled_configs() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Bundled names first, then folders and YAML files."""
    return [*complete_bundled(incomplete), *_yaml_files(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys as overrides: a section's name, and once it is typed, what is in it. Nothing after the `=`."""
    if "=" in incomplete:
        return []
    depth = incomplete.count(".")
    keys = (key for key in all_keys() if key.startswith(incomplete) and key.count(".") == depth)
    return [f"{key}." if is_section(key) else f"{key}=" for key in keys]


def _yaml_files(incomplete: str) -> Iterator[str]:
    typed, last = incomplete.rpartition("/")[:2], incomplete.rpartition("/")[2]
    place = Path("".join(typed) or ".").expanduser()
    try:
        found = sorted(place.iterdir())
    except OSError:
        return
    for path in found:
        if path.name.startswith(last) and not (path.name.startswith(".") and not last):
            if path.is_dir():
                yield f"{''.join(typed)}{path.name}/"
            elif path.suffix in (".yaml", ".yml"):
                yield f"{''.join(typed)}{path.name}"
