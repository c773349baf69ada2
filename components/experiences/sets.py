"""Sets of stored experiences: what there is of them in light tasks, and the groups themselves one at a time.

    an earlier run's groups on disk  ->  StoredSet  \\
                                                      >  ExperienceSet: order, epochs, position; group(task)
    rows of files, with rewards      ->  RowSet     /

The trained tokens of a group from here have the version of a buffer (`versions.buffer_version`): no version of this run
sampled them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..group import Group
from ..samples import further, laid
from ..tasks.examples import example_of
from ..tasks.prompting import Prompter
from ..tasks.taskset import TaskSet
from ..types import Task, Trajectory
from ..versions import NO_VERSION, buffer_version
from .stored import StoredGroups

TOKENS = ("prompt_tokens", "response_tokens")
"""Keys of a row that is tokens already, as `rollouts/` has them."""
BESIDE_TOKENS = ("loss_mask", "behavior_logprobs")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model can be trained on: token ids below `vocab_size` (None: unknown), at most `max_length` tokens."""

    vocab_size: int | None
    max_length: int


class ExperienceSet(TaskSet):
    """A taskset whose tasks stand for groups: `group` reads one. Order, epochs and position are a taskset's.

    `buffer`: the index that its tokens are marked with.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        order: str,
        difficulty_key: str | None,
        name: str,
        limits: Limits,
        buffer: int = 0,
    ) -> None:
        super().__init__(tasks, seed=seed, order=order, difficulty_key=difficulty_key, name=name)
        self._limits, self._version = limits, buffer_version(buffer)

    def group(self, task: Task) -> Group:
        """The experiences that `task` stands for. Raises ValueError in one line for what cannot be trained on.

        A logprob that nobody wrote down is nan: see `lacks_logprobs`.
        """
        group = self._read(task)
        self._check(task, group)
        versions = torch.where(group.samples["loss_mask"], self._version, NO_VERSION).to(torch.int32)
        return replace(group, task_id=task.task_id, samples=group.samples | {"policy_versions": versions})

    def _read(self, task: Task) -> Group:
        raise NotImplementedError

    def _check(self, task: Task, group: Group) -> None:
        s, limits = group.samples, self._limits
        ids = torch.cat([s["prompt_tokens"], s["response_tokens"]])
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= (limits.vocab_size or math.inf)):
            raise ValueError(
                f"experience {task.task_id}: got token ids {int(ids.min())} to {int(ids.max())}, expected 0 to "
                f"{(limits.vocab_size or 0) - 1}; set model.path to a model with the tokenizer that wrote them"
            )
        longest = int((s["prompt_lengths"] + s["response_lengths"]).max())
        if longest > limits.max_length:
            raise ValueError(
                f"experience {task.task_id}: got {longest} tokens, expected at most rollout.max_model_len "
                f"{limits.max_length}; raise it"
            )
        if not s["loss_mask"].any():
            raise ValueError(f"experience {task.task_id}: no token of it can be trained on; drop it")
        if further(s, "token_tensors") or further(s, "prompt_tensors"):
            raise ValueError(f"experience {task.task_id}: has tensors beside its tokens; expected tokens alone")


class StoredSet(ExperienceSet):
    """Groups that an earlier run kept."""

    def __init__(self, groups: StoredGroups, tasks: Sequence[Task], **options: Any) -> None:
        self._groups = groups
        super().__init__(tasks, **options)

    def _read(self, task: Task) -> Group:
        return self._groups.read(*task.info["at"])


class RowSet(ExperienceSet):
    """Rows of files: each answer with its reward, grouped. A task's `info["rows"]` are its rows. `temperature`: at
    which all of them were sampled.
    """

    def __init__(
        self, tasks: Sequence[Task], *, prompter: Prompter, reward_key: str, temperature: float, **options: Any
    ) -> None:
        self._prompter, self._reward_key, self._temperature = prompter, reward_key, temperature
        self.scored: StoredGroups | None = None
        super().__init__(tasks, **options)

    def _read(self, task: Task) -> Group:
        if self.scored is not None and (at := self.scored.by_task(task.task_id)) is not None:
            return self.scored.read(*at)
        trajectories = [self._trajectory(row) for row in task.info["rows"]]
        samples = laid(trajectories, temperature=self._temperature)
        return Group.of(trajectories, samples=samples, group_id=0, task_id=task.task_id)

    def _trajectory(self, row: Task) -> Trajectory:
        reward = float(row.info[self._reward_key])
        if all(key in row.info for key in TOKENS):
            return _of_tokens(row, reward)
        trajectory = example_of(row, self._prompter)
        own = row.info.get("behavior_logprobs")
        if own is not None and len(own) != len(trajectory.response_tokens):
            raise ValueError(
                f"task {row.task_id}: got {len(own)} behavior_logprobs, expected {len(trajectory.response_tokens)}, "
                "one for each response token, the one that ends the turn included; give the tokens too, or leave them "
                "out"
            )
        logprobs = _unknown(trajectory.loss_mask) if own is None else [float(value) for value in own]
        return replace(trajectory, behavior_logprobs=logprobs, reward=reward)


def lacks_logprobs(group: Group) -> bool:
    """Whether a trained token has no behaviour logprob."""
    return bool(group.samples["behavior_logprobs"][group.samples["loss_mask"]].isnan().any())


def with_logprobs(group: Group, logprobs: torch.Tensor) -> Group:
    """Missing behaviour logprobs replaced by `logprobs` [S]."""
    own, mask = group.samples["behavior_logprobs"], group.samples["loss_mask"]
    filled = torch.where(mask & own.isnan(), logprobs.to(own.dtype), own)
    return replace(group, samples=group.samples | {"behavior_logprobs": filled})


def grouped(rows: Iterable[Task], *, reward_key: str, group_key: str | None) -> list[Task]:
    """A task for each group of rows: those with the same value under `group_key`, or (None) the same question.

    `difficulty` in its `info` is 1 less its mean reward. Raises ValueError naming a row without a number as its reward.
    """
    by_group: dict[str, list[Task]] = {}
    for row in rows:
        reward = row.info.get(reward_key)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(
                f"task.reward_key: row {row.task_id} has {reward!r:.60} under {reward_key!r}, expected a finite number "
                f"in every row; its keys are {str(sorted(row.info))[:120]}"
            )
        key = _question(row) if group_key is None else row.info.get(group_key)
        if key is None:
            raise ValueError(
                f"task.group_key: row {row.task_id} has nothing under {group_key!r}, expected the group that it "
                f"belongs to; its keys are {str(sorted(row.info))[:120]}"
            )
        by_group.setdefault(str(key), []).append(row)
    return [_of_rows(own, reward_key) for own in by_group.values()]


def _of_rows(rows: list[Task], reward_key: str) -> Task:
    content = json.dumps([[_question(r), r.answer, r.info[reward_key], r.info.get(TOKENS[1])] for r in rows])
    mean = sum(float(r.info[reward_key]) for r in rows) / len(rows)
    task_id = f"{rows[0].task_id.partition('-')[0]}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    return Task(task_id=task_id, prompt="", info={"rows": rows, "answers": len(rows), "difficulty": 1.0 - mean})


def _question(row: Task) -> str:
    return row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True)


def _of_tokens(row: Task, reward: float) -> Trajectory:
    prompt, response = ([*row.info[key]] for key in TOKENS)
    mask = row.info.get("loss_mask")
    mask = [True] * len(response) if mask is None else [bool(value) for value in mask]
    logprobs = row.info.get("behavior_logprobs")
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in (*prompt, *response)):
        raise ValueError(f"task {row.task_id}: prompt_tokens and response_tokens hold {prompt!r:.60}, expected ids")
    return Trajectory(
        prompt_tokens=prompt,
        response_tokens=response,
        loss_mask=mask,
        behavior_logprobs=_unknown(mask) if logprobs is None else [float(value) for value in logprobs],
        policy_versions=[NO_VERSION] * len(response),
        reward=reward,
        finish_reason=str(row.info.get("finish_reason", "stop")),
        text=str(row.info.get("text", row.answer)),
    )


def _unknown(mask: Sequence[bool]) -> list[float]:
    return [math.nan if trained else 0.0 for trained in mask]
