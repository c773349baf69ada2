"""Paths as users write them: whatever the text, an answer and no exception."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAX_NAME_BYTES = 120
"""File systems end at 255, and files beside a folder carry its name and more."""


def user_path(text: str | Path) -> Path:
    """`~` and `~name` filled in where that user exists."""
    return Path(os.path.expanduser(text))


def folder_name(text: str) -> str:
    """`text`, where it names one folder inside of another. Raises ValueError saying what is expected."""
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
