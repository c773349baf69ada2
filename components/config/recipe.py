"""What a recipe is: an object that says what the recipe needs, its own rules between settings, and its run.

Each file in `recipes/` defines one, as `RECIPE`. A copy of such a file is a recipe too: everything that is asked of a
recipe is asked of its object. Nothing depends on its name.

The user refers to one by a bundled name, a file (./my_rl.py), or a module (my_pkg.my_rl). Only the recipe that is asked
for is imported; `leeway ls` reads what the bundled ones do from their first lines.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..algorithms.presets import PRESETS
from .errors import ConfigError, words
from .names import find_module, nearest
from .paths import bundled_folder, is_file, user_path
from .vocabulary import RECIPE_OF

if TYPE_CHECKING:
    from .schema import Config

OBJECT = "RECIPE"
_PACKAGE = "leeway.recipes"

Named = Callable[[str], str]
"""Where a key was set: "train.steps", or "stages.sft.train.steps"."""
Rule = Callable[["Config"], None]
"""Raises ConfigError for settings that break it. Its name is the sentence that it enforces."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The parts that a recipe starts, and the data that it reads.

    `generates`: it starts engines. `trains_on`: what its trainer ranks learn from (None: there is no trainer).
    `answers` are the tasks' own, and `pairs` are chosen and rejected ones. `reads`: the tasks that it cannot do
    without: those to train on, only those held out, or none. `elsewhere`: the half of the run that is another job.
    `experiences` are groups of answers with rewards that were stored: an earlier run's, or rows of files.
    """

    generates: bool
    trains_on: Literal["rollouts", "answers", "pairs", "experiences"] | None = None
    reads: Literal["train", "heldout", "nothing"] = "train"
    elsewhere: Literal["trainer", "generators"] | None = None

    @property
    def trains(self) -> bool:
        return self.trains_on is not None and self.elsewhere != "trainer"

    @property
    def explores(self) -> bool:
        """It generates for a trainer in another job."""
        return self.elsewhere == "trainer"

    @property
    def is_online(self) -> bool:
        """It trains on what its own engines generate: versions, lag and weight sync matter."""
        return self.trains_on == "rollouts"

    @property
    def is_offline(self) -> bool:
        """It trains on data: there are no versions."""
        return self.trains and not self.is_online

    @property
    def has_groups(self) -> bool:
        """It trains on groups of answers with rewards, by a policy loss."""
        return self.trains_on in ("rollouts", "experiences")


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
            raise TypeError(f"Recipe.rules: got {self.rules!r}, expected a tuple of functions (config)")

    @property
    def can_resume(self) -> bool:
        """It saves its state on the way, and can resume from it."""
        return self.trains and self.study_of is None

    @property
    def is_a_file(self) -> bool:
        """The user referred to it by its path."""
        return self.name.endswith(".py")

    @property
    def whole(self) -> Recipe:
        """With the half that is another job."""
        return self if self.elsewhere is None else replace(self, generates=True, elsewhere=None)

    @property
    def label(self) -> str:
        """A short name for folders and lines: the file's, without its folder."""
        return self.name if self.file is None else self.file.stem

    def is_same(self, other: Recipe) -> bool:
        """Whether both are the same file's."""
        return self.file == other.file and self.run == other.run

    def is_like(self, other: Recipe) -> bool:
        """Whether it can take the other's place among stages: both need the same, here or in another job."""
        mine, theirs = ((r.generates or r.elsewhere is not None, r.trains_on, r.reads) for r in (self, other))
        return mine == theirs


@cache
def bundled_recipes() -> dict[str, str]:
    """Name -> what it does, of the recipes that come with the package. Nothing is imported."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(bundled_folder("recipes").glob("*.py"))}
    return {
        name: first[1].rstrip('."') if (first := re.match(r'"""(.+)', text)) else ""
        for name, text in texts.items()
        if re.search(rf"^{OBJECT} = ", text, re.MULTILINE)
    }


def bundled_recipe_path(name: str) -> Path:
    """The file of a bundled recipe."""
    return bundled_folder("recipes") / f"{name}.py"


def find_recipe(given: Any, *, key: str = "RECIPE") -> Recipe:
    """The recipe that `given` refers to; its module is imported.

    Raises a one-line ConfigError, naming `key`, where there is no such recipe, or its module cannot be imported.
    """
    if not isinstance(given, str) or not given:
        raise _refused(key, given, "write recipe: async_rl")
    if given in bundled_recipes():
        module, file = f"{_PACKAGE}.{given}", bundled_recipe_path(given)
    elif given.endswith(".py") or "/" in given:
        module, file = _module_of_file(key, given)
    elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", given) and given not in PRESETS:
        module, file = given, find_module(given)
        if file is None:
            raise _refused(key, given, "run leeway where that module is, or install it")
    else:
        raise _unknown(key, given)
    return replace(_object_of(key, given, module, file), name=given, module=module, file=file.resolve())


def _module_of_file(key: str, given: str) -> tuple[str, Path]:
    """The module that the file is imported as. Its folder goes last on sys.path: what is beside it can be imported."""
    if not is_file(given):
        raise _refused(
            key, words(f"{given} (no such file)"), "fix the path, or copy one: `leeway cp async_rl my_rl.py`"
        )
    file = user_path(given).resolve()
    if not re.fullmatch(r"[A-Za-z_]\w*", file.stem) or file.suffix != ".py":
        raise _refused(key, given, "name the file like a module: letters, digits and _, then .py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
        importlib.invalidate_caches()
    loaded = getattr(sys.modules.get(file.stem), "__file__", None) if file.stem in sys.modules else ""
    found = find_module(file.stem) if loaded == "" else loaded
    if found is None or Path(found).resolve() != file:
        raise _refused(
            key, words(f"{given}, but another module is called {file.stem} ({found or 'built in'})"), "rename the file"
        )
    return file.stem, file


def _object_of(key: str, given: str, module: str, file: Path) -> Recipe:
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in line {lines[-1]}" if lines else ""
        raise _refused(
            key,
            words(f"{given}, which fails when it is imported: {type(error).__name__}: {error}{where}"),
            f"fix {file}",
        ) from error
    found = getattr(imported, OBJECT, None)
    if found is None:
        raise _refused(
            key, words(f"{given}, which defines no {OBJECT}"), f"end {file} with {OBJECT} = Recipe(run=run, ...)"
        )
    if not isinstance(found, Recipe):
        what = words(f"{given}, whose {OBJECT} is of type {type(found).__name__}")
        raise _refused(key, what, f"write {OBJECT} = Recipe(run=run, ...) in {file}")
    return found


def _unknown(key: str, given: str) -> ConfigError:
    word = given[:100].lower().replace("-", "_")
    guess = RECIPE_OF.get(word) or nearest(word, bundled_recipes())
    fix = f"did you mean {guess}?" if guess else "`leeway ls` says what each does"
    if word in PRESETS:
        fix = f"{word} is an algorithm: write async_rl, and algorithm.name={word}"
    elif is_file(f"{given}.py"):
        fix = f"did you mean ./{given}.py?"
    return _refused(key, given, fix)


def _refused(key: str, got: object, fix: str) -> ConfigError:
    expected = f"one of {', '.join(bundled_recipes())}, a file like ./my_rl.py, or a module like my_pkg.my_rl"
    return ConfigError(key, got=got, expected=expected, fix=fix)
