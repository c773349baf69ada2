"""From the `task` section, or that of a buffer, to a set of stored experiences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..config.inputs import TaskSource
from ..config.model_files import model_config
from ..config.schema import Config
from ..tasks.prompting import Prompter
from ..tasks.questions import is_held_out
from ..tasks.taskset import read_tasks
from ..types import Task
from .sets import ExperienceSet, Limits, RowSet, StoredSet, grouped
from .stored import stored_below


def build_experiences(
    source: TaskSource,
    config: Config,
    prompter: Prompter,
    *,
    split: Literal["train", "eval"] = "train",
    key: str = "task",
    buffer: int = 0,
) -> ExperienceSet:
    """The experiences that `source` describes. train: all that are not held out; eval: the first `eval.num_tasks` of
    those that are. Rows are held out by their question, as elsewhere; stored groups by their task.

    `key`: the section in messages. Raises ValueError in one line.
    """
    assert config.model.path is not None
    model = Path(config.model.path)
    options = {
        "seed": config.seed,
        "order": source.order if split == "train" else "sequential",
        "difficulty_key": source.difficulty_key,
        "name": "experiences" if split == "train" else "held_out",
        "limits": Limits(vocab_size=model_config(model).get("vocab_size"), max_length=config.rollout.max_model_len),
        "buffer": buffer,
    }

    def of_split(tasks: Sequence[Task], digests: Sequence[str]) -> list[Task]:
        each = zip(tasks, digests, strict=True)
        kept = [t for t, digest in each if is_held_out(digest, source.holdout_frac) == (split == "eval")]
        if split == "eval":
            return kept[: config.eval.num_tasks]
        if not kept:
            raise ValueError(f"{key}: got no experiences to train on, expected at least one; check {key}.path")
        return kept

    if source.name == "store":
        stored = stored_below(str(source.path), key=f"{key}.path")
        listed = list(stored.listed())[: source.limit]
        tasks = [
            Task(
                task_id=f"{found.task_id}@{found.at[0]}#{found.at[1]}",
                prompt="",
                info={"at": found.at, "reward": found.reward, "difficulty": 1.0 - found.reward},
            )
            for found in listed
        ]
        return StoredSet(stored, of_split(tasks, [_digest(found.task_id) for found in listed]), **options)
    rows = read_tasks(source, config.seed)
    groups = grouped(rows, reward_key=source.reward_key, group_key=source.group_key)
    first = [own.info["rows"][0].task_id for own in groups]  # begins with the digest of its question
    tasks = of_split(groups, [task_id.partition("-")[0] for task_id in first])
    at = config.rollout.temperature
    return RowSet(tasks, prompter=prompter, reward_key=source.reward_key, temperature=at, **options)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
