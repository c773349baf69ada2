"""Rows from a database: the result of a query on a SQLite file, which can only read that file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from ..config.paths import is_file, user_path

# A read-only connection still attaches other files, and creates those that do not exist.
READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def sql_items(path: str, query: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row as a dict) of each row, in the query's order. Raises ValueError in one line."""
    file = user_path(path)
    if not is_file(file):
        raise ValueError(f"task.path: got {path}, expected an existing SQLite file")
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
        database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
        try:
            found = database.execute(query)
            if found.description is None:
                raise ValueError(f"task.query: got {query!r}, expected a SELECT")
            names = [column[0] for column in found.description]
            for number, row in enumerate(found):
                yield f"{path}, row {number}", dict(zip(names, row, strict=True))
        except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"task.query: {query!r} on {path}: {why}; expected a SELECT") from None
