"""What a recipe is written with: `from leeway import driver`, then `driver.Launcher`, `driver.Checkpoints`, ...

Each name is loaded when it is first used. So a recipe's file can be imported, to ask what it needs and what its rules
are, without loading torch or Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from ..planning.advice import advice_after as advice_after
    from ..replay.actor import TakeRefs as TakeRefs
    from ..runtime.launch import Launcher as Launcher
    from ..runtime.limit import Speeds as Speeds
    from ..runtime.supervisor import Supervisor as Supervisor
    from ..runtime.supervisor import awaited as awaited
    from ..runtime.supervisor import together as together
    from ..tasks.batches import Batches as Batches
    from ..tasks.evalsets import EvalSet as EvalSet
    from ..tasks.evalsets import build_evalsets as build_evalsets
    from ..tasks.examples import check_examples as check_examples
    from ..tasks.examples import example_of as example_of
    from ..tasks.examples import pair_of as pair_of
    from ..tasks.mixed import MixedTaskSet as MixedTaskSet
    from ..tasks.preferences import pairs_among as pairs_among
    from ..tasks.preferences import rejected_key as rejected_key
    from ..tasks.prompting import Prompter as Prompter
    from ..tasks.queue_tasks import QueueTaskSet as QueueTaskSet
    from ..tasks.taskset import TaskSet as TaskSet
    from ..tasks.taskset import build_taskset as build_taskset
    from ..types import TrainBatch as TrainBatch
    from ..types import batch_trajectories as batch_trajectories
    from ..weights import CanaryPrompts as CanaryPrompts
    from ..weights import Publication as Publication
    from .canary import canary_prompts as canary_prompts
    from .checkpoints import STATE_DIR as STATE_DIR
    from .checkpoints import Checkpoints as Checkpoints
    from .checkpoints import resume_point as resume_point
    from .checkpoints import saved_position as saved_position
    from .checkpoints import saved_version as saved_version
    from .context import StageContext as StageContext
    from .context import StageResult as StageResult
    from .context import say as say
    from .context import timed as timed
    from .evaluation import evaluate as evaluate
    from .evaluation import evaluated_at_start as evaluated_at_start
    from .evaluation import measured_by as measured_by
    from .evaluation import of_set as of_set
    from .evaluation import told as told
    from .frontier_picture import draw_frontier as draw_frontier
    from .frontier_report import FrontierRun as FrontierRun
    from .frontier_report import conclusions as conclusions
    from .frontier_report import summarise as summarise
    from .frontier_report import write_csv as write_csv
    from .kept import KeptPublications as KeptPublications
    from .models import check_weights as check_weights
    from .offline import Feed as Feed
    from .offline import Measure as Measure
    from .offline import Record as Record
    from .offline import changes as changes
    from .rl_report import Reporter as Reporter
    from .rl_report import StepClock as StepClock
    from .rl_report import StepReport as StepReport
    from .rl_report import in_words as in_words
    from .saved_weights import saved_models as saved_models
    from .speeds import measure_speeds as measure_speeds
    from .speeds import save_speeds as save_speeds
    from .speeds import saved_speeds as saved_speeds

_WHERE = {
    "advice_after": "..planning.advice",
    "canary_prompts": ".canary",
    "Checkpoints": ".checkpoints",
    "STATE_DIR": ".checkpoints",
    "resume_point": ".checkpoints",
    "saved_position": ".checkpoints",
    "saved_version": ".checkpoints",
    "StageContext": ".context",
    "StageResult": ".context",
    "say": ".context",
    "timed": ".context",
    "evaluate": ".evaluation",
    "evaluated_at_start": ".evaluation",
    "measured_by": ".evaluation",
    "of_set": ".evaluation",
    "told": ".evaluation",
    "draw_frontier": ".frontier_picture",
    "FrontierRun": ".frontier_report",
    "conclusions": ".frontier_report",
    "summarise": ".frontier_report",
    "write_csv": ".frontier_report",
    "KeptPublications": ".kept",
    "check_weights": ".models",
    "Feed": ".offline",
    "Measure": ".offline",
    "Record": ".offline",
    "changes": ".offline",
    "Reporter": ".rl_report",
    "StepClock": ".rl_report",
    "StepReport": ".rl_report",
    "in_words": ".rl_report",
    "saved_models": ".saved_weights",
    "measure_speeds": ".speeds",
    "save_speeds": ".speeds",
    "saved_speeds": ".speeds",
    "TakeRefs": "..replay.actor",
    "Launcher": "..runtime.launch",
    "Speeds": "..runtime.limit",
    "Supervisor": "..runtime.supervisor",
    "awaited": "..runtime.supervisor",
    "together": "..runtime.supervisor",
    "Batches": "..tasks.batches",
    "EvalSet": "..tasks.evalsets",
    "build_evalsets": "..tasks.evalsets",
    "check_examples": "..tasks.examples",
    "example_of": "..tasks.examples",
    "pair_of": "..tasks.examples",
    "MixedTaskSet": "..tasks.mixed",
    "pairs_among": "..tasks.preferences",
    "rejected_key": "..tasks.preferences",
    "Prompter": "..tasks.prompting",
    "QueueTaskSet": "..tasks.queue_tasks",
    "TaskSet": "..tasks.taskset",
    "build_taskset": "..tasks.taskset",
    "TrainBatch": "..types",
    "batch_trajectories": "..types",
    "CanaryPrompts": "..weights",
    "Publication": "..weights",
}

__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
