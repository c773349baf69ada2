"""`leeway tune`: short runs that find the settings with which a config runs fastest on this machine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..config import Config, ConfigError, Stage, derive, plan_run
from ..config.derived import publishes_as_pulled
from .complete import complete_config

Run = Callable[[str, str, Sequence[str]], Path]
"""(recipe, name, overrides) -> the folder of the finished run; raises RuntimeError or TimeoutError."""
RECIPE = "async_rl"
STOP_S = 120.0
LEAST_STEPS = 13
"""So that enough are left to calibrate the planner, after the first fifth."""
UNWATCHED = ("eval.at_start=false", "eval.at_end=false", "eval.every=0", "checkpoint.every=0")
UNSAVED = ("checkpoint.save_hf=never", "checkpoint.save_state=never", "monitor.console=off")


def tune(
    config: Annotated[str, typer.Argument(metavar="NAME|FILE", autocompletion=complete_config)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Optimizer steps of each trial.")] = 20,
    trials: Annotated[int, typer.Option("--trials", metavar="N", help="At most so many trials.")] = 8,
    timeout_s: Annotated[float, typer.Option("--timeout-s", metavar="S", help="Most seconds of a trial.")] = 900.0,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the trials' runs are kept.")] = Path(
        "runs"
    ),
    keep_lag: Annotated[bool, typer.Option("--keep-lag", help="Leave the lag bound as it is, as in lockstep.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the fastest settings for this machine by short runs; prints them as overrides, with the gain.

    What is tried: lag bound, reorder window and how often versions are published by simulation, cores or GPUs for each
    side, sequences at a time, size of the trainer's passes. Each trial takes a run's start and its steps. The lag bound
    is never made smaller, and with --keep-lag no larger either.

    Example: leeway tune quickstart --steps 20
    """
    for option, got, least in (("--steps", steps, LEAST_STEPS), ("--trials", trials, 1)):
        if got < least:
            raise ConfigError(option, got=got, expected=f"at least {least}", fix=f"write {option} {least}")
    stages = plan_run(config, RECIPE, overrides or [])
    if stages[-1].config.cluster.shares_devices:
        raise ConfigError(
            "cluster.placement",
            got=stages[-1].config.cluster.placement,
            expected="separate: tuning begins there, and tries turns itself",
            fix="leave cluster.placement out",
        )
    folder = free_folder(out.expanduser().absolute(), stages[-1])
    run = runner(config, folder, timeout_s)
    say = (lambda line: None) if as_json else typer.echo
    given = [*(overrides or []), *prepared(stages, run, say)]
    given += [*unwatched(stages[-1].config), *UNSAVED, f"train.steps={steps}"]
    tuning = importlib.import_module("leeway.planning.tuning")

    def trial(name: str, own: Sequence[str]) -> Path:
        return run(RECIPE, name, [*given, *own])

    found = tuning.search(stages[-1].config, trial, most=trials, say=say, keep_lag=keep_lag)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.in_words())


def unwatched(config: Config) -> list[str]:
    """A trial evaluates nothing, and publishes as often as the run does whose evaluations may ask for more versions."""
    every = [] if publishes_as_pulled(config) else [f"param_server.publish_every={derive(config).publish_every}"]
    return [*UNWATCHED, *every]


def free_folder(out: Path, stage: Stage) -> Path:
    """`OUT/tune-NAME`, or with a number: earlier trials are kept."""
    name, number = f"tune-{stage.config.name}", 1
    while (folder := out / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def runner(config: str, folder: Path, timeout_s: float) -> Run:
    """Each run in a process of its own, as a user would start it."""
    jobs = importlib.import_module("leeway.library.job")

    def run(recipe: str, name: str, overrides: Sequence[str]) -> Path:
        given = [*overrides, f"output_dir={folder.parent}", f"project={folder.name}", f"name={name}"]
        job = jobs.run(recipe, config, given)
        try:
            job.wait(timeout_s)
        except TimeoutError:
            job.stop(STOP_S)
            raise
        return folder / name

    return run


def prepared(stages: Sequence[Stage], run: Run, say: Callable[[str], None]) -> list[str]:
    """Runs what comes before the RL stage, once; returns the overrides with which trials begin from its weights."""
    before = stages[:-1]
    if not before:
        return []
    say(f"first, once: {', '.join(stage.name for stage in before)}")
    folder = run(before[-1].recipe.name, "before", ["eval.at_end=false", "monitor.console=off"])
    init = [] if stages[0].config.model.init is None else ["model.init=null"]
    return [*(f"stages.{stage.name}=null" for stage in before), *init, f"model.path={folder}"]
