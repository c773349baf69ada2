"""Rows from a database: the result of a query on a SQLite file, which can only read that file.

SQLite has neither lists nor mappings. A column that a query names `"tokens [json]"` is JSON, and read under `tokens`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from ..config.paths import is_file, user_path

# A read-only connection still attaches other files, and creates those that do not exist.
READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

_JSON, _DETECT = "json", sqlite3.PARSE_COLNAMES


def _from_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


sqlite3.register_converter(_JSON, _from_json)  # of connections that ask for it


def sql_items(path: str, query: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row as a dict) of each row, in the query's order. Raises ValueError in one line."""
    file = user_path(path)
    if not is_file(file):
        raise ValueError(f"task.path: got {path}, expected an existing SQLite file")
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, detect_types=_DETECT)) as database:
        database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
        try:
            found = database.execute(query)
            names = [column[0] for column in found.description or ()]
            for number, row in enumerate(found):
                yield f"{path}, row {number}", dict(zip(names, row, strict=True))
        except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:  # the last from columns as JSON
            why = " ".join(str(error).split())
            raise ValueError(f"task.query: {query!r} on {path}: {why}; expected a SELECT") from None
    if not names:
        raise ValueError(f"task.query: got {query!r}, expected a SELECT")
