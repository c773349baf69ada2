"""What a stage's files hold, found without reading them again: columns of metrics, and one row for each rollout."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .columns import Columns, load_state
from .lines import FollowedFile, as_object, last_lines, objects

VERSION = 2
"""Of what is kept on disk; an index of another one is made anew."""
RECENT_STEPS = 20
MAX_SUSPECTS = 25_000
MAX_FILE = 1 << 30
"""Of one step's rollouts."""
_STEP_FILE = re.compile(r"step-(\d{1,12})\.jsonl")
_TABLES = """
create table if not exists files(step integer primary key, rows integer);
create table if not exists rollouts(
    step integer, offset integer, size integer, group_id integer, task text, sequence integer, reward real,
    advantage real, lag real, tokens integer, reason text, turns integer);
create index if not exists by_step on rollouts(step);
create index if not exists by_group on rollouts(group_id);
create index if not exists by_task on rollouts(task, step);
create table if not exists reasons(reason text primary key);
create table if not exists suspects(step integer, group_id integer, sequence integer, signs text);
create index if not exists by_suspect on suspects(group_id, sequence);
"""
_INSERT = "insert into rollouts values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
SORTS = {
    "newest": "step desc, rowid",
    "oldest": "step, rowid",
    "best": "reward desc, step desc",
    "worst": "reward, step desc",
    "longest": "tokens desc, step desc",
    "stalest": "lag desc, step desc",
}


