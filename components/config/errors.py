"""The one error that a user's settings can cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..redaction import redacted
from ..section import Refused
from .secrets import is_variable, names_a_secret
from .tree import value_at


class _Words(str):
    """Text that `got` shows as it is, instead of its repr."""


VALUE = _Words("its value")


class ConfigError(Refused):
    """Refused settings, described in one line: the dotted key, its value, what was expected, how to fix it.

    A rule may leave `got` out: the value of the setting is said.
    """

    def __init__(self, key: str, *, expected: str, fix: str, got: object = VALUE) -> None:
        if not isinstance(got, _Words) and got is not None and (names_a_secret(key) or is_variable(key)):
            got = words("a value that is not shown")
        got_text = got if isinstance(got, _Words) else _short(got)
        super().__init__(key, got=got, expected=expected, fix=fix)
        self.args = (redacted(" ".join(f"{key}: got {got_text}, expected {expected}; {fix}".split())),)

    def where_set(self, named: Callable[[str], str], config: Any = None) -> ConfigError:
        """The same with the key as the user set it, and the value of the setting."""
        got = value_at(config.model_dump(), self.key) if self.got is VALUE else self.got
        key = named(self.key)
        return ConfigError(key, got=got, expected=self.expected, fix=self.fix.replace(self.key, key))


def in_our_words(message: str) -> str:
    """What pydantic says that it expected of a value, as it reads after "expected"."""
    message = message.split(", unable to")[0].split(", got a number")[0]
    for theirs, ours in _WORDING.items():
        message = message.replace(theirs, ours)
    return message


_WORDING = {
    "Input should be ": "",
    "Value error, ": "",
    "String should have ": "text with ",
    "String should match ": "text that matches ",
    "Field required": "a value",
    "a valid integer": "an integer",
    "a valid ": "a ",
    "a dictionary or instance of ": "a mapping of settings, ",
    "a dictionary": "a mapping",
}


def words(text: str) -> _Words:
    """Mark `text` as a phrase ("4 steps"), to be shown without quotes in an error's `got`."""
    return _Words(text)


def _short(value: object, limit: int = 120) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
