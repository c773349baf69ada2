"""Finished groups on disk: files of groups as safetensors, and an index in SQLite. No pickle.

    FOLDER/index.sqlite          one row a group: where it is, who made it, under which versions, what became of it
    FOLDER/000012/NAME.groups    groups end to end, each behind its length (`group_bytes.laid_out`)

A group is on disk, and in the index, before whoever delivers it is told that it has arrived. One process writes; others
may read at the same time.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..group import Group
from .folder import MOST_GROUP_BYTES, read_bytes, write_whole
from .group_bytes import groups_of, laid_out

logger = logging.getLogger(__name__)

FILES_PER_FOLDER = 1000
FINISHED, TRAINED, LEFT_OUT, VOID = "finished", "trained", "left out", "void"
"""States: not trained on yet; trained on; dropped by an operator; of a life of the run that was given up."""
_TABLE = """
CREATE TABLE IF NOT EXISTS groups (
    row INTEGER PRIMARY KEY,
    file TEXT NOT NULL, place INTEGER NOT NULL,
    group_id INTEGER NOT NULL, attempt INTEGER NOT NULL, task_id TEXT NOT NULL, explorer TEXT NOT NULL,
    source TEXT NOT NULL, draw INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL, newest_version INTEGER NOT NULL,
    reward REAL NOT NULL, tokens INTEGER NOT NULL,
    state TEXT NOT NULL, batch INTEGER
)
"""
_FILES_OF = "SELECT file FROM groups WHERE state = ? AND file != '' GROUP BY file ORDER BY MIN(row)"
_INDICES = {"draw": "source, draw", "state": "state", "file": "file"}
_INSERT = (
    "INSERT INTO groups (file, place, group_id, attempt, task_id, explorer, source, draw, oldest_version, "
    "newest_version, reward, tokens, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


@dataclass(frozen=True)
class StoredGroup:
    """A row of the index, and its group. `of`: (source, draw), which stay the same when the run goes on; the ids of
    groups do not. `batch`: the one that it was trained in.
    """

    row: int
    group: Group
    explorer: str
    of: tuple[str, int]
    state: str
    batch: int | None


class GroupStore:
    """Opened by the one process that writes. Raises ValueError for an index of something else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._writing = threading.Lock()
        self._index = sqlite3.connect(folder / "index.sqlite", isolation_level=None, check_same_thread=False)
        try:
            self._index.execute("PRAGMA journal_mode=WAL")
            self._index.execute("PRAGMA synchronous=FULL")
            self._index.execute(_TABLE)
            for name, columns in _INDICES.items():
                self._index.execute(f"CREATE INDEX IF NOT EXISTS by_{name} ON groups({columns})")
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{folder / 'index.sqlite'}: no index of groups ({error})") from None
        self._num_files = self._index.execute("SELECT COUNT(DISTINCT file) FROM groups").fetchone()[0]

    def add(
        self,
        groups: Sequence[Group],
        *,
        explorer: str = "",
        of: Callable[[int], tuple[str, int]] = lambda group_id: ("", group_id),
    ) -> list[int]:
        """Returns their rows when they are on disk. `of(group_id)`: see `StoredGroup`."""
        name = f"{self._num_files // FILES_PER_FOLDER:06d}/{self._num_files:09d}-{secrets.token_hex(4)}.groups"
        self._num_files += 1
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        write_whole(path, laid_out(groups))
        rows = [
            (
                name, place, g.group_id, g.attempt, g.task_id, explorer,
                *of(g.group_id), *g.policy_versions(),
                sum(g.rewards) / len(g.rewards), sum(g.sampled_counts()), FINISHED,
            )
            for place, g in enumerate(groups)
        ]  # fmt: skip
        with self._transaction():
            return [self._index.execute(_INSERT, row).lastrowid or 0 for row in rows]

    def trained(self, of: Sequence[tuple[str, int]], *, batch: int) -> None:
        """Those of these sources and draws were trained on, in this batch."""
        with self._transaction():
            self._index.executemany(
                "UPDATE groups SET state = ?, batch = ? WHERE source = ? AND draw = ? AND state = ?",
                [(TRAINED, batch, source, draw, FINISHED) for source, draw in of],
            )

    def left_out(self, rows: Sequence[int]) -> None:
        """An operator has dropped these. What a later life of the run draws again is generated again."""
        self._become(LEFT_OUT, rows)

    def void(self, rows: Sequence[int]) -> None:
        """These will not be trained on."""
        self._become(VOID, rows)

    def _become(self, state: str, rows: Sequence[int]) -> None:
        with self._transaction():
            self._index.executemany(
                "UPDATE groups SET state = ? WHERE row = ? AND state = ?", [(state, row, FINISHED) for row in rows]
            )

    def keep_before(self, batch: int) -> None:
        """What was not trained on before this batch is void: a run that begins with it makes its groups anew."""
        with self._transaction():
            self._index.execute(
                "UPDATE groups SET state = ? WHERE state IN (?, ?) AND COALESCE(batch, ?) >= ?",
                (VOID, FINISHED, TRAINED, batch, batch),
            )

    def resume(self, *, num_batches: int, policy_version: int) -> list[StoredGroup]:
        """What is finished and can still be trained on by a run that begins with this batch, and these weights.

        Later batches are undone. Groups of later weights are void: these weights are made anew, and are others.
        """
        with self._transaction():
            undone = (FINISHED, num_batches)
            self._index.execute("UPDATE groups SET state = ?, batch = NULL WHERE batch >= ? AND file != ''", undone)
            self._index.execute(
                "UPDATE groups SET state = ? WHERE state = ? AND newest_version > ?", (VOID, FINISHED, policy_version)
            )
        found = []
        for file in [name for (name,) in self._index.execute(_FILES_OF, (FINISHED,))]:
            try:
                found += [*read_groups(self.folder, self._index, state=FINISHED, file=file)]
            except ValueError as error:  # made again: one file must not keep the run from going on
                logger.warning("%s: its groups are made again", error)
                with self._transaction():
                    self._index.execute(
                        "UPDATE groups SET state = ? WHERE file = ? AND state = ?", (VOID, file, FINISHED)
                    )
        return found

    def forget_before(self, batch: int) -> int:
        """Remove the files of which nothing was trained in this batch or later, or will be; returns how many.

        The index keeps what is known of their groups, and forgets where they were.
        """
        needed = "SUM(state = ? OR COALESCE(batch, -1) >= ?)"
        old = f"SELECT file FROM groups WHERE file != '' GROUP BY file HAVING {needed} = 0"
        names = [name for (name,) in self._index.execute(old, (FINISHED, batch))]
        with self._transaction():
            self._index.executemany("UPDATE groups SET file = '' WHERE file = ?", [(name,) for name in names])
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        return len(names)

    def count(self, state: str) -> int:
        return self._index.execute("SELECT COUNT(*) FROM groups WHERE state = ?", (state,)).fetchone()[0]

    def by_explorer(self) -> dict[str, int]:
        """How many groups each explorer has delivered."""
        return dict(self._index.execute("SELECT explorer, COUNT(*) FROM groups GROUP BY explorer"))

    def read(self, *, state: str | None = None) -> Iterator[StoredGroup]:
        """Those that are still on disk, in the order in which they arrived. A file that is gone or damaged raises
        ValueError.
        """
        return read_groups(self.folder, self._index, state=state)

    def close(self) -> None:
        with self._writing:
            self._index.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._writing:  # `add` runs in a thread
            self._index.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._index.execute("ROLLBACK")
                raise
            self._index.execute("COMMIT")


def read_groups(
    folder: Path, index: sqlite3.Connection, *, state: str | None = None, file: str | None = None
) -> Iterator[StoredGroup]:
    asked = {"state": state, "file": file}
    where = "".join(f" AND {column} = ?" for column, value in asked.items() if value is not None)
    values = [value for value in asked.values() if value is not None]
    columns = "row, file, place, explorer, source, draw, state, batch"
    rows = index.execute(f"SELECT {columns} FROM groups WHERE file != '' {where} ORDER BY row", values).fetchall()
    held: tuple[str, list[Group]] = ("", [])
    for row, name, place, explorer, source, draw, its_state, batch in rows:
        if held[0] != name:
            data = read_bytes(folder / name, MOST_GROUP_BYTES)
            if data is None:
                raise ValueError(f"{folder / name}: the index names it, but it is not there")
            held = (name, groups_of(data))
        yield StoredGroup(row, held[1][place], explorer, (source, draw), its_state, batch)
