"""For recipes that train on stored experiences: the sets, their batches, and the logprobs that nobody wrote down."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..failures import Refused

if TYPE_CHECKING:  # `validate` asks for the checks here, and loads neither Ray nor torch for them
    from ..experiences.sets import ExperienceSet
    from ..group import Group
    from ..replay.assemble import Batch
    from ..runtime.launch import Launcher
    from ..types import TrainBatch
    from .context import StageContext

SCORED = "scored"
"""A folder of a stage: its rows as groups, with the logprobs of the weights that training began with."""


def load_experiences(config: Config) -> tuple[ExperienceSet, ExperienceSet]:
    """(those to train on, those that are held out). Raises ValueError in one line."""
    from ..experiences.build import build_experiences
    from ..tasks.prompting import Prompter

    assert config.model.path is not None
    prompter = Prompter.of(config.model)
    train = build_experiences(config.task, config, prompter, split="train")
    return train, build_experiences(config.task, config, prompter, split="eval")


def check_experiences(train: ExperienceSet, config: Config) -> None:
    """Raises ValueError in one line where the first one cannot be trained on, or none has answers to compare."""
    train.group(train.tasks[0])
    most = max(task.info.get("answers", 2) for task in train.tasks)  # of a store it is known once it is read
    if config.algorithm.made().advantage.needs_group and most < 2:
        raise ValueError(
            f"task.group_key: got one answer in each of {len(train)} groups, expected several: advantage "
            f"{config.algorithm.advantage.name} compares the answers of a group; name the key that they have in "
            "common, or set algorithm.advantage.name=reward"
        )


def assembled(config: Config, groups: Sequence[Group], *, skips: bool = True) -> Batch:
    """One optimizer step on these groups. `skips`: leave out what has no gradient, where the settings say so."""
    from ..config import derive
    from ..replay.assemble import Assembler, shaping_of

    algorithm = config.algorithm
    assembler = Assembler(
        advantage=algorithm.made().advantage,
        shaping=shaping_of(config),
        updates_per_batch=1,
        num_ranks=config.train.num_ranks,
        skip_zero_advantage=skips and derive(config).skip_zero_advantage,
        rollouts_per_step=0,
        count_turns=algorithm.aggregation == "turn_mean_token_mean",
    )
    return assembler(0, [replace(group, group_id=i) for i, group in enumerate(groups)])


def whole_set(config: Config, own: ExperienceSet) -> list[TrainBatch]:
    """All of a set as one batch: a share for each rank."""
    (shares,) = assembled(config, [own.group(task) for task in own.tasks], skips=False).steps
    return shares


async def score_missing(context: StageContext, launcher: Launcher, *sets: ExperienceSet) -> None:
    """Where experiences lack behaviour logprobs, those of the current weights stand for them, for the whole run.

    The scored groups are kept in the stage's folder, so that a resumed run compares with the same ones.
    """
    from ..experiences.sets import RowSet, lacks_logprobs, with_logprobs
    from ..jobs.store import GroupStore
    from ..monitor.logs import say
    from ..samples import joined

    of_rows = [own for own in sets if isinstance(own, RowSet)]
    if not of_rows:
        return
    folder = context.dir / SCORED
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that ended before its first step
    store, scored = GroupStore(folder), 0
    try:
        for own in of_rows:
            for chunk in _chunks(_lacking(own, lacks_logprobs), context.config.train.groups_per_step):
                logprobs = await _score(context.config, launcher, joined([group.samples for group in chunk]))
                sizes = [len(group.samples["response_tokens"]) for group in chunk]
                pairs = zip(chunk, logprobs.split(sizes), strict=True)
                store.add([with_logprobs(group, values) for group, values in pairs])
                scored += len(chunk)
    finally:
        store.close()
    if scored:
        say(f"{context.name}: {scored} groups had no logprobs; those of the initial weights stand for them")
    use_scored(context.dir, *of_rows)


def use_scored(folder: Path, *sets: ExperienceSet) -> None:
    """Read groups that were scored for this stage from there. Raises Refused where they are gone."""
    from ..experiences.sets import RowSet
    from ..experiences.stored import INDEX, StoredGroups

    for own in sets:
        if isinstance(own, RowSet):
            if not (folder / SCORED / INDEX).is_file():
                raise Refused(f"{folder / SCORED}: is gone, and holds the logprobs that the run began with; start anew")
            own.scored = StoredGroups(folder / SCORED)


async def _score(config: Config, launcher: Launcher, samples: Any) -> Any:
    """Logprobs [S] of all response tokens under the current weights."""
    import ray
    import torch

    from ..replay.assemble import split_evenly
    from ..runtime.supervisor import together
    from ..samples import picked, token_index
    from ..train_batch import batch_samples

    parts, shares = launcher.parts, split_evenly(samples, config.train.num_ranks)
    calls = []
    for trainer, share in zip(parts.trainers, shares, strict=True):
        own = picked(samples, share)
        zeros = torch.zeros(len(own["response_tokens"]))
        calls.append(trainer.token_logprobs.remote(ray.put(batch_samples(own, zeros, num_sequences=1, num_tokens=1))))
    timeout_s = config.cluster.step_timeout_s
    found = await parts.supervisor.wait(together(calls), what="trainer", timeout_s=timeout_s)
    logprobs = torch.zeros(len(samples["response_tokens"]))
    for share, values in zip(shares, found, strict=True):
        logprobs[token_index(samples, share)] = torch.tensor(values)
    return logprobs


def _lacking(own: ExperienceSet, lacks: Callable[[Group], bool]) -> Iterator[Group]:
    return (group for task in own.tasks if lacks(group := own.group(task)))


def _chunks(groups: Iterator[Group], size: int) -> Iterator[list[Group]]:
    chunk: list[Group] = []
    for group in groups:
        chunk.append(group)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
