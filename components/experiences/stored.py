"""Groups that another run kept, as a reader finds them: the index is read only, and each group by itself.

Whoever wrote the folder may be anybody: a path in the index that leads elsewhere is refused, nothing is unpickled, and
the index is asked for its table alone.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..config.paths import is_file, user_path
from ..group import Group
from ..jobs.group_bytes import group_at
from ..jobs.store import FINISHED, TRAINED

INDEX = "index.sqlite"
_PLACES = ("", "groups", "meeting/groups")
_READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
_QUERY = "SELECT file, place, task_id, reward, tokens FROM groups WHERE file != '' AND state IN (?, ?) ORDER BY row"


@dataclass(frozen=True)
class Listed:
    """A row of the index. `at`: (file, place in it). `reward`: the mean of the group's."""

    at: tuple[str, int]
    task_id: str
    reward: float
    tokens: int


class StoredGroups:
    """The groups below `folder`, which holds an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_task: dict[str, tuple[str, int]] | None = None
        self._reading = threading.Lock()

    def listed(self) -> Iterator[Listed]:
        """Those that were trained on, or could have been, in the order in which they arrived.

        Raises ValueError in one line for an index of something else.
        """
        index = self.folder / INDEX
        try:
            with closing(sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True)) as database:
                database.set_authorizer(
                    lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY
                )
                for file, place, task_id, reward, tokens in database.execute(_QUERY, (TRAINED, FINISHED)):
                    yield Listed((str(file), int(place)), str(task_id), float(reward), int(tokens))
        except (sqlite3.Error, TypeError, ValueError) as error:
            raise ValueError(f"{index}: no index of groups ({' '.join(str(error).split())[:120]})") from None

    def read(self, file: str, place: int) -> Group:
        """The group at this place. Raises ValueError in one line where it is gone, damaged, or not below the folder."""
        parts = PurePosixPath(file).parts
        path = self.folder.joinpath(*parts)
        if not parts or path.is_absolute() != self.folder.is_absolute() or ".." in parts or parts[0] == "/":
            raise ValueError(f"{self.folder / INDEX}: names {file!r:.80}, expected a file below its folder")
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{path}: leads out of {self.folder}, expected a file below it")
        return group_at(path, place)

    def by_task(self, task_id: str) -> tuple[str, int] | None:
        """Where the group of this task is; None: there is none."""
        with self._reading:
            if self._by_task is None:
                self._by_task = {found.task_id: found.at for found in self.listed()}
        return self._by_task.get(task_id)


def stored_below(path: str, *, key: str) -> StoredGroups:
    """The kept groups of a run, given its folder, a stage's, or that of the groups. Raises ValueError naming `key`."""
    run = user_path(path)
    stages = [Path("stages", stage.name) for stage in sorted(run.glob("stages/*"))]
    folders = [run / place / own for place in (Path(), *stages) for own in _PLACES]
    found = [folder for folder in folders if is_file(folder / INDEX)]
    if not found:
        raise ValueError(
            f"{key}: got {path}, expected the folder of a run that kept its groups ({INDEX}); "
            "run it with replay.keep_groups=true"
        )
    if len(found) > 1:
        raise ValueError(
            f"{key}: got {path}, which has groups in {' and '.join(str(f) for f in found[:3])}; name one of them"
        )
    return StoredGroups(found[0])
