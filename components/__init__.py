"""Leeway: asynchronous RL post-training for language models. The public API, loading nothing heavy.

from leeway import Environment, Policy, Task, Trajectory      # write an environment
from leeway import StepEnvironment, Completion                # or one in steps: reset, step
from leeway import PolicyLoss, GroupAdvantage, RatioCorrection # write a part of an algorithm
from leeway import Config, load_config                        # read settings
from leeway import run, open_run                              # start a run, read one: docs/library.md
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ != "leeway":  # a second copy of every class, of which none is the other's
    raise ImportError(f"{__name__}: got an import of the folder, expected the package: import leeway")

_FOLDER = Path(__file__).resolve().parent
__path__ = [str(_FOLDER)]  # the real one: a module has one path, in tracebacks too, however the package was found


class _Checkout:
    """Finds the two packages that are inside of this folder in a wheel, and beside it in a checkout."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        beside = name in ("leeway.recipes", "leeway.configs")
        return PathFinder.find_spec(name, [str(_FOLDER.parent)]) if beside else None


if not (_FOLDER / "recipes").is_dir():
    sys.meta_path.append(_Checkout)

from .lazy import offered  # noqa: E402 (through that path)

if TYPE_CHECKING:  # for editors and type checkers; at run time names are loaded when they are first used
    from .algorithms.advantages import Advantage as Advantage
    from .algorithms.advantages import GroupAdvantage as GroupAdvantage
    from .algorithms.advantages import TurnAdvantage as TurnAdvantage
    from .algorithms.corrections import Correction as Correction
    from .algorithms.corrections import CorrectionInputs as CorrectionInputs
    from .algorithms.corrections import RatioCorrection as RatioCorrection
    from .algorithms.kl import KLEstimator as KLEstimator
    from .algorithms.losses import LossInputs as LossInputs
    from .algorithms.losses import PolicyLoss as PolicyLoss
    from .config import Config as Config
    from .config import ConfigError as ConfigError
    from .config import Recipe as Recipe
    from .config import load_config as load_config
    from .envs import AgentEnvironment as AgentEnvironment
    from .envs import Endpoint as Endpoint
    from .envs import Environment as Environment
    from .envs import Policy as Policy
    from .envs import StepEnvironment as StepEnvironment
    from .envs import Transcript as Transcript
    from .library.job import Job as Job
    from .library.job import run as run
    from .library.opened import OpenedRun as OpenedRun
    from .library.opened import open_run as open_run
    from .monitor import Record as Record
    from .monitor import Sink as Sink
    from .types import Completion as Completion
    from .types import Group as Group
    from .types import Message as Message
    from .types import Task as Task
    from .types import TrainBatch as TrainBatch
    from .types import Trajectory as Trajectory

__version__ = "0.1.0"

__getattr__, __dir__, _offered = offered(__name__)
__all__ = ["__version__", *_offered]  # pyright: ignore[reportUnsupportedDunderAll]
