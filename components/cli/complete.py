"""What the shell offers after TAB: recipes, bundled configs, files, and the keys of the config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..config import bundled_configs, bundled_recipes
from ..config.keys import all_keys, is_section


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Bundled recipes, then folders and Python files."""
    bundled = [(name, text) for name, text in bundled_recipes().items() if name.startswith(incomplete)]
    return [*bundled, *((path, "") for path in _files(incomplete, ".py"))]


def complete_bundled(incomplete: str) -> list[str]:
    """Bundled configs and recipes."""
    return [name for name in (*bundled_configs(), *bundled_recipes()) if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Bundled names first, then folders and YAML files."""
    bundled = [name for name in bundled_configs() if name.startswith(incomplete)]
    return [*bundled, *_files(incomplete, ".yaml", ".yml")]


def complete_key(incomplete: str) -> list[str]:
    """Keys as overrides: a section's name, and once it is typed, what is in it. Nothing after the `=`."""
    if "=" in incomplete:
        return []
    depth = incomplete.count(".")
    keys = (key for key in all_keys() if key.startswith(incomplete) and key.count(".") == depth)
    return [f"{key}." if is_section(key) else f"{key}=" for key in keys]


def _files(incomplete: str, *suffixes: str) -> Iterator[str]:
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
            elif path.suffix in suffixes:
                yield f"{''.join(typed)}{path.name}"
