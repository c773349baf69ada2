"""Plug-ins by name: what installed packages offer as entry points, and the modules of a user's own folders.

An entry point's name stands for its "pkg.mod:Name" and is replaced by it when settings are read. Everything after
that, including the run's own config.yaml, sees only the second form.

    [project.entry-points."leeway.environments"]        # in the package's pyproject.toml
    my_game = "my_package.games:MyGame"
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .names import ENVIRONMENTS, OPERATORS, REWARDS
from .paths import is_folder, user_path

GROUPS = {
    "environment": "leeway.environments",
    "reward": "leeway.rewards",
    "operator": "leeway.operators",
    "tasks": "leeway.tasks",
}
_BUILTIN = {"environment": ENVIRONMENTS, "reward": REWARDS, "operator": OPERATORS, "tasks": ()}


def offered(kind: str) -> dict[str, str]:
    """Names of one kind that installed packages offer -> "pkg.mod:Name". Nothing is imported."""
    return {found.name: found.value.replace(" ", "") for found in entry_points(group=GROUPS[kind])}


def with_entry_points(tree: Any) -> Any:
    """The settings with names of entry points replaced by what they stand for. Built-in names are never replaced."""
    if not isinstance(tree, dict):
        return tree
    out = dict(tree)
    if isinstance(out.get("env"), dict):
        out["env"] = _environment(out["env"])
        parts = out["env"].get("by_taskset")
        if isinstance(parts, dict):
            resolved = {name: _environment(own) if isinstance(own, dict) else own for name, own in parts.items()}
            out["env"] = {**out["env"], "by_taskset": resolved}
    task = out.get("task")
    if isinstance(task, dict):
        mix = task.get("mix")
        parts = {name: _tasks(own) for name, own in mix.items()} if isinstance(mix, dict) else None
        out["task"] = _tasks(task) if parts is None else {**_tasks(task), "mix": parts}
    replay = out.get("replay")
    if isinstance(replay, dict) and isinstance(replay.get("operators"), list):
        out["replay"] = {**replay, "operators": [_operator(step) for step in replay["operators"]]}
    return out


def use_folders(folders: list[str]) -> list[str]:
    """Return `folders`, whose modules may be named as "module:Name" from then on. Raises ConfigError if one is none.

    The folders come last on sys.path, so a user's module never hides an installed one.
    """
    for folder in folders:
        path = user_path(folder)
        if not is_folder(path):
            raise ConfigError("plugins", got=folder, expected="a folder with your modules", fix="fix the path")
        absolute = str(path.resolve())
        if absolute not in sys.path:
            sys.path.append(absolute)
    return folders


def modules_in(folder: str | Path) -> list[Path]:
    """The modules (.py files) and packages (folders with an __init__.py) right in `folder`."""
    path = user_path(folder).resolve()
    packages = [p.parent for p in path.glob("*/__init__.py")]
    return sorted([*path.glob("*.py"), *packages])


def _environment(env: dict[str, Any]) -> dict[str, Any]:
    out = dict(env)
    for key, kind in (("name", "environment"), ("reward", "reward")):
        if key in out:
            out[key] = _target(out[key], kind)
    for key in ("rewards", "reward_options"):
        if isinstance(out.get(key), dict):
            out[key] = {_target(name, "reward"): value for name, value in out[key].items()}
    return out


def _tasks(task: Any) -> Any:
    if not isinstance(task, dict) or task.get("name") != "python" or "path" not in task:
        return task
    return {**task, "path": _target(task["path"], "tasks")}


def _operator(step: Any) -> Any:
    if isinstance(step, dict):
        return {_target(name, "operator"): options for name, options in step.items()}
    return _target(step, "operator")


def _target(name: Any, kind: str) -> Any:
    if not isinstance(name, str) or ":" in name or name in _BUILTIN[kind]:
        return name
    return offered(kind).get(name, name)
