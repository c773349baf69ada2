"""Paths as users write them. These functions never raise, whatever the text, unless they say so."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

MAX_NAME_BYTES = 120
"""File systems allow 255; files next to a folder are named after it with a suffix."""


def bundled_folder(name: str) -> Path:
    """The folder of `leeway.<name>`: in a checkout it is beside the package, not inside."""
    spec = find_spec(f"leeway.{name}")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def user_path(text: str | Path) -> Path:
    """Expand `~` and `~name` if that user exists."""
    return Path(os.path.expanduser(text))


def folder_name(text: str) -> str:
    """Return `text` if it is a valid name for one folder. Raises ValueError saying what is expected."""
    if re.fullmatch(r"\w[\w.\-]*", text) and len(text.encode()) <= MAX_NAME_BYTES:
        return text
    raise ValueError(
        f"a name of letters, digits, _, - and . that begins with a letter, a digit or _, at most {MAX_NAME_BYTES} bytes"
    )


def is_file(path: str | Path) -> bool:
    """As `Path.is_file`, and False for a name that no file can have (too long, a NUL in it)."""
    try:
        return user_path(path).is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: str | Path) -> bool:
    """As `Path.is_dir`, and False for a name that no folder can have."""
    try:
        return user_path(path).is_dir()
    except (OSError, ValueError):
        return False
