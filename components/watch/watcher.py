"""The runs that are watched: one thread reads what is new, and says what changed."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..monitor.waits import Wait, who_waits
from .advisories import advisories
from .chain import with_chain
from .columns import thinned
from .folder import RunFolder, State
from .index import RECENT_STEPS, StageIndex, cache_folder
from .pieces import Pieces
from .shown import shown_value
from .spans import SpanIndex

LOOK_S = 1.0
REFRESH_S = 3.0
"""How often what is made of many lines is made again while a run writes: curves, the sentence, advisories."""
MAX_POINTS = 2_000
KEPT_ANSWERS = 16
LAST_SPANS = 3
"""How many of the last things that a part did are shown of a run that died of it."""
LAST_VALUES = ("train/reward/mean", "train/loss/sft", "train/entropy/mean", "train/policy_lag/mean", "step/total_s")
"""Shown with the sentence, before any curve was read."""
SHOWN_SETTINGS = (
    "staleness.max_policy_lag",
    "staleness.reorder_window",
    "train.steps",
    "train.groups_per_step",
    "algorithm.group_size",
    "rollout.num_generators",
    "rollout.max_response_tokens",
    "algorithm.loss.clip_low",
    "algorithm.loss.clip_high",
)


@dataclass
class _Stage:
    index: StageIndex
    spans: SpanIndex
    pieces: Pieces
    revision: int = -1
    """What pages are told to ask for. It follows the index every REFRESH_S, so that they all ask for the same."""
    refreshed_at: float = 0.0
    advisories: list[dict[str, Any]] = field(default_factory=list)
    wait: Wait | None = None


class Watcher:
    """`runs`: folders, each with the name that the page shows. `cache`: where indexes are kept; None: in a temporary
    folder. `start` begins reading; `close` ends it.
    """

    def __init__(self, runs: Sequence[RunFolder], cache: Path | None = None) -> None:
        self.runs = list(runs)
        self._held = ExitStack()
        self._cache = self._own_cache(cache)
        self._stages: list[dict[str, _Stage]] = [{} for _ in runs]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_for_ever, name="index", daemon=True)
        self._deaths: dict[int, tuple[Any, dict[str, Any] | None]] = {}
        self._overview: list[dict[str, Any]] = [self._described(i) for i in range(len(runs))]
        self._answers: OrderedDict[Any, tuple[int, bytes]] = OrderedDict()
        self._answers_lock = threading.Lock()
        self.failure: str | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60)
        if not self._thread.is_alive():
            for stages in self._stages:
                for stage in stages.values():
                    stage.index.close()
        self._held.close()

    def overview(self) -> list[dict[str, Any]]:
        """Of each run what the top of the page says. Made by the reading thread; costs nothing here."""
        return self._overview

    def stage(self, run: int, name: str) -> _Stage:
        """Raises KeyError if there is none."""
        if not 0 <= run < len(self._stages):
            raise KeyError(run)
        return self._stages[run][name]

    def series(self, run: int, stage: str, name: str, start: float, stop: float, points: int) -> dict[str, Any]:
        """One metric, thinned."""
        points = max(2, min(points, MAX_POINTS))
        return thinned(*self.stage(run, stage).index.series(name, start, stop), points)

    def window(self, run: int, stage: str, start: float, stop: float) -> dict[str, Any]:
        """The lanes between two times."""
        return self.stage(run, stage).spans.window(start, stop)

    def kept(self, key: Any, revision: int, compute: Callable[[], bytes]) -> bytes:
        """An answer, made once a revision: five pages, which ask at the same moment, cost what one does."""
        with self._answers_lock:
            found = self._answers.get(key)
            if found is None or found[0] != revision:
                self._answers[key] = found = revision, compute()
            self._answers.move_to_end(key)
            while len(self._answers) > KEPT_ANSWERS:
                self._answers.popitem(last=False)
        return found[1]

    def look(self) -> bool:
        """Read once what is new in all runs; returns whether there may be more. For the thread, and for tests."""
        more = False
        for i, run in enumerate(self.runs):
            is_live = self._overview[i]["state"] == "live"
            for name, folder in run.stage_dirs().items():
                if name not in self._stages[i]:
                    self._stages[i][name] = self._open(run, folder)
                    self._overview[i] = self._described(i)  # what it does now, before all that it did was read
                stage = self._stages[i][name]
                is_new = stage.index.advance()
                stage.spans.advance()
                self._refresh(run, name, stage, at_once=not is_new and not is_live)
                more |= is_new
            self._overview[i] = self._described(i)
        return more

    def _read_for_ever(self) -> None:
        while not self._stop.is_set():
            try:
                more, self.failure = self.look(), None
            except Exception as error:  # a full disk, a file like no other: the page says so, and shows what it has
                more, self.failure = False, f"{type(error).__name__}: {error}"
                self._overview = [own | {"failure": shown_value(self.failure)} for own in self._overview]
            if not more:
                self._stop.wait(LOOK_S)

    def _open(self, run: RunFolder, folder: Path) -> _Stage:
        cache = cache_folder(self._cache, folder)
        places = [run.path / "model", *_models(run.settings(folder.name)), *_checkpoints(folder)]
        return _Stage(StageIndex(folder, cache), SpanIndex(folder), Pieces(places, cache / "pieces.sqlite"))

    def _described(self, i: int) -> dict[str, Any]:
        run, stages = self.runs[i], self._stages[i]
        state = run.state(max((s.index.last_time for s in stages.values()), default=0.0))
        described = {
            "run": i,
            "name": run.name,
            "path": str(run.shown_path),
            "state": state.kind,
            "state_text": state.text,
            "cause": state.cause,
            "stages": [self._described_stage(run, name, stage) for name, stage in stages.items()],
            "death": self._kept_death(i, state),
            "warnings": [w for w in _list(run.summary().get("warnings")) if isinstance(w, str)][:20],
            "failure": None,
            "parts": _parts_of(run),
        }
        return shown_value(described)

    def _described_stage(self, run: RunFolder, name: str, stage: _Stage) -> dict[str, Any]:
        settings = run.settings(name)
        index = stage.index
        extent = stage.spans.extent()
        return {
            "name": name,
            "step": index.last_step,
            "time": index.last_time,
            "revision": stage.revision,
            "progress": index.progress(),
            "wait": asdict(stage.wait) if stage.wait else None,
            "last": {n: row[n] for row in index.recent_rows() for n in LAST_VALUES if row.get(n) is not None},
            "advisories": stage.advisories,
            "settings": {key: settings[key] for key in SHOWN_SETTINGS if settings.get(key) is not None},
            "spans": list(extent) if extent else None,
        }

    def _refresh(self, run: RunFolder, name: str, stage: _Stage, *, at_once: bool) -> None:
        """Make anew what is made of many lines, if there are new ones and it is time, or `at_once`."""
        now, index, settings = time.monotonic(), stage.index, run.settings(name)
        if stage.revision == index.revision or (not at_once and now - stage.refreshed_at < REFRESH_S):
            return
        stage.revision, stage.refreshed_at = index.revision, now
        wait = who_waits(index.recent_rows(), settings)
        stage.wait = with_chain(wait, stage.spans, index.seconds_of_steps(RECENT_STEPS)) if wait else None
        stage.advisories = advisories(index, settings)

    def _kept_death(self, i: int, state: State) -> dict[str, Any] | None:
        """Read from logs and spans once, not with every look at a run that stays dead."""
        read = state, [(stage.index.revision, stage.spans.revision) for stage in self._stages[i].values()]
        if i not in self._deaths or self._deaths[i][0] != read:
            self._deaths[i] = read, self._death(self.runs[i], state, self._stages[i])
        return self._deaths[i][1]

    def _death(self, run: RunFolder, state: State, stages: Mapping[str, _Stage]) -> dict[str, Any] | None:
        last = list(stages.values())[-1] if stages else None
        death = run.death(state, last.index.dir if last else None)
        if death is None:
            return None
        waits = []
        for part in ("driver", "trainer-0", "generator-0") if last else ():
            spans = last.spans.last_spans(part) if last and part != death.part else []
            span = next((s for s in spans if s["name"] in ("wait", "batch")), None)
            if span is not None:
                waits.append({"part": part, "for": span["attrs"].get("for", "a batch"), "start": span["start"]})
        own = last.spans.last_spans(death.part)[:LAST_SPANS] if last and death.part else []
        did = [{"name": s["name"], "end": s["end"], "attrs": s["attrs"]} for s in own]
        return asdict(death) | {"waits": waits, "did": did}

    def _own_cache(self, cache: Path | None) -> Path:
        """`cache`, held by a lock while this object lives; a temporary folder if another one holds it."""
        if cache is not None:
            try:
                cache.mkdir(parents=True, exist_ok=True)
                file = self._held.enter_context((cache / "lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cache
            except OSError:
                pass
        return Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="leeway-watch-")))


def default_cache() -> Path:
    """Under the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leeway" / "watch"


def _models(settings: Mapping[str, Any]) -> list[Path]:
    path = settings.get("model.path")
    try:
        return [Path(path).expanduser()] if isinstance(path, str) else []
    except RuntimeError:  # of a user who is not here
        return []


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/step-*/hf"), reverse=True)[:1]


def _parts_of(run: RunFolder) -> list[dict[str, Any]]:
    """The parts of a run's life: each `leeway run` or `resume`, and how it ended."""
    keys = ("command", "began", "status", "wall_s")
    return [{key: own.get(key) for key in keys} for own in _list(run.record().get("parts")) if isinstance(own, dict)][
        -20:
    ]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def overview_text(overview: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(overview, ensure_ascii=False, allow_nan=False)
