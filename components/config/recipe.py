"""What a recipe is: an object that says what the recipe needs, its own rules between settings, and its run.

Each file in `recipes/` defines one, as `RECIPE`. A copy of such a file is a recipe too: everything that is asked of a
recipe is asked of its object. Nothing depends on its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .schema import Config

Named = Callable[[str], str]
"""Where a key was set: "train.steps", or "stages.sft.train.steps"."""
Rule = Callable[["Config", Named], None]
"""Raises ConfigError for settings that break it. Its name is the sentence that it enforces."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The parts that a recipe starts, and the data that it reads.

    `generates`: it starts engines. `trains_on`: what its trainer ranks learn from (None: there is no trainer).
    `answers` are the tasks' own, and `pairs` are chosen and rejected ones. `reads`: the tasks that it cannot do
    without: those to train on, or only those held out.
    """

    generates: bool
    trains_on: Literal["rollouts", "answers", "pairs"] | None = None
    reads: Literal["train", "heldout"] = "train"

    @property
    def trains(self) -> bool:
        return self.trains_on is not None

    @property
    def is_online(self) -> bool:
        """It trains on what its own engines generate: versions, lag and weight sync matter."""
        return self.trains_on == "rollouts"

    @property
    def is_offline(self) -> bool:
        """It trains on data: there are no versions."""
        return self.trains and not self.is_online


ONLINE_RL = Needs(generates=True, trains_on="rollouts")


@dataclass(frozen=True, kw_only=True)
class Recipe(Needs):
    """One recipe. Raises TypeError where its `run` cannot be one.

    `run`: `async def run(context: StageContext) -> StageResult`. `rules`: checked after those of every recipe.
    `study_of`: the recipe that it runs several times, with different settings; it resumes nothing. `objective`: from
    the settings to what the trainer minimises; None: the one that belongs to `trains_on`.

    `name`, `module` and `file` are set when a recipe is found: how the user referred to it, and where its code is.
    """

    run: Callable[[Any], Awaitable[Any]]
    rules: tuple[Rule, ...] = ()
    study_of: Recipe | None = None
    objective: Callable[[Config], Any] | None = None
    name: str = ""
    module: str = ""
    file: Path | None = None

    def __post_init__(self) -> None:
        if not inspect.iscoroutinefunction(self.run):
            raise TypeError(f"Recipe.run: got {self.run!r}, expected `async def run(context)`")
        if not isinstance(self.rules, tuple) or not all(callable(rule) for rule in self.rules):
            raise TypeError(f"Recipe.rules: got {self.rules!r}, expected a tuple of functions (config, named)")

    @property
    def can_resume(self) -> bool:
        """It saves its state on the way, and goes on from it."""
        return self.trains and self.study_of is None

    @property
    def is_a_file(self) -> bool:
        """The user referred to it by its path."""
        return self.name.endswith(".py")

    @property
    def label(self) -> str:
        """A short name for folders and lines: the file's, without its folder."""
        return self.name if self.file is None else self.file.stem

    def is_same(self, other: Recipe) -> bool:
        """Whether both are the same file's."""
        return self.file == other.file and self.run == other.run

    def is_like(self, other: Recipe) -> bool:
        """Whether it can take the other's place among stages: both need the same."""
        mine, theirs = (self.generates, self.trains_on, self.reads), (other.generates, other.trains_on, other.reads)
        return mine == theirs
