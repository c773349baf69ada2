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
from typing import Annotated, Any

from pydantic import AfterValidator

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


def target(name: Any, kind: str) -> Any:
    """What the name of an entry point stands for; any other name as it is. Built-in names are never replaced."""
    if not isinstance(name, str) or ":" in name or name in _BUILTIN[kind]:
        return name
    return offered(kind).get(name, name)


EnvironmentName = Annotated[str, AfterValidator(lambda name: target(name, "environment"))]
RewardName = Annotated[str, AfterValidator(lambda name: target(name, "reward"))]
OperatorName = Annotated[str, AfterValidator(lambda name: target(name, "operator"))]


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
