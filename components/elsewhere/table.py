"""What another system's keys mean here: a table of rows, and what becomes of each key of one file.

A row names keys of theirs and keys of ours, and holds the function between the two. Where units differ (a batch in
samples there and in tasks here), one row takes all of the keys that the answer depends on. The page of the
documentation and `leeway import` read the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["exact", "approximate", "ignored", "refused", "unknown"]
BAD: tuple[Kind, ...] = ("refused", "unknown")
ITEM = re.compile(r"\[\d+\]")


class Unusable(Exception):
    """A value that cannot be what its key means, in one line."""


@dataclass(frozen=True)
class Fate:
    """What becomes of a row's keys: the settings of ours that they turn into, and why not more."""

    kind: Kind
    ours: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


class Theirs:
    """The settings of one file: dotted key -> value, an item of a list as `key[0]`.

    `get` falls back to what their system takes where nothing is given. `at`: the same for one item of a list, whose
    index stands for the `[]` of a key.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], index: int | None = None) -> None:
        self.given, self._defaults, self.index = given, defaults, index

    def at(self, index: int) -> Theirs:
        return Theirs(self.given, self._defaults, index)

    def key(self, key: str) -> str:
        """As it stands in the file."""
        return key if self.index is None else key.replace("[]", f"[{self.index}]")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.given.get(self.key(key))
        if value is None or value == "":
            value = self._defaults.get(key, default)
        return value

    def is_given(self, key: str) -> bool:
        """Whether the file sets it to a value."""
        return self.given.get(self.key(key)) is not None

    def below(self, prefix: str) -> dict[str, Any]:
        """What is given under `prefix.`, by the rest of its key."""
        start = f"{self.key(prefix)}."
        return {name.removeprefix(start): value for name, value in self.given.items() if name.startswith(start)}

    def items(self, prefix: str) -> list[int]:
        """The indices of a list's items."""
        found = (re.match(rf"{re.escape(prefix)}\[(\d+)\]", name) for name in self.given)
        return sorted({int(match[1]) for match in found if match})

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = number_of(self.get(key, default))
        if value is None or value != int(value) or value < least:
            raise self._unusable(key, f"an integer of at least {least}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = number_of(self.get(key, default))
        if value is None:
            raise self._unusable(key, "a number")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str | int | float):
            raise self._unusable(key, "text")
        return str(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value not in (True, False):
            raise self._unusable(key, "true or false")
        return bool(value)

    def _unusable(self, key: str, expected: str) -> Unusable:
        return Unusable(f"{self.key(key)}: got {shown(self.get(key))}, expected {expected}")


def number_of(value: Any) -> float | None:
    """A number, or text that is one; where it comes from the environment, its default there. None for the rest."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = re.sub(r"^\$\{oc\.env:\w+,(.*)\}$", r"\1", value)
        if not re.fullmatch(r"\s*[-+]?(\d[\d_]{0,30}\.?\d{0,30}|\.\d{1,30})([eE][-+]?\d{1,3})?\s*", value):
            return None
        return float(value)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e18 else None


def shown(value: Any, limit: int = 60) -> str:
    text = "null" if value is None else " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


@dataclass(frozen=True, kw_only=True)
class Row:
    """Keys of theirs that mean something together. A key ends with `.**` for everything below; `[]` is each item.

    `kind` and `why` are what the documentation says of it; `convert` decides for one file.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    kind: Kind
    why: str
    convert: Callable[[Theirs], Fate]

    def takes(self, key: str) -> bool:
        """`key`: as in a file."""
        plain = ITEM.sub("[]", key)
        return any(plain == own or (own.endswith(".**") and plain.startswith(own[:-2])) for own in self.theirs)

    @property
    def lists(self) -> set[str]:
        """The lists whose items some of its keys are of."""
        return {own.partition("[]")[0] for own in self.theirs if "[]" in own}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Everything that is known of one system. `defaults`: what it takes where a file says nothing.

    `recipe`: the recipe of ours for a file; raises Unusable where there is none.
    """

    system: str
    title: str
    rows: tuple[Row, ...]
    defaults: Mapping[str, Any]
    recipe: Callable[[Theirs], str]


@dataclass(frozen=True)
class Line:
    """One line of the table that `leeway import` prints. `by_default`: nothing of it stands in the file."""

    theirs: str
    fate: Fate
    by_default: bool = False


def translate(table: Table, given: Mapping[str, Any], *, only_given: bool = False) -> tuple[dict[str, Any], list[Line]]:
    """Our settings by dotted key, and a line for each row that has something to say.

    `only_given`: leave out what only follows from their defaults.
    """
    settings: dict[str, Any] = {}
    lines: list[Line] = []
    known: set[str] = set()
    for row in table.rows:
        for theirs in _instances(row, Theirs(given, table.defaults)):
            own = [key for key in given if row.takes(key) and _belongs(key, theirs, row)]
            new = [key for key in own if key not in known]  # the first row that takes a key says what becomes of it
            by_default = not own and not only_given and any(key in table.defaults for key in row.theirs)
            if not (new or (row.kind not in ("ignored", "refused") and (own or by_default))):
                continue
            known.update(own)
            try:
                fate = row.convert(theirs)
            except Unusable as error:
                fate = Fate("refused", {}, str(error))
            settings |= fate.ours
            if new or fate.ours or fate.kind == "refused":
                named = new if row.kind in ("ignored", "refused") else own
                text = ", ".join(f"{key}={shown(given[key])}" for key in named[:8])
                text += ", ..." if len(named) > 8 else ""
                lines.append(Line(text or ", ".join(row.theirs[:4]), fate, by_default=not own))
    for key, value in given.items():
        is_empty = value in (None, "", [], {}) and any(own.startswith((f"{key}.", f"{key}[")) for own in _keys(table))
        if key not in known and not is_empty:
            lines.append(Line(f"{key}={shown(given[key])}", Fate("unknown", {}, "no row of the table knows it")))
    return settings, lines


def _keys(table: Table) -> Iterator[str]:
    return (key for row in table.rows for key in row.theirs)


def _instances(row: Row, theirs: Theirs) -> Iterator[Theirs]:
    """The file as a whole, where a key is not of a list; then each item of its lists."""
    if not all("[]" in own for own in row.theirs):
        yield theirs
    for index in sorted({index for prefix in row.lists for index in theirs.items(prefix)}):
        yield theirs.at(index)


def _belongs(key: str, theirs: Theirs, row: Row) -> bool:
    """Whether a key is of the item that is looked at, or of none where none is."""
    prefix = next((prefix for prefix in row.lists if key.startswith(f"{prefix}[")), None)
    if theirs.index is None or prefix is None:
        return theirs.index is None and prefix is None
    return key.startswith(theirs.key(f"{prefix}[]."))


def same(theirs: str, ours: str, *, why: str = "", change: Callable[[Any], Any] | None = None) -> Row:
    """It means the same here; `change` puts its value into our words, and returns None for what has none."""

    def convert(t: Theirs) -> Fate:
        value = t.get(theirs)
        if value is None:
            return Fate("exact", {}, "null there: our default")
        found = value if change is None else change(value)
        if found is None:
            return Fate("refused", {}, f"{shown(value)} has no counterpart here")
        return Fate("exact", {ours: found}, why)

    return Row(theirs=(theirs,), ours=(ours,), kind="exact", why=why, convert=convert)


def near(theirs: str, ours: str, why: str, *, change: Callable[[Any], Any] | None = None) -> Row:
    """As `same`, but not quite the same; `why` says how it differs."""
    row = same(theirs, ours, why=why, change=change)

    def convert(t: Theirs) -> Fate:
        fate = row.convert(t)
        return Fate("approximate", fate.ours, why) if fate.kind == "exact" else fate

    return Row(theirs=row.theirs, ours=row.ours, kind="approximate", why=why, convert=convert)


def ignored(why: str, *theirs: str) -> Row:
    """Nothing is learned differently without it."""
    return Row(theirs=theirs, ours=(), kind="ignored", why=why, convert=lambda t: Fate("ignored", {}, why))


def refused(why: str, *theirs: str, unless: tuple[Any, ...] = (None, False, "", 0)) -> Row:
    """It would train something else without it, unless every value is one of `unless`, which change nothing."""

    def convert(t: Theirs) -> Fate:
        harmless = ("null", *(str(value).lower() for value in unless), "none", "[]", "{}")
        values = [v for own in theirs for v in _values(t, own)]
        if all(str(value).lower() in harmless for value in values):
            return Fate("ignored", {}, "off there, and not here")
        return Fate("refused", {}, why)

    return Row(theirs=theirs, ours=(), kind="refused", why=why, convert=convert)


def _values(t: Theirs, key: str) -> list[Any]:
    if key.endswith(".**"):
        return list(t.below(key[:-3]).values())
    return [t.given[t.key(key)]] if t.key(key) in t.given else []


def joint(
    theirs: tuple[str, ...],
    ours: tuple[str, ...],
    why: str,
    convert: Callable[[Theirs], Fate],
    *,
    kind: Kind = "exact",
) -> Row:
    """Keys that mean something only together, or whose value decides."""
    return Row(theirs=theirs, ours=ours, kind=kind, why=why, convert=convert)
