"""What code a run executes besides Leeway's own, in words: nobody should find out by running it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .inputs import TaskConfig, TaskSource
from .names import user_names
from .schema import Config
from .stages import Stage

OWN_TASKS = ("leeway.envs.frozen_lake:lakes", "leeway.tasks.worked_sums:worked_sums")
"""Functions of Leeway's that settings name. No other of its names passes: some import what they are given."""


def code_that_runs(stages: Sequence[Stage]) -> list[str]:
    """One line for each plug-in, query and sandboxed reward that the settings name. Imports nothing of the user's."""
    lines = [line for stage in stages for line in _lines(stage.config)]
    return list(dict.fromkeys(lines))


def _lines(config: Config) -> Iterator[str]:
    for key, name in _named(config.model_dump(exclude={"plugins"})):
        if name not in OWN_TASKS:
            yield f"{key}: {name} ({_file_of(name)}) runs with your rights"
    for folder in config.plugins:
        yield f"plugins: modules of {folder} can be imported by their names, and run with your rights"
    for key, task in _tasks(config):
        if task.name == "sql":
            query = " ".join(str(task.query).split())
            yield f"{key}.query: a SELECT that reads {task.path}: {query[:200]}"
    rewards = [config.env.reward, *config.env.rewards, *(own.reward for own in config.env.parts().values())]
    if "code_tests" in rewards:
        yield "env.reward: code_tests runs programs that the model wrote, in the sandbox"
    if "reasoning_gym" in rewards:
        yield "env.reward: reasoning_gym scores answers with the data set's own code"
    if config.model.path is not None:
        whose = "that of model.chat_template" if config.model.chat_template else f"of {config.model.path}"
        yield f"model.path: the chat template {whose}, under limits; no other code of the model's folder"


def _named(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, "pkg.mod:Name") of everything that the settings name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if user_names(name):
                yield key, name
            yield from _named(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _named(inner, key)
    else:
        yield from ((key, name) for name in user_names(value))


def _tasks(config: Config) -> Iterator[tuple[str, TaskSource | TaskConfig]]:
    yield "task", config.task
    yield from ((f"task.mix.{name}", own) for name, own in config.task.mix.items())
    yield from ((f"eval.tasksets.{name}", own) for name, own in config.eval.tasksets.items())


def _file_of(name: str) -> str:
    """The file of "pkg.mod:Name", without importing it; the name of its module where that is not known."""
    module = name.partition(":")[0]
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return module
    if not rest or not spec.submodule_search_locations:
        return spec.origin
    place = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    found = (place.with_suffix(".py"), place / "__init__.py")
    return next((str(file) for file in found if file.is_file()), module)
