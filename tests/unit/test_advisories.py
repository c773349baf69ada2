"""What the page advises: each advisory with metrics that raise it, and with the nearest ones that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from leeway.watch.advisories import FEW, RECENT, advisories

Metrics = Mapping[str, Sequence[float]]
STEPS = 3 * RECENT


class Planted:
    """Curves of these values, one at each step from 1 on."""

    def __init__(self, metrics: Metrics, slow_tasks: Sequence[tuple[str, float]] = ()) -> None:
        self._metrics, self._slow_tasks = metrics, list(slow_tasks)

    @property
    def names(self) -> list[str]:
        return list(self._metrics)

    def series(self, name: str) -> tuple[Any, Any]:
        values = np.array(self._metrics[name], dtype=float)
        return np.arange(1, len(values) + 1), values

    def last_values(self, name: str, num: int) -> Any:
        return self.series(name)[1][-num:]

    def slow_tasks(self) -> list[tuple[str, float]]:
        return self._slow_tasks


def raised(metrics: Metrics, **settings: Any) -> list[dict[str, Any]]:
    curves = Planted(metrics, [("task-7", 900.0)])
    return advisories(curves, {name.replace("__", "."): value for name, value in settings.items()})


def flat(value: float, steps: int = STEPS) -> list[float]:
    return [value] * steps


def rising(first: float, last: float, steps: int = STEPS) -> list[float]:
    return np.linspace(first, last, steps).tolist()


def then(first: float, last: float) -> list[float]:
    """`first` for the first half, `last` for the second."""
    return [*flat(first, STEPS // 2), *flat(last, STEPS // 2)]


E, Z, REWARD, RIGHT = (
    "train/entropy/mean",
    "train/zero_advantage_frac",
    "train/reward/mean",
    "train/accuracy/exact_match",
)
OUTSIDE, TOKENS = "train/environment_s", "train/response_tokens"
RAISED: list[tuple[str, str, Metrics, dict[str, Any]]] = [
    ("Steps were skipped", "bad", {"train/skipped_steps": rising(0, 3)}, {}),
    ("The reward rises, the accuracy does not", "bad", {REWARD: rising(0.1, 0.8), RIGHT: flat(0.4)}, {}),
    ("The reward rises, the accuracy does not", "bad", {REWARD: rising(0.1, 0.8), RIGHT: rising(0.6, 0.2)}, {}),
    ("The reward rises, the accuracy does not", "bad", {REWARD: rising(0, 1), "eval/exact_match": [0.3, 0.3]}, {}),
    (
        "Full scores look as if paid without a solution",
        "bad",
        {"reward_hacking/full": flat(50), "reward_hacking/suspects": flat(4)},
        {},
    ),
    (
        "Full scores look as if paid without a solution",
        "bad",
        {"reward_hacking/full": flat(50), "reward_hacking/suspects": flat(1)},
        {"monitor__suspects_warn_frac": 0.01},
    ),
    ("Entropy has collapsed", "bad", {E: then(2.0, 0.1)}, {}),
    ("Entropy grows without end", "bad", {E: then(0.6, 1.5)}, {}),
    ("Most groups teach nothing", "look", {Z: flat(0.85), REWARD: flat(0.9)}, {}),
    ("Most groups teach nothing", "bad", {Z: flat(0.98)}, {}),
    ("Answers are cut off", "look", {"train/truncated_frac": flat(0.2)}, {"rollout__max_response_tokens": 64}),
    ("Answers are cut off", "bad", {"train/truncated_frac": flat(0.6)}, {}),
    ("Much of each batch is clipped", "look", {"train/ratio/clipped_frac": flat(0.3)}, {}),
    ("Every token is as old as allowed", "look", {"train/policy_lag/min": flat(4)}, {"staleness__max_policy_lag": 4}),
    ("The gap grows", "look", {"train/logprob_gap/mean": then(1e-4, 2e-3)}, {}),
    ("The gap grows", "look", {"param_server/served_gap/max": then(0.0, 1e-3)}, {}),
    ("One slow task holds up each batch", "look", {f"{OUTSIDE}/max": flat(6), f"{OUTSIDE}/mean": flat(1)}, {}),
    ("A few answers are far longer", "look", {f"{TOKENS}/max": flat(900), f"{TOKENS}/mean": flat(100)}, {}),
    ("The engines are idle half of the time", "look", {"collector/generate_frac": flat(0.4)}, {}),
    ("Generators were replaced", "look", {"collector/restarts": [1.0, 2.0]}, {}),
]
NOT_RAISED: list[tuple[str, Metrics, dict[str, Any]]] = [
    ("no step was skipped", {"train/skipped_steps": flat(0)}, {}),
    ("the accuracy rises with the reward", {REWARD: rising(0.1, 0.8), RIGHT: rising(0.1, 0.3)}, {}),
    ("the reward does not rise", {REWARD: flat(0.5), RIGHT: flat(0.5)}, {}),
    ("nothing says which answers are right", {REWARD: rising(0.1, 0.8)}, {}),
    ("held out once only", {REWARD: rising(0.1, 0.8), "eval/exact_match": [0.3]}, {}),
    ("few suspects", {"reward_hacking/full": flat(100), "reward_hacking/suspects": flat(1)}, {}),
    ("no full score", {"reward_hacking/full": flat(0), "reward_hacking/suspects": flat(0)}, {}),
    ("an entropy that falls by half", {E: then(2.0, 1.0)}, {}),
    ("an entropy that was always low", {E: then(0.05, 0.04)}, {}),
    ("an entropy that grows and stays small", {E: then(0.2, 0.5)}, {}),
    ("some groups without an advantage", {Z: flat(0.5)}, {}),
    ("few answers are cut", {"train/truncated_frac": flat(0.05)}, {}),
    ("little is clipped", {"train/ratio/clipped_frac": flat(0.1)}, {}),
    ("a lag below its bound", {"train/policy_lag/min": flat(1)}, {"staleness__max_policy_lag": 4}),
    ("a lag of 0 at a bound of 0", {"train/policy_lag/min": flat(0)}, {"staleness__max_policy_lag": 0}),
    ("a gap that stays", {"train/logprob_gap/mean": then(1e-3, 2e-3)}, {}),
    ("a gap within rounding", {"train/logprob_gap/mean": then(1e-8, 5e-6)}, {}),
    ("all tasks are slow", {f"{OUTSIDE}/max": flat(6), f"{OUTSIDE}/mean": flat(4)}, {}),
    ("the slowest task takes no time", {f"{OUTSIDE}/max": flat(0.5), f"{OUTSIDE}/mean": flat(0.01)}, {}),
    ("answers of similar length", {f"{TOKENS}/max": flat(300), f"{TOKENS}/mean": flat(100)}, {}),
    ("engines that generate", {"collector/generate_frac": flat(0.8)}, {}),
    ("nothing was logged", {}, {}),
]


@pytest.mark.parametrize(("title", "level", "metrics", "settings"), RAISED)
def test_it_is_raised(title: str, level: str, metrics: Metrics, settings: dict[str, Any]) -> None:
    (found,) = raised(metrics, **settings)
    assert (found["title"], found["level"]) == (title, level)
    assert found["do"]
    assert (
        found["metric"] in metrics or found["metric"] == "train/policy_lag/mean" or "reward_hacking" in found["metric"]
    )


@pytest.mark.parametrize(("metrics", "settings"), [own[1:] for own in NOT_RAISED], ids=[own[0] for own in NOT_RAISED])
def test_it_is_not_raised(metrics: Metrics, settings: dict[str, Any]) -> None:
    assert raised(metrics, **settings) == []


def test_the_texts_say_the_numbers_and_the_setting() -> None:
    (cut,) = raised({"train/truncated_frac": flat(0.2)}, rollout__max_response_tokens=64)
    assert cut["text"].startswith("20% of the answers reach the token limit")
    assert cut["do"] == "Raise rollout.max_response_tokens (now 64)."
    (long,) = raised({f"{TOKENS}/max": flat(900), f"{TOKENS}/mean": flat(100)})
    assert "900 tokens, the mean one 100" in long["text"]
    assert "task-7" in long["text"]


@pytest.mark.parametrize("steps", [1, FEW - 1])
def test_a_run_that_has_just_begun_is_left_alone(steps: int) -> None:
    metrics = {Z: flat(1.0, steps), E: rising(3, 0.01, steps), "train/truncated_frac": flat(1.0, steps)}
    assert raised(metrics) == []


def test_bad_ones_come_first() -> None:
    found = raised({"collector/generate_frac": flat(0.1), "train/skipped_steps": flat(2), Z: flat(0.85)})
    assert [own["level"] for own in found] == ["bad", "look", "look"]
