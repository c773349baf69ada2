"""The one error that a user's settings can cause."""

from __future__ import annotations

from ..redaction import redacted
from ..section import Refused
from .secrets import is_variable, names_a_secret


class ConfigError(Refused):
    """Refused settings, described in one line: the dotted key, its value, what was expected, how to fix it."""

    def __init__(self, key: str, *, got: object, expected: str, fix: str) -> None:
        if not isinstance(got, _Words) and got is not None and (names_a_secret(key) or is_variable(key)):
            got = words("a value that is not shown")
        got_text = got if isinstance(got, _Words) else _short(got)
        super().__init__(key, got=got, expected=expected, fix=fix)
        self.args = (redacted(" ".join(f"{key}: got {got_text}, expected {expected}; {fix}".split())),)


class _Words(str):
    """Text that `got` shows as it is, instead of its repr."""


def words(text: str) -> _Words:
    """Mark `text` as a phrase ("4 steps"), to be shown without quotes in an error's `got`."""
    return _Words(text)


def _short(value: object, limit: int = 120) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