class StageIndex:
    """`advance` reads what is new, for a limited time, in one thread; everything else may be called from any thread.

    `cache`: a folder of this object's own; what it has of an earlier look is used again.
    """

    def __init__(self, stage_dir: Path, cache: Path) -> None:
        self.dir = stage_dir
        self._rollout_dir = stage_dir / "rollouts"
        cache.mkdir(parents=True, exist_ok=True)
        self._state_file, self._database = cache / "state.json", cache / "rollouts.sqlite"
        self._metrics = FollowedFile(stage_dir / "metrics.jsonl")
        self._suspects = FollowedFile(stage_dir / "suspects.jsonl")
        self._columns = Columns(cache / "columns")
        self._lock = threading.Lock()
        self._recent: deque[dict[str, Any]] = deque()
        self._glimpsed = 0
        self._pending: list[int] = []
        self._known: set[int] = set()
        self._listed_at = -1
        self._num_suspects = self._num_rollouts = 0
        self._saved_at = time.monotonic()
        self.last_step, self.last_time = -1, 0.0
        self.revision = 0
        self._writer = self._open()
        if not self._restore():
            self._reset()

    # What the page asks for

    # Columns are read without the lock: the thread that reads a long file takes it again sooner than anybody wakes up.

    @property
    def names(self) -> list[str]:
        return self._columns.names

    def series(self, name: str, start: float = -math.inf, stop: float = math.inf) -> tuple[Any, Any]:
        return self._columns.read(name, start, stop)

    def last_values(self, name: str, num: int) -> Any:
        return self._columns.last(name, num)

    def recent_rows(self) -> list[dict[str, Any]]:
        """The lines of the last `RECENT_STEPS` steps."""
        with self._lock:
            return list(self._recent)

    def seconds_of_steps(self, num: int, default: float = 30.0) -> float:
        """How long the last `num` steps took together."""
        took = [t for row in self.recent_rows() if isinstance(t := row.get("step/total_s"), float) and 0 < t < 1e6]
        return sum(took[-num:]) or default

    def progress(self) -> dict[str, Any]:
        """How much was read: shares, and what could not be."""
        known, waiting = len(self._known), len(self._pending)
        return {
            "metrics": round(self._metrics.progress(), 3),
            "rollouts": round(1 - waiting / known, 3) if known else 1.0,
            "num_rollouts": self._num_rollouts,
            "skipped_lines": self._metrics.num_skipped + self._suspects.num_skipped,
            "refused_names": self._columns.num_refused,
        }

    def find(self, filters: Mapping[str, Any], *, sort: str, limit: int, offset: int) -> dict[str, Any]:
        """Rollouts that match, `limit` of them from `offset` on, and how many there are.

        `filters`: any of reward_min, reward_max, lag_min, lag_max, tokens_min, tokens_max, step_min, step_max, task (a
        part of its id), group, reason, sign.
        """
        where, values = _where(filters)
        query = f"select rowid, * from rollouts where {where} order by {SORTS[sort]} limit ? offset ?"
        with self._reader() as db:
            rows = [dict(row) for row in db.execute(query, (*values, limit, offset))]
            count = f"select count(*) from rollouts where {where}"
            total = db.execute(count, values).fetchone()[0] if values else self._num_rollouts
            for row in rows:
                row["signs"] = _signs(db, row)
        return {"total": total, "rows": rows}

    def choices(self) -> dict[str, list[str]]:
        """The reasons of ending and the signs of suspects that occur."""
        with self._reader() as db:
            reasons = [r[0] for r in db.execute("select reason from reasons limit 30") if r[0]]
            signs = [r[0] for r in db.execute("select distinct signs from suspects limit 500")]
        return {"reasons": sorted(reasons), "signs": sorted({one for text in signs for one in text.split()})[:30]}

    def lags(self, num_steps: int = 100) -> list[dict[str, int]]:
        """How many rollouts of the last steps had which lag, rounded."""
        query = (
            "select cast(round(lag) as integer) as lag, count(*) as count from rollouts "
            "where lag is not null and step > (select max(step) from rollouts) - ? group by 1 order by 1 limit 200"
        )
        with self._reader() as db:
            return [dict(row) for row in db.execute(query, (num_steps,))]

    def slow_tasks(self) -> list[tuple[str, float]]:
        """(task, mean tokens) of the longest tasks among recent rollouts, longest first."""
        query = (
            "select task, avg(tokens) from "
            "(select task, tokens from rollouts order by step desc, rowid desc limit 2000) "
            "group by task order by 2 desc limit 3"
        )
        with self._reader() as db:
            return [(task, mean) for task, mean in db.execute(query) if mean is not None]

    def rollout(self, rowid: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """(its row of the index, the line of the file); None if there is no such rollout, or its file has gone."""
        with self._reader() as db:
            found = db.execute("select rowid, * from rollouts where rowid = ?", (rowid,)).fetchone()
            if found is None:
                return None
            row: dict[str, Any] = dict(found) | {"signs": _signs(db, found)}
        try:
            with (self._rollout_dir / _name(row["step"])).open("rb") as file:
                file.seek(row["offset"])
                line = as_object(file.read(row["size"]))
        except OSError:
            return None
        return None if line is None else (row, line)

    # The thread that reads

    def advance(self, budget_s: float = 0.25) -> bool:
        """Read for about this long; returns whether anything was new."""
        until = time.monotonic() + budget_s
        if self._metrics.was_replaced():  # the run was resumed, and trains some steps again
            self._reset()
        before = self.revision
        while (lines := self._metrics.read(1 << 20)) and time.monotonic() < until:
            self._take_metrics(lines)
        if lines:
            self._take_metrics(lines)
        self._columns.flush()
        self._list_rollouts()
        while self._pending and time.monotonic() < until:
            self._take_rollouts(self._pending.pop())
        self._take_suspects()
        self._writer.commit()
        if self.revision != before and (not self._pending or time.monotonic() - self._saved_at > 5):
            self._save()
        return self.revision != before

    def close(self) -> None:
        self._writer.commit()
        self._save()
        self._writer.close()

    def _take_metrics(self, lines: list[bytes]) -> None:
        at = self._metrics.offset - sum(len(line) + 1 for line in lines)
        for line in lines:
            at += len(line) + 1
            if (row := as_object(line)) is not None:
                self._columns.append(row)
                if at > self._glimpsed:
                    self._remember(row)
        self.revision += 1

    def _glimpse(self, stop: int | None = None) -> None:
        """Look at the last lines (before `stop`): what a run does now is known long before all of it was read."""
        self._glimpsed = self._metrics.end() if stop is None else stop
        for row in objects(last_lines(self._metrics.path, stop=self._glimpsed)):
            self._remember(row)

    def _remember(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._note(row)

    def _note(self, row: dict[str, Any]) -> None:
        step, at = row.get("step"), row.get("time")
        if not isinstance(step, int) or abs(step) > 1 << 40:
            return
        self.last_step = max(self.last_step, step)
        if isinstance(at, int | float) and abs(at) < 1e15:
            self.last_time = max(self.last_time, float(at))
        self._recent.append(row)
        while self._recent and self._recent[0]["step"] <= self.last_step - RECENT_STEPS:
            self._recent.popleft()
        while len(self._recent) > 20 * RECENT_STEPS:
            self._recent.popleft()

    def _list_rollouts(self) -> None:
        """Note the files that came since the folder was last looked at; listing a folder of 10^5 costs a tenth of a
        second, so a large one is asked for the next steps by name.
        """
        try:
            changed = os.stat(self._rollout_dir).st_mtime_ns
        except OSError:
            return
        if changed == self._listed_at:
            return
        if len(self._known) < 5_000:
            new = sorted(set(self._steps_on_disk()) - self._known)
        else:
            last = max(self._known)
            new = [s for s in range(last + 1, max(last, self.last_step) + 3) if (self._rollout_dir / _name(s)).exists()]
        self._listed_at = changed
        self._known.update(new)
        self._pending += new

    def _steps_on_disk(self) -> Iterator[int]:
        with os.scandir(self._rollout_dir) as entries:
            for entry in entries:
                if found := _STEP_FILE.fullmatch(entry.name):
                    yield int(found[1])

    def _take_rollouts(self, step: int) -> None:
        rows = []
        try:
            with (self._rollout_dir / _name(step)).open("rb") as file:
                offset = 0
                for line in file:
                    if offset > MAX_FILE:
                        break
                    if (found := as_object(line)) is not None:
                        rows.append(_row(step, offset, len(line), found))
                    offset += len(line)
        except OSError:
            return
        self._writer.executemany(_INSERT, rows)
        self._writer.executemany("insert or ignore into reasons values (?)", {(row[10],) for row in rows})
        self._writer.execute("insert or replace into files values (?, ?)", (step, len(rows)))
        self._num_rollouts += len(rows)
        self.revision += 1

    def _take_suspects(self) -> None:
        while self._num_suspects < MAX_SUSPECTS and (lines := self._suspects.read(1 << 20)):
            rows = []
            for own in objects(lines):
                signs = own.get("signs")
                if isinstance(signs, list) and signs:
                    text = " ".join(_text(sign, 40) for sign in signs[:10])
                    rows.append((_int(own.get("step")), _int(own.get("group_id")), _int(own.get("sequence_id")), text))
            self._writer.executemany("insert into suspects values (?, ?, ?, ?)", rows)
            self._num_suspects += len(lines)
            self.revision += 1

    # What is kept

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect_writer()
        except sqlite3.DatabaseError:  # torn by a full disk or a kill: it is only an index
            for path in self._database.parent.glob("rollouts.sqlite*"):
                path.unlink()
            self._state_file.unlink(missing_ok=True)
            return self._connect_writer()

    def _connect_writer(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._database, check_same_thread=False)
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = off")
        db.execute("pragma cache_size = -16000")
        db.executescript(_TABLES)
        return db

    def _reader(self) -> _Closing:
        db = sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)
        db.row_factory = sqlite3.Row
        db.execute("pragma cache_size = -4000")
        return _Closing(db)

    def _save(self) -> None:
        with self._lock:
            self._columns.flush()
            state = {
                "version": VERSION,
                "columns": self._columns.state(),
                "metrics": self._metrics.state(),
                "suspects": self._suspects.state(),
                "num_suspects": self._num_suspects,
                "last_step": self.last_step,
                "last_time": self.last_time,
            }
        self._state_file.write_text(json.dumps(state))
        self._saved_at = time.monotonic()

    def _restore(self) -> bool:
        """Go on from what an earlier look kept, if it is of these files."""
        state = load_state(self._state_file)
        if state is None or state.get("version") != VERSION:
            return False
        try:
            self._columns.restore(state["columns"])
            self._metrics.restore(state["metrics"])
            self._suspects.restore(state["suspects"])
            self.last_step, self.last_time = int(state["last_step"]), float(state["last_time"])
            self._num_suspects = int(state["num_suspects"])
        except (KeyError, TypeError, ValueError, OSError):
            return False
        if self._metrics.was_replaced() or self._suspects.was_replaced():
            return False
        self._known = {step for (step,) in self._writer.execute("select step from files")}
        (self._num_rollouts,) = self._writer.execute("select count(*) from rollouts").fetchone()
        self._glimpse(self._metrics.offset)
        # A large folder is listed once: what came while nobody looked.
        if len(self._known) >= 5_000:
            self._pending = sorted(set(self._steps_on_disk()) - self._known)
            self._known.update(self._pending)
        return True

    def _reset(self) -> None:
        with self._lock:
            self._columns.clear()
            self._recent.clear()
            self._metrics.rewind()
            self._suspects.rewind()
            self._pending, self._known, self._listed_at = [], set(), -1
            self._num_suspects = self._num_rollouts = 0
            self.last_step, self.last_time = -1, 0.0
        self._glimpse()
        for table in ("rollouts", "files", "reasons", "suspects"):
            self._writer.execute(f"delete from {table}")
        self._writer.commit()
        self._state_file.unlink(missing_ok=True)
        self.revision += 1


class _Closing:
    """A connection for the length of a `with`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> sqlite3.Connection:
        return self._db

    def __exit__(self, *_: object) -> None:
        self._db.close()


def cache_folder(root: Path, stage_dir: Path) -> Path:
    """Where the index of a stage is kept under `root`."""
    name = hashlib.sha256(str(stage_dir.absolute()).encode(errors="surrogateescape")).hexdigest()[:20]
    return root / name


def _name(step: int) -> str:
    return f"step-{step:06d}.jsonl"


def _row(step: int, offset: int, size: int, found: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a line of rollouts/: what can be filtered by. Anything may stand in it."""
    versions, mask = _list(found.get("policy_versions")), _list(found.get("loss_mask"))
    sampled = [v for v, own in zip(versions, mask, strict=False) if own and isinstance(v, int) and abs(v) < 1 << 40]
    # The policy that trained at this step had made step - 1 steps.
    lag = step - 1 - sum(sampled) / len(sampled) if sampled else None
    advantage = found.get("advantage")
    if isinstance(advantage, list):
        own = [_float(a) or 0.0 for a in advantage]
        advantage = sum(own) / len(own) if own else None
    turns = sum(1 for i, own in enumerate(mask) if own and (i == 0 or not mask[i - 1]))
    return (
        step,
        offset,
        size,
        _int(found.get("group_id")),
        _text(found.get("task_id", ""), 200),
        _int(found.get("sequence_id")),
        _float(found.get("reward")),
        _float(advantage),
        lag,
        len(_list(found.get("response_tokens"))),
        _text(found.get("finish_reason", ""), 80),
        turns,
    )


def _where(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    clauses, values = ["1"], []
    for name in ("reward", "lag", "tokens", "step"):
        for end, sign in (("min", ">="), ("max", "<=")):
            if (value := filters.get(f"{name}_{end}")) is not None:
                clauses.append(f"{name} {sign} ?")
                values.append(value)
    if (task := filters.get("task")) is not None:
        clauses.append("instr(task, ?) > 0")
        values.append(task)
    for name, column in (("group", "group_id"), ("reason", "reason"), ("same_task", "task")):
        if (value := filters.get(name)) is not None:
            clauses.append(f"{column} = ?")
            values.append(value)
    if (sign := filters.get("sign")) is not None:
        clauses.append(
            "exists (select 1 from suspects s where s.group_id = rollouts.group_id and s.sequence = rollouts.sequence "
            "and instr(' ' || s.signs || ' ', ?) > 0)"
        )
        values.append(f" {sign} ")
    return " and ".join(clauses), values


def _signs(db: sqlite3.Connection, row: Any) -> list[str]:
    query = "select signs from suspects where group_id = ? and sequence = ? limit 1"
    found = db.execute(query, (row["group_id"], row["sequence"])).fetchone()
    return found[0].split() if found else []


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any, limit: int) -> str:
    """JSON may hold half of a surrogate pair, which no database takes."""
    return str(value)[:limit].encode("utf-8", "backslashreplace").decode()


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 1 << 53 else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
