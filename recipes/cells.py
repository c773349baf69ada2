"""Runs of async_rl in sequence, for studies: engines and trainer ranks stay up between them.

Each run hands out the weights of its own `model.path` as version 0, and no engine serves before it has proven them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from leeway.config import Config
from leeway.recipes.async_rl import AsyncRL, EvalPoint
from leeway.recipes.context import StageContext, StageResult
from leeway.runtime.launch import Launcher
from leeway.runtime.limit import Speeds
from leeway.runtime.supervisor import Supervisor


class NamedRun(Protocol):
    """One run of a study. All of them need the same parts."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Config: ...


Run = TypeVar("Run", bound=NamedRun)


async def run_cells(
    context: StageContext,
    cells: Sequence[Run],
    finished: Callable[[Run, StageResult, Sequence[EvalPoint], Path], None],
) -> dict[str, Any]:
    """Run all `cells`, each in its own folder under `runs/`; call `finished` after each. Returns the parts' processes.

    The engine is started with the first cell's settings; speeds are measured once.
    """
    launcher = Launcher(cells[0].config, "async_rl", run_dir=context.dir, supervisor=Supervisor(context.watch))
    speeds: Speeds | None = None
    try:
        for cell in cells:
            folder = context.dir / "runs" / cell.name
            folder.mkdir(parents=True, exist_ok=True)
            job = AsyncRL(replace(context, name=cell.name, config=cell.config, dir=folder), launcher, speeds=speeds)
            result = await job.run()
            speeds = job.speeds
            finished(cell, result, job.eval_points, folder)
    finally:
        await launcher.parts.stop()
    return launcher.parts.processes
