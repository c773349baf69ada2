"""What a recipe receives and what it returns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..config import Config, Recipe
from ..monitor.logs import say
from ..runtime.watch import RunWatch

FINISHED = "finished.json"
STILL_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """One stage to run. `config.model.path` is set: the last stage's weights, or what the run starts from.

    The stage reports its processes and failures to `watch` (None: nobody watches, as in tests).
    """

    name: str
    recipe: Recipe
    config: Config
    dir: Path
    watch: RunWatch | None = None


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """The result of a stage.

    `model_path`: a Hugging Face folder with its weights (None: it trained nothing). `goodbye`: lines to print.
    """

    summary: dict[str, Any]
    model_path: str | None
    goodbye: list[str] = field(default_factory=list)


def mark_finished(context: StageContext, result: StageResult) -> None:
    """Leave a note in the stage's folder for a resumed run."""
    note = {"summary": result.summary, "model_path": result.model_path, "length": length_of(context.config)}
    text = json.dumps(note)
    partial = context.dir / f"{FINISHED}.partial"
    partial.write_text(text + "\n")
    partial.replace(context.dir / FINISHED)


def finished_stage(context: StageContext) -> StageResult | None:
    """This stage's result from an earlier part of the run; None if it has not finished, or has more to do now."""
    note = context.dir / FINISHED
    if context.config.checkpoint.resume != "auto":
        note.unlink(missing_ok=True)
        return None
    if not note.exists():
        return None
    saved = json.loads(note.read_text())
    if finished_length(context.dir) != length_of(context.config):
        return None
    if saved["model_path"] is not None and not Path(saved["model_path"]).is_dir():
        return None
    return StageResult(summary=saved["summary"], model_path=saved["model_path"])


def length_of(config: Config) -> dict[str, Any]:
    """How long a stage trains: a finished one whose length has changed must continue."""
    return {"steps": config.train.steps, "epochs": config.train.epochs}


def finished_length(stage_dir: Path) -> dict[str, Any] | None:
    """`length_of` the stage when it finished; None if it has not."""
    note = stage_dir / FINISHED
    return json.loads(note.read_text()).get("length", {}) if note.exists() else None


async def timed(name: str, what: str, work: Awaitable[T], *, see: str = "") -> T:
    """Await `work` of the stage `name`; say how long it took, and now and then that it is still running.

    `see`: where a user can look in the meantime.
    """
    begun = time.monotonic()
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=STILL_S))[0]:
            say(f"{name}: still waiting for {what} after {time.monotonic() - begun:.0f} s{see and f'; see {see}'}")
    except asyncio.CancelledError:
        task.cancel()
        raise
    result = await task
    say(f"{name}: {what} after {time.monotonic() - begun:.1f} s")
    return result
