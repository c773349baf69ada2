"""Environments by name: the built-in ones, or a user's "package.module:Class"."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..config.environments import checked_options
from ..config.inputs import EnvConfig, EnvSource
from ..config.names import ENVIRONMENTS
from ..importing import import_named
from ..redaction import hide
from .agent import AgentEnvironment
from .auxiliary import AuxiliaryClient, build_models
from .base import Environment
from .by_taskset import ByTaskSet
from .scoring import build_reward
from .step import StepEnvironment

_EXPECTED = "a class with `async def rollout(self, task, policy)` (leeway.Environment) or `step` (StepEnvironment)"


def build_environment(env: EnvConfig) -> Environment:
    """The environment of the `env` section, ready to use; sets the section's environment variables first.

    Needs no policy and starts nothing, so it also serves as the check before a run. Raises ValueError in one line.
    """
    hide({value: f"${{oc.env:{name}}}" for name, value in env.variables.items()})
    os.environ.update(env.variables)
    models = build_models(env.models)
    default = _build_one(env, models)
    parts = {name: _build_one(part, models) for name, part in env.parts().items()}
    return ByTaskSet(default, parts) if parts else default


def _build_one(env_config: EnvSource, models: Mapping[str, AuxiliaryClient]) -> Environment:
    cls = _environment_class(env_config.name)
    options = dict(env_config.options)
    parameters = inspect.signature(cls).parameters
    model = _options_model(cls)
    arguments: dict[str, Any] = options
    if model is not None:
        arguments = {"options": checked_options(model, options, key="env.options", whose=_whose(cls, model))}
    if "reward" in parameters and "reward" not in options:
        arguments["reward"] = build_reward(env_config, models)
    if "models" in parameters and "models" not in options:
        arguments["models"] = models
    try:
        return cls(**arguments)
    except TypeError as error:
        accepted = [name for name in parameters if name not in ("reward", "models", "options")]
        raise ValueError(
            f"env.options: {env_config.name} cannot be made with {sorted(options)}: {error}; it accepts {accepted}"
        ) from error
    except SystemExit as error:
        raise ValueError(
            f"env.name: making {env_config.name} ended the process (exit code {error.code}); raise an exception instead"
        ) from error


def _environment_class(name: str) -> type:
    cls = import_named(name, ENVIRONMENTS, key="env.name", expected=_EXPECTED)
    if not inspect.isclass(cls):
        raise ValueError(f"env.name: {name!r} is a {type(cls).__name__}; expected {_EXPECTED}")
    where = f"env.name: {name!r} in {_place(cls)}"
    if issubclass(cls, AgentEnvironment) and "run" not in cls.__abstractmethods__:  # its run may be sync
        return cls
    methods = ("step", "reset") if issubclass(cls, StepEnvironment) else ("rollout",)
    for method in methods:
        function = getattr(cls, method, None)
        if function is None:
            raise ValueError(f"{where}: it has no {method} method; expected {_EXPECTED}")
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"{where}: its {method} is not async; expected {_EXPECTED}")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"{where}: abstract methods are missing: {', '.join(missing)}; expected {_EXPECTED}")
    return cls


def _options_model(cls: type) -> type[BaseModel] | None:
    model = getattr(cls, "Options", None)
    if model is None or (inspect.isclass(model) and issubclass(model, BaseModel)):
        return model
    raise ValueError(
        f"env.name: Options of {_place(cls)} is {model!r}; expected a pydantic model (class Options(BaseModel))"
    )


def _whose(cls: type, model: type[BaseModel]) -> str:
    return f"{cls.__name__} ({_place(model)})"


def _place(cls: type) -> str:
    """file:line of a class."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__
