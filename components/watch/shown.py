"""What a page may show: every character has a shape, and nothing is longer than a person reads."""

from __future__ import annotations

import math
from typing import Any

MAX_CHARS = 20_000


def shown(text: str, limit: int = MAX_CHARS) -> str:
    """`text` with control characters, marks of direction and half surrogates as escapes; line ends and tabs stay.

    What is longer than `limit` is cut, and says so.
    """
    left = len(text) - limit
    if left > 0:
        text = text[:limit]
    if not text.isascii() or not text.replace("\n", "").replace("\t", "").isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)
    return text if left <= 0 else f"{text} [cut: {left:,} more characters]"


def shown_value(value: Any, depth: int = 12) -> Any:
    """The same for every text in plain dicts and lists; what JSON cannot say becomes None."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if depth == 0:
        return "[nested too deeply]"
    if isinstance(value, dict):
        return {shown(str(key), 400): shown_value(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown_value(item, depth - 1) for item in value]
    return shown(str(value))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
