"""Reward functions, (task, completion text) -> number: built-in ones by name, or a user's "package.module:function"."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from ..config.names import REWARDS
from ..importing import check_call, import_named
from ..types import Task
from . import gym_answers
from .answers import boxed, countdown, exact_match, last_number, tagged
from .code_tests import code_tests
from .guarded import ScorerPool
from .jail import why_not
from .judges import question_of
from .math_compare import is_right

Reward = Callable[[Task, str], float]
AnyReward = Callable[..., float | Awaitable[float]]
"""(task, text) -> number, sync or async; a parameter named `completion` is given the Completion too."""

MAX_CHECKED_CHARS = 8000
"""How many characters at the end of a completion are searched for an answer, because searching takes time."""

_math_pool = ScorerPool()


def reasoning_gym(task: Task, text: str) -> float:
    """The score of the task's reasoning-gym dataset, 0.0 to 1.0; often partial for text that only contains the answer.

    Each answer is scored in a process of its own in a jail, see `gym_answers`.
    """
    if not {"source_dataset", "options", "entry"} <= task.info.keys():
        raise ValueError(
            f"env.reward: reasoning_gym cannot score task {task.task_id}; it needs tasks with task.name=reasoning_gym"
        )
    return gym_answers.score(task.info, text)


def math_verify(task: Task, text: str) -> float:
    """1.0 when the completion's answer ("\\boxed{...}", else what it ends with) equals the task's, or 0.0.

    An answer earns 0.0 if it is less evaluated than the task's (12*7+3 for 87), or repeats the question.
    See `math_answers` and `math_compare`. Formulas are computed in a process of their own, with 2 s of processor time.
    """
    return float(is_right(task.answer, text[-MAX_CHECKED_CHARS:], _math_pool.values, question_of(task)))


# `blocking` tells SingleTurn to call the function in a thread, because it may wait for another process.
math_verify.blocking = True  # type: ignore[attr-defined]
reasoning_gym.blocking = True  # type: ignore[attr-defined]

reasoning_gym.why_not = why_not  # type: ignore[attr-defined]

for _reward in (exact_match, math_verify, reasoning_gym, boxed, tagged, last_number, countdown, code_tests):
    _reward.says_right = True  # type: ignore[attr-defined]  # 1.0 is a right answer, see `scoring.says_right`
_NEEDS = {"math_verify": "math_verify", "reasoning_gym": "reasoning_gym"}


def resolve_reward(
    name: str,
    options: dict[str, Any] | None = None,
    *,
    key: str = "env.reward",
    models: Mapping[str, Any] | None = None,
) -> AnyReward:
    """The reward function of a name, with `options` as keyword arguments; one with a parameter `models` is given them.

    Raises ValueError in one line when it is unknown, cannot be imported, or does not take the options.
    """
    expected = "a function (task, text) -> float"
    package = _NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        package = package.replace("_", "-")
        raise ValueError(f"{key}: {name} needs the package {package}; pip install {package}")
    reward = import_named(name, REWARDS, key=key, expected=expected)
    if not callable(reward):
        raise ValueError(f"{key}: {name!r} is a {type(reward).__name__}; expected {expected}")
    if missing := getattr(reward, "why_not", lambda: None)():
        raise ValueError(f"{key}: {name}: {missing}")
    parameters = _parameters(reward)
    if "models" in parameters:
        options = {**(options or {}), "models": models or {}}
    given = {**(options or {}), **({"completion": None} if "completion" in parameters else {})}
    check_call(reward, name, "task", "text", options=given, key=key, expected=expected)
    return cast(AnyReward, functools.partial(reward, **options) if options else reward)


def takes_models(reward: AnyReward) -> bool:
    """Whether it is given other models, which may not be there yet."""
    return "models" in _parameters(reward.func if isinstance(reward, functools.partial) else reward)


def _parameters(reward: Any) -> Mapping[str, Any]:
    try:
        return inspect.signature(reward).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return {}
