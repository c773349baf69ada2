"""What a recipe is written with: `from leeway import driver`, then `driver.Launcher`, `driver.Checkpoints`, ...

Each name is loaded when it is first used. So a recipe's file can be imported, to ask what it needs and what its rules
are, without loading torch or Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import offered

if TYPE_CHECKING:  # for editors and type checkers
    from ..monitor.logs import say as say
    from ..planning.advice import advice_after as advice_after
    from ..runtime.launch import Launcher as Launcher
    from ..runtime.limit import Speeds as Speeds
    from ..runtime.supervisor import Supervisor as Supervisor
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
    from .checkpoints import STATE_DIR as STATE_DIR
    from .checkpoints import Checkpoints as Checkpoints
    from .checkpoints import resume_point as resume_point
    from .checkpoints import saved_position as saved_position
    from .checkpoints import saved_version as saved_version
    from .context import StageContext as StageContext
    from .context import StageResult as StageResult
    from .context import timed as timed
    from .evaluation import answered as answered
    from .evaluation import evaluate as evaluate
    from .evaluation import in_one_line as in_one_line
    from .evaluation import of_set as of_set
    from .evaluation import table_of_versions as table_of_versions
    from .evaluation import version_at as version_at
    from .experiences import assembled as assembled
    from .experiences import load_experiences as load_experiences
    from .experiences import score_missing as score_missing
    from .experiences import use_scored as use_scored
    from .experiences import whole_set as whole_set
    from .explore_stage import ExploreStage as ExploreStage
    from .models import check_weights as check_weights
    from .offline import Feed as Feed
    from .offline import Measure as Measure
    from .offline import OfflineData as OfflineData
    from .offline import OfflineReport as OfflineReport
    from .offline import as_shares as as_shares
    from .offline import changes as changes
    from .rl_run import EvalPoint as EvalPoint
    from .rl_run import RLRun as RLRun
    from .rl_stage import RLStage as RLStage
    from .rollouts import Rollouts as Rollouts
    from .saved_weights import SavedWeights as SavedWeights
    from .saved_weights import saved_models as saved_models
    from .scores import scores_of as scores_of
    from .scores import tasks_with_rows as tasks_with_rows
    from .scores import write_scored as write_scored

__getattr__, __dir__, __all__ = offered(__name__)
