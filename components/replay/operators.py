"""Operators are applied to a finished group before it may be trained on, in order, with a count per operator.

An operator is a function of a group and its options. It returns the group (changed or not), None for "unchanged", or a
text: the reason why the group is left out. Or it is a class, made once with its options and called with each group: for
what takes long to load.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.names import OPERATORS
from ..group import Group
from ..importing import check_call, import_named

Operator = Callable[[Group], Group | str | None]


def filter_zero_variance(group: Group) -> str | None:
    """Leave out groups whose rewards are all equal: they teach nothing if rewards are compared within a group."""
    return "equal rewards" if len(set(group.rewards)) == 1 else None


def filter_reward(group: Group, *, min: float = float("-inf"), max: float = float("inf")) -> str | None:
    """Leave out groups whose mean reward is outside of `min` .. `max` (both included): too hard, or too easy."""
    mean = sum(group.rewards) / len(group)
    return None if min <= mean <= max else "mean reward out of range"


def mask_truncated(group: Group, *, reasons: Sequence[str] = ("length",)) -> Group | str | None:
    """Do not train on trajectories that ended for one of `reasons`; their rewards still count in the group's baseline.

    DAPO's overlong filtering (Yu et al. 2025, section 3.4). A group with only such trajectories is left out.
    """
    cut = [reason in reasons for reason in group.finish_reasons]
    if all(cut):
        return "all truncated"
    return group.masked(cut) if any(cut) else None


def shape_reward(
    group: Group,
    *,
    scale: float = 1.0,
    offset: float = 0.0,
    min: float = float("-inf"),
    max: float = float("inf"),
) -> Group:
    """reward <- scale x reward + offset, clamped between `min` and `max`; the greedy completion's reward too."""

    def shaped(reward: float) -> float:
        return _between(scale * reward + offset, min, max)

    greedy = None if group.greedy_reward is None else shaped(group.greedy_reward)
    return replace(group, rewards=[shaped(r) for r in group.rewards], greedy_reward=greedy)


def prefer_short(group: Group, *, weight: float = 0.1, right: float = 1.0) -> Group | None:
    """Add weight x (0.5 - (tokens - fewest) / (most - fewest)) to the reward; an answer with a reward below `right`
    only gets the negative part.

    The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3). Tokens are those that the policy sampled.
    """
    lengths = sorted(group.sampled_counts())
    fewest, most = lengths[0], lengths[-1]
    if fewest == most:
        return None
    rewards = []
    for reward, tokens in zip(group.rewards, group.sampled_counts(), strict=True):
        bonus = 0.5 - (tokens - fewest) / (most - fewest)
        bonus = bonus if reward >= right or bonus < 0 else 0.0
        rewards.append(reward + weight * bonus)
    return replace(group, rewards=rewards)


def dedupe(group: Group) -> Group | str | None:
    """Keep one trajectory of those with the same tokens; leave out a group with a single distinct answer."""
    first: dict[bytes, int] = {}
    for index, key in enumerate(group.response_keys()):
        first.setdefault(key, index)
    if len(first) == 1:
        return "one answer only"
    return group.selected(list(first.values())) if len(first) < len(group) else None


class OperatorFailed(RuntimeError):
    """An operator raised, hung, or took its process with it: it would do the same with other groups."""


@dataclass(frozen=True)
class Applied:
    """What operators made of a group: the group, or why it is left out. `changed`, `filtered_by`: their short names."""

    result: Group | str
    changed: tuple[str, ...] = ()
    filtered_by: str = ""


class Counts:
    """How many groups each operator changed and left out."""

    def __init__(self, steps: Sequence[str | dict[str, Any]]) -> None:
        names = [_short(name) for name, _ in named(steps)]
        self._filtered: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._changed: Counter[str] = Counter(dict.fromkeys(names, 0))

    def add(self, applied: Applied) -> None:
        self._changed.update(applied.changed)
        if applied.filtered_by:
            self._filtered[applied.filtered_by] += 1

    def metrics(self) -> dict[str, float]:
        """Counts so far: {"replay/filtered_by/<operator>", "replay/changed_by/<operator>"}."""
        return {
            **{f"replay/filtered_by/{name}": float(count) for name, count in self._filtered.items()},
            **{f"replay/changed_by/{name}": float(count) for name, count in self._changed.items()},
        }


