"""`leeway env try`: one task, one environment, one engine, everything printed."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..config import Config, Stage, load_config

app = typer.Typer(name="env", help="Try environments.", no_args_is_help=True, add_completion=False)


@app.callback()
def env() -> None:
    """Try environments."""


@app.command(name="try")
def try_environment(
    name: Annotated[str, typer.Argument(metavar="NAME", help='A built-in name, or your own "pkg.mod:Class".')],
    config: Annotated[
        str, typer.Option("--config", "-c", metavar="NAME|FILE", help="A bundled config or a YAML file.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, e.g. model.path=DIR.")
    ] = None,
    task: Annotated[int, typer.Option("--task", min=0, help="Which task of the taskset.")] = 0,
    times: Annotated[int, typer.Option("--times", min=1, help="How many times to play the task.")] = 2,
) -> None:
    """Play one task against a real engine and print tokens, logprobs, rewards and masks.

    Example: leeway env try my_env:MyEnv --config quickstart model.path=runs/leeway/quickstart
    """
    settings = load_config(config, [*(overrides or []), f"env.name={name}"])
    trial = importlib.import_module("leeway.driver.try_env")
    recipe = trial.recipe_of(trial.Choice(task, times))
    folder = Path(tempfile.mkdtemp(prefix="leeway-try-"))
    stage = Stage(name="try", recipe=recipe, config=_for_one_task(settings), dir=folder)
    runner = importlib.import_module("leeway.driver.runner")
    code = runner.run_stages([stage], folder, config, sys.argv, is_scratch=True)
    if code != 1:  # keep the logs of a failure
        shutil.rmtree(folder)
    raise typer.Exit(code)


def _for_one_task(config: Config) -> Config:
    """One engine and no retries, so that failures are visible."""
    rollout = config.rollout.model_copy(update={"num_generators": 1, "retries": 0})
    return config.model_copy(update={"rollout": rollout})
