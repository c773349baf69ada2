"""Runs one after the other on the same engines and trainer ranks, which are reset in between.

An engine starts in 20 to 40 s, and a study has a dozen runs: a process for each would cost minutes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .. import driver
from ..config import Config, derive


class NamedRun(Protocol):
    """One run of a study. All of them need the same parts."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Config: ...


Run = TypeVar("Run", bound=NamedRun)


async def run_trials(
    context: driver.StageContext,
    trials: Sequence[Run],
    loop: Callable[[driver.RLRun], Awaitable[None]],
    finished: Callable[[Run, driver.StageResult, Sequence[driver.EvalPoint], Path], None],
) -> dict[str, Any]:
    """Run `loop` for each of `trials`, in its own folder under `runs/`; call `finished` after each.

    The engine is started with the first one's settings; speeds are measured once. Returns the parts' processes.
    """
    launcher = driver.Launcher(
        _start_of(trials), context.recipe, run_dir=context.dir, supervisor=driver.Supervisor(context.watch)
    )
    speeds: driver.Speeds | None = None
    try:
        for trial in trials:
            folder = context.dir / "runs" / trial.name
            folder.mkdir(parents=True, exist_ok=True)
            stage = driver.RLStage(
                replace(context, name=trial.name, config=trial.config, dir=folder), launcher, speeds=speeds
            )
            result = await stage.run(loop)
            speeds = stage.speeds
            finished(trial, result, stage.eval_points, folder)
    finally:
        await launcher.parts.stop()
    return launcher.parts.processes


def _start_of(trials: Sequence[NamedRun]) -> Config:
    """The first one's settings, with places in the engines for as many adapters as any of them needs."""
    first, places = trials[0].config, max(derive(trial.config).adapter_versions for trial in trials)
    if first.model.lora is None:
        return first
    lora = first.model.lora.model_copy(update={"max_versions": places})
    return first.model_copy(update={"model": first.model.model_copy(update={"lora": lora})})
