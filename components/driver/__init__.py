"""What a recipe is written with: `from leeway import driver`, then `driver.Launcher`, `driver.Checkpoints`, ...

Each name is loaded when it is first used. So a recipe's file can be imported, to ask what it needs and what its rules
are, without loading torch or Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from ..planning.advice import advice_after as advice_after
    from ..recipes.canary import canary_prompts as canary_prompts
    from ..recipes.checkpoints import STATE_DIR as STATE_DIR
    from ..recipes.checkpoints import Checkpoints as Checkpoints
    from ..recipes.checkpoints import resume_point as resume_point
    from ..recipes.checkpoints import saved_position as saved_position
    from ..recipes.checkpoints import saved_version as saved_version
    from ..recipes.context import StageContext as StageContext
    from ..recipes.context import StageResult as StageResult
    from ..recipes.context import say as say
    from ..recipes.context import timed as timed
    from ..recipes.evaluation import evaluate as evaluate
    from ..recipes.evaluation import evaluated_at_start as evaluated_at_start
    from ..recipes.evaluation import measured_by as measured_by
    from ..recipes.evaluation import of_set as of_set
    from ..recipes.evaluation import told as told
    from ..recipes.frontier_picture import draw_frontier as draw_frontier
    from ..recipes.frontier_report import FrontierRun as FrontierRun
    from ..recipes.frontier_report import conclusions as conclusions
    from ..recipes.frontier_report import summarise as summarise
    from ..recipes.frontier_report import write_csv as write_csv
    from ..recipes.kept import KeptPublications as KeptPublications
    from ..recipes.models import check_weights as check_weights
    from ..recipes.offline import Feed as Feed
    from ..recipes.offline import Measure as Measure
    from ..recipes.offline import Record as Record
    from ..recipes.offline import changes as changes
    from ..recipes.rl_report import Reporter as Reporter
    from ..recipes.rl_report import StepClock as StepClock
    from ..recipes.rl_report import StepReport as StepReport
    from ..recipes.rl_report import in_words as in_words
    from ..recipes.saved_models import saved_models as saved_models
    from ..recipes.speeds import measure_speeds as measure_speeds
    from ..recipes.speeds import save_speeds as save_speeds
    from ..recipes.speeds import saved_speeds as saved_speeds
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

_WHERE = {
    "advice_after": "..planning.advice",
    "canary_prompts": "..recipes.canary",
    "Checkpoints": "..recipes.checkpoints",
    "STATE_DIR": "..recipes.checkpoints",
    "resume_point": "..recipes.checkpoints",
    "saved_position": "..recipes.checkpoints",
    "saved_version": "..recipes.checkpoints",
    "StageContext": "..recipes.context",
    "StageResult": "..recipes.context",
    "say": "..recipes.context",
    "timed": "..recipes.context",
    "evaluate": "..recipes.evaluation",
    "evaluated_at_start": "..recipes.evaluation",
    "measured_by": "..recipes.evaluation",
    "of_set": "..recipes.evaluation",
    "told": "..recipes.evaluation",
    "draw_frontier": "..recipes.frontier_picture",
    "FrontierRun": "..recipes.frontier_report",
    "conclusions": "..recipes.frontier_report",
    "summarise": "..recipes.frontier_report",
    "write_csv": "..recipes.frontier_report",
    "KeptPublications": "..recipes.kept",
    "check_weights": "..recipes.models",
    "Feed": "..recipes.offline",
    "Measure": "..recipes.offline",
    "Record": "..recipes.offline",
    "changes": "..recipes.offline",
    "Reporter": "..recipes.rl_report",
    "StepClock": "..recipes.rl_report",
    "StepReport": "..recipes.rl_report",
    "in_words": "..recipes.rl_report",
    "saved_models": "..recipes.saved_models",
    "measure_speeds": "..recipes.speeds",
    "save_speeds": "..recipes.speeds",
    "saved_speeds": "..recipes.speeds",
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
