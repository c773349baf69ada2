"""Everything that is checked before anything starts. `run` and `validate` both call `examine`, so they cannot disagree.

settings (checked when they were read) -> this machine, files, packages -> data, models, the user's own code
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Hardware, Stage, check_run, derive, this_machine
from ..config.check import earlier_run
from ..config.engines import is_local_path
from ..config.names import user_names
from ..config.rules import ALGORITHM_RULES, check_rules, experiences_need_a_ratio_and_no_critic
from .dry_run import check_plugins, dry_run
from .estimate import memory_problem
from .models import (
    Unreachable,
    check_dataset_exists,
    check_safetensors,
    check_tokenizer,
    check_weights,
    longest_input,
    read_model_config,
)
from .saved_weights import saved_models

if TYPE_CHECKING:
    from ..config import Config
    from ..tasks.evalsets import EvalSet
    from ..types import Task


@dataclass(frozen=True, kw_only=True)
class Findings:
    """One line per problem, in the order in which a user would fix them.

    `wrong`: settings, data or code that no machine could run. `missing`: what this machine lacks, or what blocks the
    run on it.
    """

    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.wrong or self.missing)


def examine(
    stages: Sequence[Stage], run_dir: Path, hardware: Hardware | None = None, *, quick: bool = False
) -> Findings:
    """What prevents `stages` from running here with the run's files in `run_dir`, which does not exist yet.

    Data, models and the user's own code are checked only after all fast checks pass; with `quick`, never.
    """
    hardware = this_machine() if hardware is None else hardware
    found = [problem for stage in stages for problem in check_run(stage.config, stage.recipe, hardware)]
    wrong = [str(problem) for problem in found if problem.anywhere]
    missing = [str(problem) for problem in found if not problem.anywhere]
    missing += [str(problem) for problem in (earlier_run(stages[0].config, run_dir),) if problem is not None]
    missing += [problem for problem in (_folder_problem(run_dir),) if problem]
    if not wrong and not missing and not quick:
        try:
            _check_stage_weights(stages)
            _check_models(stages)
            missing += [problem for problem in (memory_problem(stages, hardware),) if problem]
            seen: set[str] = set()
            for stage in stages:
                check_plugins(stage.config)
                _check_pieces(stage)
                _check_vocabularies(stage)
                _check_adapters(stage)
                _check_tasks(stage, seen)
                check_resume(stage)
        except Unreachable as error:
            missing.append(str(error))
        except (ValueError, OSError) as error:
            wrong.append(" ".join(str(error).split()))
    return Findings(wrong=tuple(dict.fromkeys(wrong)), missing=tuple(dict.fromkeys(missing)))


def _folder_problem(run_dir: Path) -> str:
    """Why `run_dir` cannot be created or written to; "" if it can."""
    place = run_dir.absolute()
    expected = "expected a folder that can be created and written to; set output_dir=..."
    try:
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
    except OSError as error:  # a name that is too long, a folder without read permission
        return f"output_dir: got {str(place)[:200]} ({error.strerror}), {expected}"
    if not existing.is_dir():
        return f"output_dir: got {place} ({existing} is a file), {expected}"
    try:  # permissions do not reveal a read-only disk, a full one, or root's
        os.rmdir(tempfile.mkdtemp(prefix=".leeway-", dir=existing))
    except OSError as error:
        return f"output_dir: got {place} ({existing} cannot be written to: {error.strerror}), {expected}"
    return ""


def _check_models(stages: Sequence[Stage]) -> None:
    """Check that every model exists and accepts inputs as long as it will get."""
    known: dict[str, dict[str, Any] | None] = {}
    for stage in stages:
        for key, path, longest_key, tokens in _models_of(stage.config):
            if path not in known:
                known[path] = read_model_config(key, path)
                if is_local_path(path):
                    check_weights(key, path)
                    if key == "model.path":
                        check_tokenizer(key, path)
                    if stage.recipe.trains and not key.startswith("env.models."):
                        check_safetensors(key, path)
            found = known[path]
            limit = None if found is None or not stage.recipe.generates else longest_input(found)
            if limit is not None and tokens > limit:
                raise ValueError(
                    f"{longest_key}: got {tokens}, expected at most {limit}, the longest input of {path} ({key}); "
                    f"set {longest_key}={limit}"
                )


def _models_of(config: Config) -> Iterator[tuple[str, str, str, int]]:
    """(key, path, key of the length, longest input in tokens) of each model that is loaded."""
    a, longest = config.algorithm, config.rollout.max_model_len
    paths = {"model.path": config.model.path, "algorithm.reference_path": a.reference_path}
    for key, path in (paths | {"critic.path": config.critic.path}).items():
        if path is not None:
            yield key, path, "rollout.max_model_len", longest
    for name, model in config.env.models.items():
        if model.path is not None:
            yield f"env.models.{name}.path", model.path, f"env.models.{name}.max_model_len", model.max_model_len


def _check_pieces(stage: Stage) -> None:
    """Import the user's own parts of the algorithm, check what they need, and try all parts on a small example."""
    config = stage.config
    if stage.recipe.has_groups and user_names(config.algorithm.model_dump()):
        from ..algorithms.trial import try_pieces  # loads torch

        made = config.algorithm.made()
        rules = ALGORITHM_RULES if stage.recipe.is_online else (experiences_need_a_ratio_and_no_critic,)
        check_rules(config.model_copy(update={"algorithm": made.settings}), rules)
        try_pieces(made.advantage, made.loss, made.correction, made.estimator)


