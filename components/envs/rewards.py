"""Reward functions, (task, completion text) -> number: built-in ones by name, or a user's "package.module:function"."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from typing import cast

from ..types import Task
from .guarded import ScorerPool
from .importing import import_user_object, is_user_name
from .scorer_process import parses_text, score_entry

Reward = Callable[[Task, str], float]
AnyReward = Callable[[Task, str], float | Awaitable[float]]

MAX_CHECKED_CHARS = 8000
"""So many last characters of a completion are searched for an answer: it stands at the end, and search takes time."""

_math_pool = ScorerPool("math_verify")
_reasoning_gym_pool = ScorerPool("reasoning_gym")


def exact_match(task: Task, text: str) -> float:
    """1.0 when the text equals the task's answer, apart from white space at the ends and its amount in between.

    Where the task's answers stand after a mark ("#### 72", `task.answer_after`), so does the text's, if it has that
    mark.
    """
    mark = task.info.get("answer_after")
    if mark and mark in text:
        text = text.rpartition(mark)[2]
    return float(" ".join(text.split()) == " ".join(task.answer.split()))


def reasoning_gym(task: Task, text: str) -> float:
    """What the task's reasoning-gym dataset pays, 0.0 to 1.0; often in part for text that merely holds the answer."""
    if "source_dataset" not in task.info:
        raise ValueError(
            f"env.reward: reasoning_gym cannot score task {task.task_id}; it needs tasks with task.name=reasoning_gym"
        )
    text = text.strip()
    if _parses_text(task):
        return _reasoning_gym_pool.score(task.info, text[-MAX_CHECKED_CHARS:])
    return score_entry(task.info, text)


def math_verify(task: Task, text: str) -> float:
    """1.0 when math-verify finds the task's answer in the text ("\\boxed{...}", else the last expression), or 0.0.

    Runs in a process of its own with a deadline of 5 s; what cannot be parsed, crashes or takes longer earns 0.0.
    """
    return _math_pool.score(task.answer, text[-MAX_CHECKED_CHARS:])


def _parses_text(task: Task) -> bool:
    return "source_dataset" in task.info and parses_text(
        task.info["source_dataset"], json.dumps(task.info["options"], sort_keys=True)
    )


# `blocking` tells SingleTurn to call the function in a thread, because it may wait for another process.
math_verify.blocking = True  # type: ignore[attr-defined]
reasoning_gym.blocking = _parses_text  # type: ignore[attr-defined]

REWARDS: dict[str, Reward] = {"exact_match": exact_match, "reasoning_gym": reasoning_gym, "math_verify": math_verify}
_NEEDS = {"math_verify": "math_verify", "reasoning_gym": "reasoning_gym"}


def resolve_reward(name: str) -> AnyReward:
    """The reward function of a name. Raises ValueError in one line when it is unknown or cannot be imported."""
    if is_user_name(name):
        reward = import_user_object(name, key="env.reward", expected="a function (task, text) -> float")
        if not callable(reward):
            raise ValueError(
                f"env.reward: {name!r} is a {type(reward).__name__}; expected a function (task, text) -> float"
            )
        return cast(AnyReward, reward)
    if name not in REWARDS:
        near = get_close_matches(name, REWARDS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"env.reward: got {name!r}, expected {near!r}, another of {sorted(REWARDS)}, or 'package.module:function'"
        )
    package = _NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"env.reward: {name} needs the package {package.replace('_', '-')}; pip install {package.replace('_', '-')}"
        )
    return REWARDS[name]
