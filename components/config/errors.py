"""The one error a user's settings can cause."""

from __future__ import annotations


class ConfigError(ValueError):
    """Settings that are refused, in one line: the dotted key, what it got, what was expected, how to fix it."""

    def __init__(self, key: str, *, got: object, expected: str, fix: str) -> None:
        self.key = key
        got_text = got if isinstance(got, _Words) else _short(got)
        super().__init__(" ".join(f"{key}: got {got_text}, expected {expected}; {fix}".split()))


class _Words(str):
    """Text that is shown as it is, where `got` would otherwise show a value's repr."""


def words(text: str) -> _Words:
    """Mark `text` as a phrase ("4 steps"), to be shown without quotes in an error's `got`."""
    return _Words(text)


def _short(value: object, limit: int = 120) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
