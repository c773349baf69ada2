"""Environments by name: the built-in ones, or a user's "package.module:Class"."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any

from .base import Environment
from .importing import import_user_object, is_user_name
from .rewards import resolve_reward
from .single_turn import SingleTurn

ENVIRONMENTS: dict[str, type] = {"single_turn": SingleTurn}

_EXPECTED = "a class with `async def rollout(self, task, policy)` (see leeway.Environment)"


def build_environment(env_config: Any) -> Environment:
    """The environment of the `env` section (name, reward, options), ready to use.

    Needs no policy and starts nothing, so it also serves as the check before a run. Raises ValueError in one line.
    """
    cls = _environment_class(env_config.name)
    options = dict(env_config.options)
    parameters = inspect.signature(cls).parameters
    if "reward" in parameters and "reward" not in options:
        options["reward"] = resolve_reward(env_config.reward)
    try:
        return cls(**options)
    except TypeError as error:
        accepted = [name for name in parameters if name != "reward"]
        raise ValueError(
            f"env.options: {env_config.name} cannot be made with {sorted(options)}: {error}; it accepts {accepted}"
        ) from error


def _environment_class(name: str) -> type:
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if not is_user_name(name):
        near = get_close_matches(name, ENVIRONMENTS, n=1, cutoff=0.0)[0]
        raise ValueError(f"env.name: got {name!r}, expected {near!r} or your own 'package.module:Class'")
    cls = import_user_object(name, key="env.name", expected=_EXPECTED)
    where = f"env.name: {name!r}"
    if not inspect.isclass(cls):
        raise ValueError(f"{where} is a {type(cls).__name__}; expected {_EXPECTED}")
    if not inspect.iscoroutinefunction(getattr(cls, "rollout", None)):
        what = "its rollout is not async" if hasattr(cls, "rollout") else "it has no rollout method"
        raise ValueError(f"{where} in {inspect.getsourcefile(cls)}: {what}; expected {_EXPECTED}")
    if inspect.isabstract(cls):
        raise ValueError(f"{where} in {inspect.getsourcefile(cls)}: abstract methods are missing; expected {_EXPECTED}")
    return cls