class Pipeline:
    """Operators in sequence, as one operator that counts what each did.

    `steps`: names, or {name: options}. Raises a one-line ValueError for unknown operators and for wrong options.
    """

    def __init__(self, steps: Sequence[str | dict[str, Any]]) -> None:
        self._operators = [(name, _made(name, options)) for name, options in named(steps)]
        self._counts = Counts(steps)

    def __call__(self, group: Group) -> Group | str:
        applied = self.apply(group)
        self._counts.add(applied)
        return applied.result

    def apply(self, group: Group, *, begins: Callable[[str], None] = lambda name: None) -> Applied:
        """Not counted. `begins` is told each operator's name before it is called.

        Raises `OperatorFailed` if one raises, and TypeError if one returns something else than a group or a text.
        """
        changed = []
        for name, operator in self._operators:
            begins(name)
            try:
                returned = operator(group)
            except Exception as error:
                said = " ".join(str(error).split())
                raise OperatorFailed(
                    f"operator {name} failed on group {group.group_id} of task {group.task_id}: "
                    f"{type(error).__name__}: {said}"
                ) from error
            result = _checked(returned, group, name)
            if isinstance(result, str):
                return Applied(result, tuple(changed), _short(name))
            if result is not group and result != group:
                changed.append(_short(name))
                group = result
        return Applied(group, tuple(changed))

    def counts(self) -> dict[str, float]:
        """See `Counts.metrics`."""
        return self._counts.metrics()


def named(steps: Sequence[str | dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(name, options) of each."""
    pairs = [(s, {}) if isinstance(s, str) else next(iter(s.items())) for s in steps]
    return [(name, options or {}) for name, options in pairs]


def check_operators(steps: Sequence[str | dict[str, Any]]) -> None:
    """Raises a one-line ValueError as `Pipeline` does, as far as can be told before anything is loaded: of a class, its
    `check(**options)` is asked, if it has one.
    """
    for name, options in named(steps):
        operator = _imported(name, options)
        if operator in (filter_reward, shape_reward):
            _check_range(name, options.get("min", float("-inf")), options.get("max", float("inf")))
        if inspect.isclass(operator) and (check := getattr(operator, "check", None)) is not None:
            check(**options)


def _check_range(name: str, least: Any, most: Any) -> None:
    for option, value in (("min", least), ("max", most)):
        if not isinstance(value, int | float):
            raise ValueError(f"replay.operators: {name}: got {option} {value!r}, expected a number; change it")
    if least > most:
        raise ValueError(
            f"replay.operators: {name}: got min {least:g} and max {most:g}, expected a min of at most the max; "
            "swap them"
        )


def _made(name: str, options: dict[str, Any]) -> Operator:
    operator = _imported(name, options)
    if inspect.isclass(operator):
        made: Any = operator(**options)
        return made
    return functools.partial(operator, **options)


def _imported(name: str, options: dict[str, Any]) -> Any:
    key = "replay.operators"
    expected = "a function (group) -> group, None, or a text that says why it is left out; or a class of such"
    operator = import_named(name, OPERATORS, key=key, expected=expected)
    arguments = () if inspect.isclass(operator) else ("group",)
    check_call(operator, name, *arguments, options=options, key=key, expected=expected)
    return operator


def _checked(result: Any, group: Group, name: str) -> Group | str:
    if result is None:
        return group
    if isinstance(result, str) and result:
        return result
    if not isinstance(result, Group) or result.group_id != group.group_id or result.task_id != group.task_id:
        raise TypeError(
            f"operator {name} returned {result!r:.80}; expected the group, None, or a text (why it is left out)"
        )
    if not all(map(math.isfinite, result.rewards)):
        raise TypeError(f"operator {name} returned rewards {result.rewards!r:.80}; expected finite numbers")
    if not result.samples["loss_mask"].any():
        return "nothing left to train on"
    return result


def _short(name: str) -> str:
    return name.rpartition(":")[2]


def _between(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value
