"""Scoring a completion: one reward or a weighted sum of several, sync or async, each by name."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..types import Completion, Task
from .base import all_or_none, ended_by_own_code
from .rewards import AnyReward, resolve_reward


class NoNumber(RuntimeError):
    """What a reward gave is no finite number."""


@dataclass(frozen=True)
class Score:
    """`metrics` names the parts of a sum: {"rewards/<name>": value before its weight}, none for a single reward.

    {"exact_match": 1.0 or 0.0} is there where a reward says which answers are right, see `says_right`.
    """

    reward: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class WeightedSum:
    """Several rewards as one: sum of weight x value. `functions` and `weights` have the same names.

    Callable as an async reward (task, text); `score` gives the parts too.
    """

    functions: Mapping[str, AnyReward]
    weights: Mapping[str, float]

    async def __call__(self, task: Task, text: str, completion: Completion | None = None) -> float:
        return (await score(self, task, text, completion)).reward

    def of(self, values: Sequence[float]) -> Score:
        """`values`: of its functions, in order."""
        named = dict(zip(self.functions, values, strict=True))
        metrics = {f"rewards/{short_name(name)}": value for name, value in named.items()}
        metrics |= _exact_match(self.functions.values(), values)
        return Score(sum(self.weights[name] * value for name, value in named.items()), metrics)


async def score(reward: AnyReward | WeightedSum, task: Task, text: str, completion: Completion | None = None) -> Score:
    """What `reward` pays for `text`. Runs blocking functions in a thread and awaits async ones.

    A function with a parameter `completion` is given it (its tokens, its finish_reason). Raises RuntimeError naming the
    function and the task when it raises or returns no finite number.
    """
    [alone] = await _scores(reward, task, [(text, completion)])
    return alone


async def score_each(reward: AnyReward | WeightedSum, task: Task, completions: Sequence[Completion]) -> list[Score]:
    """`score` of each of these. Those that have to be waited for are waited for together; the first that fails ends
    the others.
    """
    return await _scores(reward, task, [(c.text, c) for c in completions])


async def _scores(
    reward: AnyReward | WeightedSum, task: Task, answers: Sequence[tuple[str, Completion | None]]
) -> list[Score]:
    functions = list(reward.functions.values()) if isinstance(reward, WeightedSum) else [reward]
    asked = [(function, task, text, completion) for text, completion in answers for function in functions]
    just_answer = [_just_answers(function, task) for function in functions]
    # Most functions do: a task of its own for each would cost more than they do.
    given: list[Any] = []
    try:
        for i, call in enumerate(asked):
            given.append(_at_once(*call) if just_answer[i % len(functions)] else None)
    except BaseException:
        for value in given:
            _drop(value)
        raise
    waiting = [_late(call, value) for call, value in zip(asked, given, strict=True) if not isinstance(value, float)]
    if waiting:
        late = iter(await all_or_none(waiting))
        given = [value if isinstance(value, float) else next(late) for value in given]
    rows = [given[i : i + len(functions)] for i in range(0, len(given), len(functions))]
    if isinstance(reward, WeightedSum):
        return [reward.of(row) for row in rows]
    can_tell = says_right(reward)
    return [Score(value, {"exact_match": float(value >= 1.0)} if can_tell else {}) for [value] in rows]


def says_right(reward: AnyReward | WeightedSum) -> bool:
    """Whether the reward, or one of a sum, is 1.0 for a right answer and less for any other.

    A function says so by an attribute `says_right = True`, as the built-in ones do that look for the task's answer.
    """
    functions = reward.functions.values() if isinstance(reward, WeightedSum) else [reward]
    return any(getattr(_function(function), "says_right", False) for function in functions)


def build_reward(env_config: Any, models: Mapping[str, Any] | None = None) -> AnyReward | WeightedSum:
    """The reward of the `env` section: `reward`, or `rewards` with weights. Raises ValueError in one line."""
    options = env_config.reward_options
    if env_config.rewards:
        functions = {n: resolve_reward(n, options.get(n), key="env.rewards", models=models) for n in env_config.rewards}
        return WeightedSum(functions, dict(env_config.rewards))
    return resolve_reward(env_config.reward, options.get(env_config.reward), models=models)


def short_name(name: str) -> str:
    """The part of a reward's name that metrics show: the function of "pkg.mod:function"."""
    return name.rpartition(":")[2]


def _just_answers(reward: AnyReward, task: Task) -> bool:
    """It is neither async, nor does it take long."""
    with _named(reward, task):
        return not (_is_async(reward) or _is_blocking(reward, task))


def _at_once(reward: AnyReward, task: Task, text: str, completion: Completion | None) -> Any:
    """The number that a function gives which just answers; what it gave, if that has to be awaited after all."""
    with _named(reward, task):
        value = reward(task, text, **_more(reward, completion))
    return value if inspect.isawaitable(value) else _number(value, reward, task)


def _drop(given: Any) -> None:
    """End what a function gave and nobody will await."""
    if inspect.iscoroutine(given):
        given.close()
    elif isinstance(given, asyncio.Future):
        given.cancel()


async def _late(call: tuple[AnyReward, Task, str, Completion | None], given: Any) -> float:
    reward, task, text, completion = call
    with _named(reward, task):
        if given is None and _is_blocking(reward, task):
            given = await asyncio.to_thread(reward, task, text, **_more(reward, completion))
        elif given is None:
            given = reward(task, text, **_more(reward, completion))
        if inspect.isawaitable(given):
            given = await given
    return _number(given, reward, task)


@contextmanager
def _named(reward: AnyReward, task: Task) -> Iterator[None]:
    """Whatever the function raises, as a RuntimeError that names it."""
    try:
        yield
    except BaseException as error:
        if not ended_by_own_code(error):
            raise
        said = f"reward {_name(reward)} failed on task {task.task_id}: {type(error).__name__}: {error}"
        raise RuntimeError(said) from error


def _number(value: Any, reward: AnyReward, task: Task) -> float:
    try:
        number = float(value)
    except Exception:  # of whatever it is
        number = math.nan
    if not math.isfinite(number):
        raise NoNumber(f"reward {_name(reward)} gave {value!r:.60} on task {task.task_id}; expected a finite number")
    return number


def _name(reward: AnyReward) -> str:
    return getattr(_function(reward), "__name__", type(reward).__name__)


def _more(reward: AnyReward, completion: Completion | None) -> dict[str, Any]:
    return {"completion": completion} if _takes_completion(reward) else {}


def _exact_match(rewards: Iterable[AnyReward], values: Iterable[float]) -> dict[str, float]:
    """Whether any reward that can tell says that the answer is right."""
    right = [value >= 1.0 for reward, value in zip(rewards, values, strict=True) if says_right(reward)]
    return {"exact_match": float(any(right))} if right else {}


def _function(reward: Any) -> Any:
    return reward.func if isinstance(reward, functools.partial) else reward


@functools.lru_cache(maxsize=64)
def _takes_completion(reward: AnyReward) -> bool:
    return "completion" in inspect.signature(reward).parameters


@functools.lru_cache(maxsize=64)
def _is_async(reward: AnyReward) -> bool:
    function = _function(reward)
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


def _is_blocking(reward: AnyReward, task: Task) -> bool:
    blocking = getattr(_function(reward), "blocking", False)
    return bool(blocking(task) if callable(blocking) else blocking)
