"""What a run is evaluated on: its own held-out tasks, and the tasksets of `eval.tasksets`."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.inputs import EvalSampling
from ..config.schema import Config
from ..types import Task
from .taskset import build_evalset, build_taskset


@dataclass(frozen=True)
class EvalSet:
    """Tasks, and how they are answered. `name` is the one in `eval/<name>/...`."""

    name: str
    tasks: tuple[Task, ...]
    sampling: EvalSampling


def build_evalsets(config: Config) -> list[EvalSet]:
    """All tasksets that have tasks, the held-out one first. Raises a one-line ValueError or FileNotFoundError."""
    held_out = build_taskset(config.task, seed=config.seed, split="eval", eval_config=config.eval)
    sets = [EvalSet(held_out.name, tuple(held_out.tasks), config.eval.sampling(None))]
    for name, own in config.eval.tasksets.items():
        sampling, source = config.eval.sampling(name), config.task.evaluated(own)
        try:
            taskset = build_evalset(source, name=name, seed=config.seed, num_tasks=sampling.num_tasks)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"eval.tasksets.{name}: {error}") from error
        sets.append(EvalSet(name, taskset.tasks, sampling))
    return [evalset for evalset in sets if evalset.tasks]
