"""What a recipe is given and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from leeway.config import Config


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """One stage to run. `config.model.path` is set: the last stage's weights, or what the run starts from.

    `processes` collects those that the stage starts, so that the run can make sure that none is left.
    """

    name: str
    recipe: str
    config: Config
    dir: Path
    processes: list[psutil.Process]


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage came to.

    `model_path`: a Hugging Face folder with its weights (None: it trained nothing). `goodbye`: lines to print.
    """

    summary: dict[str, Any]
    model_path: str | None
    goodbye: list[str] = field(default_factory=list)


def say(text: str) -> None:
    """One line for the terminal."""
    print(f"leeway: {text}", flush=True)
