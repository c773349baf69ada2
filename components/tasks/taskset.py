"""A finite list of tasks in a reproducible order whose position can be saved and restored exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torchdata.nodes import BaseNode

from ..config.inputs import EvalConfig, TaskConfig, TaskSource
from ..types import Task
from .jsonl_tasks import read_jsonl
from .order import difficulty_of, order_of, updated
from .questions import Row, is_held_out, make_task, texts_in
from .queue_tasks import QueueTaskSet
from .reasoning_gym_tasks import generate_rows
from .rows import RowFormat
from .sources import as_rows, read_generator, read_hf, read_parquet
from .sql_tasks import sql_items

if TYPE_CHECKING:
    from .mixed import MixedTaskSet


class TaskSet(BaseNode[Task]):
    """An endless `torchdata` node of tasks: epoch after epoch, each in its own order (see `order`), decided when it
    begins. `state_dict()` is the exact position as JSON-able data, and `reset(state)` continues from it.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        order: str = "shuffle",
        difficulty_key: str | None = None,
        name: str = "tasks",
    ) -> None:
        super().__init__()
        self.name = name
        self.tasks = tuple(tasks)
        self._seed = seed
        self._how = order
        self._difficulty_key = difficulty_key
        self._ids = {task.task_id for task in self.tasks}
        self.reset()

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return len(self.tasks)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin at the first epoch, or where `state_dict()` gave `initial_state`.

        Raises ValueError if the state is of other tasks or of another order.
        """
        super().reset(initial_state)
        own = {"fingerprint": self.fingerprint(), "seed": self._seed}
        state = {"epoch": 0, "position": 0, **own} if initial_state is None else initial_state
        for key, value in own.items():
            if state[key] != value:
                raise ValueError(
                    f"taskset {self.name}: saved position has {key} {state[key]}, these tasks have {value}; "
                    "resume with the task section and the seed of the saved run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._pass_rates: dict[str, float] = dict(state.get("pass_rates", {}))
        self._order = list(state["order"]) if "order" in state else self._order_of(self._epoch)

    def next(self) -> Task:
        if not self.tasks:
            raise ValueError(f"taskset {self.name}: got no tasks, expected at least one; check the task section")
        task = self.tasks[self._order[self._position]]
        self._advance()
        return task

    def get_state(self) -> dict[str, Any]:
        state = {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "fingerprint": self.fingerprint(),
        }
        if self._how == "adaptive":  # this epoch's order came from the pass rates of when it began
            state |= {"order": list(self._order), "pass_rates": dict(self._pass_rates)}
        return state

    def find(self, task_ids: Container[str]) -> dict[str, Task]:
        """The tasks with these ids, by id."""
        return {task.task_id: task for task in self.tasks if task.task_id in task_ids}

    def texts(self) -> Iterator[str]:
        """Every text of the taskset (prompts, answers, solutions): what a tokenizer must be able to write."""
        for task in self.tasks:
            if isinstance(task.prompt, str):
                yield task.prompt
            else:
                yield from (text for message in task.prompt for text in texts_in(message))
            yield task.answer
            if "solution" in task.info:
                yield str(task.info["solution"])
            yield from (text for message in task.messages for text in texts_in(message))

    @property
    def epoch(self) -> int:
        """The epoch that the next task belongs to, counted from 0."""
        return self._epoch

    def record(self, task_id: str, pass_rate: float) -> None:
        """A group of this task was finished; `pass_rate` is the share of its answers that were right."""
        if task_id in self._ids:
            self._pass_rates[task_id] = updated(self._pass_rates.get(task_id), pass_rate)

    def fingerprint(self) -> str:
        """16 hex digits that change whenever a task, their order in the source or the way of ordering changes."""
        content = "\n".join([self._how, str(self._difficulty_key), *(task.task_id for task in self.tasks)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _advance(self) -> None:
        # The epoch turns over with its last task, so that a state saved there already names the next epoch.
        self._position += 1
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        return order_of(
            self.tasks,
            self._how,
            seed=self._seed,
            epoch=epoch,
            difficulty_key=self._difficulty_key,
            pass_rates=self._pass_rates,
        )


NO_EVALUATION = EvalConfig()


def rows_by_id(source: TaskSource, seed: int) -> dict[str, Row]:
    """The rows of one source by the ids of their tasks, without the number that tells duplicates apart."""
    return {row.digest[:16]: row for row in read_rows(source, seed)}


def read_tasks(source: TaskSource, seed: int) -> list[Task]:
    """Every row of one source as a task, in its order. Raises ValueError or FileNotFoundError in one line."""
    return _to_tasks(read_rows(source, seed), source)


def build_taskset(
    task_config: TaskConfig, *, seed: int, split: Literal["train", "eval"], eval_config: EvalConfig = NO_EVALUATION
) -> TaskSet | MixedTaskSet | QueueTaskSet:
    """The tasks of one split, as the `task` and `eval` sections describe them.

    train: every question that is not held out (by hash, or by standing in `eval.path` or in one of `eval.tasksets`);
    repeated procedural questions once. eval: the held-out questions (or the rows of `eval.path`), each once, the first
    `eval.num_tasks` in hash order, unshuffled; empty when nothing is held out. Of `task.mix` each taskset by itself:
    mixed for training, one after the other for evaluation. Raises ValueError or FileNotFoundError in one line.
    """
    kept_out = _evalset_digests(task_config, eval_config, seed=seed) if split == "train" else set()
    if task_config.name == "mix":
        return _build_mix(task_config, seed=seed, split=split, eval_config=eval_config, kept_out=kept_out)
    if task_config.name == "queue" and split == "train":
        return _build_queue(task_config, kept_out | _eval_digests(task_config, eval_config.path))
    return _build(task_config, seed=seed, split=split, eval_config=eval_config, kept_out=kept_out)


def _build(
    task_config: TaskSource, *, seed: int, split: Literal["train", "eval"], eval_config: EvalConfig, kept_out: set[str]
) -> TaskSet:
    """One source. `kept_out`: digests of questions that are never trained on, for whatever reason."""
    template = task_config.prompt_template
    if template is not None and "{prompt}" not in template:
        raise ValueError(f'task.prompt_template: got {template!r}, expected text with "{{prompt}}" in it')
    eval_path = eval_config.path
    if split == "eval":
        num_tasks = eval_config.num_tasks
        rows = _eval_rows(task_config, seed, eval_path)[:num_tasks]
        return TaskSet(_to_tasks(rows, task_config), seed=seed, order="sequential", name="held_out")

    own = _eval_digests(task_config, eval_path) | kept_out
    rows = [
        r
        for r in read_rows(task_config, seed)
        if not is_held_out(r.digest, task_config.holdout_frac) and r.digest not in own
    ]
    if task_config.name in ("reasoning_gym", "python"):  # generated tasks may contain duplicates
        rows = _unique(rows)
    if not rows:
        raise ValueError(
            f"task: no training tasks are left with holdout_frac={task_config.holdout_frac} and eval.path={eval_path}; "
            "hold out less"
        )
    tasks = _to_tasks(rows, task_config)
    if task_config.order == "easy_to_hard":
        for task in tasks:
            difficulty_of(task, task_config.difficulty_key)
    return TaskSet(tasks, seed=seed, order=task_config.order, difficulty_key=task_config.difficulty_key, name="train")


def build_evalset(config: TaskSource, *, name: str, seed: int, num_tasks: int) -> TaskSet:
    """The first `num_tasks` rows of an evaluation-only taskset, each question once, in the source's order."""
    tasks = _to_tasks(_unique(read_rows(config, seed))[:num_tasks], config)
    tasks = [replace(t, task_id=f"{name}/{t.task_id}", info={**t.info, "taskset": name}) for t in tasks]
    return TaskSet(tasks, seed=seed, order="sequential", name=name)


