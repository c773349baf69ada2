"""The text of each token id, from the tokenizer.json of the run's model; kept in a database, not in memory."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_FILE = 64 << 20
MAX_ID = 10_000_000


class Pieces:
    """`find(ids)` gives what each token says, None for one that is not known (then the page shows the id).

    `folders`: where a tokenizer.json may be, the first that has one is read, at the first question.
    """

    def __init__(self, folders: Iterable[Path], database: Path) -> None:
        self._folders, self._database = list(folders), database
        self._source: Path | None = None
        self._building = threading.Lock()  # a page asks for a whole group at once

    def find(self, ids: Sequence[int]) -> list[str | None]:
        """One for each id. Bytes that are no character by themselves are shown as \\x.."""
        if not self._ready():
            return [None] * len(ids)
        wanted = sorted({i for i in ids if 0 <= i < MAX_ID})
        found: dict[int, str] = {}
        db = sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)
        try:
            for first in range(0, len(wanted), 500):
                part = wanted[first : first + 500]
                marks = ",".join("?" * len(part))
                found.update(db.execute(f"select id, text from pieces where id in ({marks})", part))
        finally:
            db.close()
        return [found.get(i) for i in ids]

    def _ready(self) -> bool:
        source = next((file for folder in self._folders if (file := folder / "tokenizer.json").is_file()), None)
        if source is None:
            return False
        with self._building:
            if source != self._source:
                self._build(source)
                self._source = source
        return True

    def _build(self, source: Path) -> None:
        self._database.unlink(missing_ok=True)
        db = sqlite3.connect(self._database)
        try:
            db.execute("create table pieces(id integer primary key, text text)")
            db.executemany("insert or replace into pieces values (?, ?)", _vocabulary(source))
            db.commit()
        finally:
            db.close()


def _vocabulary(source: Path) -> Iterator[tuple[int, str]]:
    try:
        with source.open("rb") as file:
            tokenizer = json.loads(file.read(MAX_FILE))
        model = tokenizer["model"]
        vocabulary = model["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if isinstance(vocabulary, Mapping):
        pairs = ((number, text) for text, number in vocabulary.items())
    else:  # unigram: [[text, score], ...]
        pairs = ((number, entry[0]) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry)
    in_bytes = "ByteLevel" in json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])
    for number, text in pairs:
        if _is_piece(number, text):
            yield number, _from_bytes(text) if in_bytes else text.replace("\u2581", " ")
    added = tokenizer.get("added_tokens")
    for own in added if isinstance(added, list) else ():
        if isinstance(own, Mapping) and _is_piece(own.get("id"), own.get("content")):
            yield own["id"], own["content"]


def _is_piece(number: Any, text: Any) -> bool:
    return isinstance(number, int) and isinstance(text, str) and 0 <= number < MAX_ID and text.isprintable()


def _from_bytes(text: str) -> str:
    """Byte-level pieces stand for bytes by one printable character each."""
    try:
        own = bytes(_BYTE_OF[c] for c in text)
    except KeyError:
        return text
    return own.decode("utf-8", "backslashreplace")


def _byte_of() -> dict[str, int]:
    """GPT-2's table: printable bytes are themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_of()
