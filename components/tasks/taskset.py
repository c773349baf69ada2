"""A finite list of tasks in a reproducible order whose position can be saved and restored exactly."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from ..types import Task
from .jsonl_tasks import read_jsonl
from .questions import Row, is_held_out, make_task
from .reasoning_gym_tasks import generate_rows


class TaskSet:
    """Iterates tasks epoch after epoch; each epoch has its own order, decided by (seed, epoch) alone.

    `iter()` yields what is left of the current epoch and then ends; the next `iter()` starts the next epoch. An
    iterator that was left half-way is continued, never restarted, so no task is drawn twice in an epoch. `forever()`
    never ends.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool, name: str = "tasks") -> None:
        self.name = name
        self.tasks = tuple(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        epoch = self._epoch
        while self._epoch == epoch and self._position < len(self.tasks):
            task = self.tasks[self._order[self._position]]
            self._advance()
            yield task

    def forever(self) -> Iterator[Task]:
        """All tasks, epoch after epoch, without end."""
        if not self.tasks:
            raise ValueError(f"taskset {self.name}: got no tasks, expected at least one; check the task section")
        while True:
            yield from self

    def texts(self) -> Iterator[str]:
        """Every text of the taskset (prompts, answers, solutions): what a tokenizer must be able to write."""
        for task in self.tasks:
            if isinstance(task.prompt, str):
                yield task.prompt
            else:
                yield from (message["content"] for message in task.prompt)
            yield task.answer
            if "solution" in task.info:
                yield str(task.info["solution"])
            yield from (message["content"] for message in task.info.get("messages", ()))

    @property
    def epoch(self) -> int:
        """The epoch that the next task belongs to, counted from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The exact position, as JSON-able data."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was called; refuses a state of other tasks or of another order."""
        for key, own in (("fingerprint", self.fingerprint()), ("seed", self._seed)):
            if state[key] != own:
                raise ValueError(
                    f"taskset {self.name}: saved position has {key} {state[key]}, these tasks have {own}; "
                    "resume with the task section and the seed of the saved run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def fingerprint(self) -> str:
        """16 hex digits that change whenever a task, their order in the source or shuffling changes."""
        content = "\n".join([str(self._shuffle), *(task.task_id for task in self.tasks)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _advance(self) -> None:
        # The epoch turns over with its last task, so that a state saved there already names the next epoch.
        self._position += 1
        if self._position == len(self.tasks):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.tasks)))
        if self._shuffle:
            # A text seed keeps (seed 0, epoch 1) and (seed 1, epoch 0) apart; Python hashes it the same everywhere.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def build_taskset(task_config: Any, *, seed: int, split: Literal["train", "eval"], eval_config: Any = None) -> TaskSet:
    """The tasks of one split, as the `task` and `eval` sections describe them.

    train: every question that is not held out (by hash, or by standing in `eval.path`); repeated procedural questions
    once. eval: the held-out questions (or the rows of `eval.path`), each once, the first `eval.num_tasks` in hash
    order, unshuffled; empty when nothing is held out. Raises ValueError or FileNotFoundError in one line.
    """
    template = task_config.prompt_template
    if template is not None and "{prompt}" not in template:
        raise ValueError(f'task.prompt_template: got {template!r}, expected text with "{{prompt}}" in it')
    eval_path = getattr(eval_config, "path", None)
    if split == "eval":
        num_tasks = getattr(eval_config, "num_tasks", None)
        rows = _eval_rows(task_config, seed, eval_path)[:num_tasks]
        return TaskSet(_to_tasks(rows, task_config), seed=seed, shuffle=False, name="held_out")

    own = _eval_digests(task_config, eval_path)
    rows = [
        r
        for r in _read_rows(task_config, seed)
        if not is_held_out(r.digest, task_config.holdout_frac) and r.digest not in own
    ]
    if task_config.name == "reasoning_gym":
        rows = _unique(rows)
    if not rows:
        raise ValueError(
            f"task: no training task is left with holdout_frac={task_config.holdout_frac} and eval.path={eval_path}; "
            "hold out less"
        )
    return TaskSet(_to_tasks(rows, task_config), seed=seed, shuffle=task_config.shuffle, name="train")


def _read_rows(config: Any, seed: int) -> list[Row]:
    if config.name == "reasoning_gym":
        size = config.size if config.limit is None else min(config.size, config.limit)
        return generate_rows(config.dataset, options=dict(config.options), size=size, seed=seed)
    if config.name == "jsonl":
        return _read_file(config, config.path, limit=config.limit)
    raise ValueError(f"task.name: got {config.name!r}, expected 'jsonl' or 'reasoning_gym'")


def _read_file(config: Any, path: str | None, *, limit: int | None) -> list[Row]:
    if path is None:
        raise ValueError(
            "task.path: got null, expected a .jsonl file, because task.name is 'jsonl'; set task.path=FILE"
        )
    return read_jsonl(
        path,
        prompt_key=config.prompt_key,
        answer_key=config.answer_key,
        answer_after=config.answer_after,
        messages_key=config.messages_key,
        limit=limit,
    )


def _eval_rows(config: Any, seed: int, eval_path: str | None) -> list[Row]:
    if eval_path is not None:
        rows = _read_file(config, eval_path, limit=None)
    elif config.holdout_frac > 0:
        rows = [row for row in _read_rows(config, seed) if is_held_out(row.digest, config.holdout_frac)]
        if not rows:
            raise ValueError(
                f"task.holdout_frac: {config.holdout_frac} holds out none of the questions; raise it, or set eval.path"
            )
    else:
        rows = []
    return sorted(_unique(rows), key=lambda row: row.digest)


def _eval_digests(config: Any, eval_path: str | None) -> set[str]:
    return set() if eval_path is None else {row.digest for row in _read_file(config, eval_path, limit=None)}


def _unique(rows: Iterable[Row]) -> list[Row]:
    return list({row.digest: row for row in reversed(list(rows))}.values())[::-1]


def _to_tasks(rows: Iterable[Row], config: Any) -> list[Task]:
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