def _check_vocabularies(stage: Stage) -> None:
    """A reference policy, teacher or critic gets the policy's token ids: they must mean the same in both models."""
    config = stage.config
    policy = config.model.path
    if policy is None or not (stage.recipe.has_groups or stage.recipe.trains_on == "pairs"):
        return
    others = {"algorithm.reference_path": config.algorithm.reference_path}
    if derive(config, stage.recipe).has_critic:
        others["critic.path"] = config.critic.path
    for key, path in others.items():
        if path is not None and path != policy:
            from ..tasks.vocabularies import check_same_tokens  # loads transformers

            check_same_tokens(key, os.path.expanduser(path), os.path.expanduser(policy))


def _check_adapters(stage: Stage) -> None:
    """Raise `Refused` for targets of `model.lora` that the model does not have, or that cannot have an adapter."""
    model = stage.config.model
    if model.lora is None or not stage.recipe.trains:
        return
    from ..trainer.lora import lora_targets  # loads transformers

    if model.init is not None:
        from ..tasks.bootstrap import unbuilt_model

        lora_targets(unbuilt_model(model.init), model.lora)
    elif model.path is not None and read_model_config("model.path", model.path) is not None:  # else it is not here yet
        from ..trainer.pretrained import skeleton

        lora_targets(skeleton(os.path.expanduser(model.path), "eager"), model.lora)


def _check_tasks(stage: Stage, seen: set[str]) -> None:
    """Read the tasks: the user must fix a wrong dataset, option or line. `seen`: what other stages already read."""
    from ..tasks.evalsets import build_evalsets
    from ..tasks.queue_tasks import QueueTaskSet
    from ..tasks.taskset import build_taskset

    config = stage.config
    if stage.recipe.reads == "nothing":
        return
    for task in (config.task, *config.task.mix.values(), *config.eval.tasksets.values()):
        if task.name == "hf" and task.path is not None and not is_local_path(task.path):
            check_dataset_exists(task.path)
    if stage.recipe.trains_on == "experiences":
        from .experiences import check_experiences, load_experiences  # loads Ray and torch

        if config.model.path is not None:  # else it is still to be built, with the tokenizer that rows need
            check_experiences(load_experiences(config)[0], config)
        return
    source = f"{config.task!r} {config.eval!r} {config.seed}"
    if stage.recipe.trains_on == "answers" and config.model.path is None and source in seen:
        return
    evaluated = build_evalsets(config)
    if stage.recipe.reads == "heldout":
        if config.eval.checkpoints is not None:
            saved_models("eval.checkpoints", config.eval.checkpoints)
        if not evaluated:
            raise ValueError("eval: nothing is held out, expected tasks to evaluate on; set eval.tasksets or eval.path")
        dry_run(config, evaluated[0].tasks[0])
        return
    taskset = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
    seen.add(source)
    if stage.recipe.is_offline:
        _check_examples(config, taskset.tasks, evaluated, pairs=stage.recipe.trains_on == "pairs")
        return
    if isinstance(taskset, QueueTaskSet):
        deque(taskset.in_file(), maxlen=0)  # raises for a line that is no task
    dry_run(config, taskset.tasks[0])
    for name, own in config.replay.buffers.items() if config.model.path is not None else ():
        from ..experiences.buffers import buffer_tasks
        from ..tasks.prompting import Prompter

        assert config.model.path is not None
        tasks = buffer_tasks(name, config, Prompter.of(config.model)).tasks
        if own.kind == "answers":
            _check_examples(config, tasks, [])


def _check_examples(
    config: Config, tasks: Sequence[Task], evaluated: Sequence[EvalSet], *, pairs: bool = False
) -> None:
    """Raise ValueError for the first task that cannot be trained or evaluated on as a prompt with its answer."""
    from ..tasks.examples import check_examples
    from ..tasks.preferences import pairs_among, rejected_key

    prompter = None
    if config.model.path is not None:  # else it is still to be built
        from ..tasks.prompting import Prompter

        prompter = Prompter.of(config.model)
    check_examples(tasks, prompter, rejected_key=config.task.rejected_key if pairs else None)
    for evalset in evaluated:
        key = rejected_key(config, evalset.name) if pairs else None
        check_examples(pairs_among(evalset.tasks, key=key) if key else evalset.tasks, prompter, rejected_key=key)


def check_resume(stage: Stage) -> None:
    """Raise ValueError for a checkpoint that cannot be resumed from, or was trained under different settings."""
    config = stage.config
    if config.checkpoint.resume == "never" or not stage.recipe.trains:
        return
    from ..tasks.taskset import build_taskset
    from ..trainer.checkpoint import CheckpointError
    from .checkpoints import check_same_tasks, resume_point  # loads torch

    try:
        folder = resume_point(stage.dir / "checkpoints", config)
        if folder is not None:
            if stage.recipe.trains_on == "experiences":
                from .experiences import load_experiences

                taskset: Any = load_experiences(config)[0]
            else:
                taskset = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
            check_same_tasks(folder, taskset)
    except CheckpointError as error:
        raise ValueError(f"checkpoint.resume: got {config.checkpoint.resume}, but {error}") from None


def _check_stage_weights(stages: Sequence[Stage]) -> None:
    for stage in stages[:-1]:
        if stage.recipe.trains and stage.config.checkpoint.save_hf == "never":
            raise ValueError(
                f"stages.{stage.name}.checkpoint.save_hf: got never, expected last or always: "
                "the next stage starts from its weights"
            )