def _evalset_digests(task_config: TaskConfig, eval_config: EvalConfig, *, seed: int) -> set[str]:
    """All questions of `eval.tasksets`, which are never trained on."""
    parts = [task_config.evaluated(own) for own in eval_config.tasksets.values()]
    return {row.digest for part in parts for row in read_rows(part, seed)}


def _build_queue(config: TaskSource, kept_out: set[str]) -> QueueTaskSet:
    def make(row: Row, number: int) -> Task | None:
        if row.digest in kept_out:
            return None
        task_id = f"{row.digest[:16]}-{number}"  # the same question may come twice
        return make_task(
            row, task_id=task_id, system_prompt=config.system_prompt, prompt_template=config.prompt_template
        )

    return QueueTaskSet(str(config.path), form=RowFormat(config), make=make, limit=config.limit)


def _build_mix(
    config: TaskConfig, *, seed: int, split: Literal["train", "eval"], eval_config: EvalConfig, kept_out: set[str]
) -> TaskSet | MixedTaskSet:
    from .mixed import MixedTaskSet

    parts: dict[str, TaskSet] = {}
    weights: dict[str, float] = {}
    if split == "train":
        kept_out = kept_out | _held_out_of_any(config, seed)
    for name, own in config.parts().items():
        weights[name] = config.mix[name].weight
        try:
            part = _build(own, seed=seed, split=split, eval_config=eval_config, kept_out=kept_out)
        except ValueError as error:
            raise ValueError(f"task.mix.{name}: {error}") from error
        tasks = [replace(t, task_id=f"{name}/{t.task_id}", info={**t.info, "taskset": name}) for t in part.tasks]
        parts[name] = TaskSet(tasks, seed=seed, order=own.order, difficulty_key=own.difficulty_key, name=name)
        if split == "eval" and eval_config.path is not None:
            return part  # one file of held-out tasks for all
    if split == "train":
        return MixedTaskSet(parts, weights, name="train")
    num = eval_config.num_tasks
    share = None if num is None else -(-num // len(parts))
    held_out = [task for part in parts.values() for task in part.tasks[:share]][:num]
    return TaskSet(held_out, seed=seed, order="sequential", name="held_out")


def _held_out_of_any(config: TaskConfig, seed: int) -> set[str]:
    """Of parts that hold out different shares: digests of what any of them holds out, for others may have it too."""
    parts = config.parts().values()
    least = min(own.holdout_frac for own in parts)
    return {
        row.digest
        for own in parts
        if own.holdout_frac > least
        for row in read_rows(own, seed)
        if is_held_out(row.digest, own.holdout_frac)
    }


def read_rows(config: TaskSource, seed: int) -> list[Row]:
    """Every row of one source, in its order, before templates. Raises ValueError or FileNotFoundError in one line."""
    path, form, limit, options = str(config.path), RowFormat(config), config.limit, dict(config.options)
    size = config.size if limit is None else min(config.size, limit)
    match config.name:
        case "reasoning_gym":
            return generate_rows(str(config.dataset), options=options, size=size, seed=seed)
        case "jsonl":
            return _read_file(config, config.path, limit=limit)
        case "parquet":
            return read_parquet(path, form=form, limit=limit)
        case "hf":
            return read_hf(path, subset=config.subset, split=config.split, form=form, limit=limit)
        case "sql":
            return as_rows(sql_items(path, str(config.query)), form, limit)
        case "queue" | "mix" | "store":
            # A store has no questions; a queue trains on all of its tasks; parts of a mix are read one by one.
            return []
        case "python":
            return read_generator(path, options=options, size=size, seed=seed, form=form)


def _read_file(config: TaskSource, path: str | None, *, limit: int | None) -> list[Row]:
    if path is None:
        raise ValueError(
            "task.path: got null, expected a .jsonl file, because task.name is 'jsonl'; set task.path=FILE"
        )
    return read_jsonl(path, form=RowFormat(config), limit=limit)


def _eval_rows(config: TaskSource, seed: int, eval_path: str | None) -> list[Row]:
    if eval_path is not None:
        rows = _read_file(config, eval_path, limit=None)
    elif config.holdout_frac > 0:
        rows = [row for row in read_rows(config, seed) if is_held_out(row.digest, config.holdout_frac)]
        if not rows:
            raise ValueError(
                f"task.holdout_frac: {config.holdout_frac} holds out none of the questions; raise it, or set eval.path"
            )
    else:
        rows = []
    return sorted(_unique(rows), key=lambda row: row.digest)


def _eval_digests(config: TaskSource, eval_path: str | None) -> set[str]:
    return set() if eval_path is None else {row.digest for row in _read_file(config, eval_path, limit=None)}


def _unique(rows: Iterable[Row]) -> list[Row]:
    return list({row.digest: row for row in reversed(list(rows))}.values())[::-1]


def _to_tasks(rows: Iterable[Row], config: TaskSource) -> list[Task]:
    tasks, seen = [], set()
    for index, row in enumerate(rows):
        task_id = row.digest[:16]
        if task_id in seen:
            task_id = f"{task_id}-{index}"
        seen.add(task_id)
        tasks.append(
            make_task(row, task_id=task_id, system_prompt=config.system_prompt, prompt_template=config.prompt_template)
        )
    return tasks
