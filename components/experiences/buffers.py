"""Auxiliary buffers: named samples that are mixed into every optimizer step beside the rollouts (`replay.buffers`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..config.flow import AuxiliaryBuffer
from ..config.schema import Config
from ..group import Group
from ..samples import laid
from ..tasks.examples import answer_tasks, example_of
from ..tasks.prompting import Prompter
from ..tasks.taskset import TaskSet
from ..types import Task
from ..versions import NO_VERSION, buffer_version
from .build import build_experiences
from .sets import ExperienceSet, lacks_logprobs


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What an optimizer step gets of a buffer. `groups`: of answers, one that holds all of them."""

    name: str
    is_supervised: bool
    groups: list[Group]


class BufferFeed:
    """The samples of a buffer, step after step, epoch after epoch, until each was used as often as the settings say.

    `first_step`: the optimizer step that comes first; what earlier ones drew is passed over. `temperature`: at which
    answers are scored, which nobody sampled.
    """

    def __init__(
        self,
        name: str,
        settings: AuxiliaryBuffer,
        tasks: TaskSet,
        prompter: Prompter,
        *,
        index: int,
        first_step: int,
        temperature: float,
    ) -> None:
        self.name, self._settings, self._tasks, self._prompter = name, settings, tasks, prompter
        self._temperature = temperature
        self._version = buffer_version(index)
        self._next_step = first_step
        drawn = sum(settings.batch_size for step in range(first_step) if settings.weight_at(step) > 0)
        self._most = None if settings.epochs is None else round(settings.epochs * len(tasks))
        self._left: Iterator[Task] = itertools.islice(tasks, drawn, None if self._most is None else self._most)
        self.num_used = drawn if self._most is None else min(drawn, self._most)

    def draw(self, step: int) -> Drawn:
        """Those of this optimizer step: fewer at the end, none after it, or while the weight is 0."""
        assert step == self._next_step, f"buffer {self.name}: step {step} was asked for, {self._next_step} is next"
        self._next_step += 1
        count = self._settings.batch_size if self._settings.weight_at(step) > 0 else 0
        tasks = list(itertools.islice(self._left, count))
        self.num_used += len(tasks)
        if isinstance(self._tasks, ExperienceSet):
            return Drawn(name=self.name, is_supervised=False, groups=[self._tasks.group(task) for task in tasks])
        return Drawn(name=self.name, is_supervised=True, groups=[self._answers(tasks)] if tasks else [])

    def metrics(self) -> dict[str, float]:
        return {
            f"train/buffers/{self.name}/used": float(self.num_used),
            f"train/buffers/{self.name}/epochs": self.num_used / len(self._tasks),
        }

    def _answers(self, tasks: list[Task]) -> Group:
        examples = [example_of(task, self._prompter) for task in tasks]
        samples = laid(examples, temperature=self._temperature)
        group = Group.of(examples, samples=samples, group_id=0, task_id=self.name)
        versions = torch.where(group.samples["loss_mask"], self._version, NO_VERSION).to(torch.int32)
        return replace(group, samples=group.samples | {"policy_versions": versions})


def buffer_tasks(name: str, config: Config, prompter: Prompter, *, index: int = 0) -> TaskSet:
    """What a buffer of `replay.buffers` is filled with. Raises ValueError in one line, naming its key."""
    own, key = config.replay.buffers[name], f"replay.buffers.{name}"
    source = config.task.filled(own.source())
    try:
        if own.kind == "answers":
            return answer_tasks(source, config.task, config.eval, seed=config.seed)
        found = build_experiences(source, config, prompter, key=key, buffer=index)
        if lacks_logprobs(found.group(found.tasks[0])):
            raise ValueError(
                "its rows have no behavior_logprobs, expected them, because the policy changes before they are used; "
                "set kind=answers, or train on them with offline_rl"
            )
        return found
    except (ValueError, FileNotFoundError) as error:
        raise error if str(error).startswith(key) else ValueError(f"{key}: {error}") from error


def buffer_feeds(config: Config, prompter: Prompter, *, first_step: int) -> list[BufferFeed]:
    """One feed for each of `replay.buffers`, in their order."""
    return [
        BufferFeed(
            name,
            settings,
            buffer_tasks(name, config, prompter, index=index),
            prompter,
            index=index,
            first_step=first_step,
            temperature=config.rollout.temperature,
        )
        for index, (name, settings) in enumerate(config.replay.buffers.items())
    ]
