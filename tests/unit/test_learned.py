"""A run that learns nothing says so: which cause, what to do, during the run, in summary.json and by its exit code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from leeway.config import load_config
from leeway.driver.learned import CLEAR_AFTER_STEPS, LearningWatch


def watch(*overrides: str, trains_on: str = "rollouts", loss: str = "policy", earlier: Any = ()) -> LearningWatch:
    settings = [f"stages.async_rl.{o}" for o in overrides]
    config = load_config("quickstart", settings, recipe="async_rl")
    return LearningWatch(config, Path("the/run"), trains_on=trains_on, loss_name=f"train/loss/{loss}", earlier=earlier)


def batch(reward: float = 0.5, *, std: float = 0.5, zero: float = 0.25, cut: float = 0.0, **more: float) -> Any:
    metrics = {
        "train/reward/mean": reward,
        "train/reward/std": std,
        "train/zero_advantage_frac": zero,
        "train/truncated_frac": cut,
        "train/grad_norm": 0.0 if zero == 1.0 else 1.0,
        "train/lr": 1e-4,
    }
    return metrics | {f"train/{name}": value for name, value in more.items()}


def test_a_long_run_costs_no_more_a_step_than_a_short_one() -> None:
    looked = 0

    class Counted(LearningWatch):
        def _no_rate(self) -> str | None:
            nonlocal looked
            looked += len(self._steps)
            return super()._no_rate()

    config = load_config("quickstart", [], recipe="async_rl")
    found = Counted(config, Path("the/run"))
    for _ in range(20_000):
        assert not found.step(batch(**{f"unread_{i}": 0.0 for i in range(9)}))
    assert looked < 400 * 20_000
    assert len(found._steps[-1]) == 6, "and keeps what it reads"
    assert found.verdict().learned


def equal(reward: float, **more: float) -> Any:
    return batch(reward, std=0.0, zero=1.0, **more)


@pytest.mark.parametrize(
    ("steps", "says", "and_says"),
    [
        ([equal(0.0)] * 6, "every reward was 0 in", "what env.reward expects"),
        ([equal(1.0)] * 6, "every reward was 1 in", "take harder ones"),
        ([equal(0.25)] * 6, "every reward was 0.25 in", "env.reward gives the same reward to each"),
        ([equal(0.0, cut=1.0)] * 6, "100% of the answers were cut off", "raise rollout.max_response_tokens (now 8)"),
        ([batch(i / 8, zero=1.0) for i in range(6)], "the answers to one task had equal rewards", "group_size"),
        ([batch(lr=0.0)] * 6, "the learning rate was 0 in all 6 steps", "optimizer.lr"),
        ([batch(grad_norm=0.0)] * 6, "the gradient was 0 in all 6 steps", "clipped or masked"),
        ([batch(grad_norm=math.nan)] * 6, "the gradient was nan or inf in all 6 steps", "lower optimizer.lr"),
    ],
)
def test_a_run_that_learns_nothing_says_why_once_and_what_to_do(steps: list[Any], says: str, and_says: str) -> None:
    watching = watch()
    said = [text for metrics in steps for text in watching.step(metrics)]
    verdict = watching.verdict()
    assert verdict.learned is False
    assert says in verdict.warnings[0]
    assert and_says in verdict.warnings[0]
    assert len(said) == len(verdict.warnings) == 1, "each once, and none in other words"
    assert says.split(" in")[0] in said[0]
    quiet = watch()
    assert not [t for m in steps[: CLEAR_AFTER_STEPS - 1] for t in quiet.step(m)], "before it is clear"
    assert quiet.verdict().learned is None


def test_answers_that_are_cut_off_are_named_where_some_rewards_differ() -> None:
    watching = watch()
    said = [text for _ in range(6) for text in watching.step(batch(0.1, cut=0.75))]
    assert said == ["75% of the answers were cut off; raise rollout.max_response_tokens (now 8)"]
    assert watching.verdict().learned is True


def test_a_run_that_learns_is_left_alone() -> None:
    watching = watch()
    steps = [*[equal(0.0)] * 4, *[batch(0.1 + i / 30) for i in range(16)]]
    assert [t for m in steps for t in watching.step(m)] == []
    assert watching.verdict().learned is True
    assert watching.verdict().warnings == []


def test_later_steps_of_a_batch_have_no_more_advantages_than_its_first() -> None:
    """The batch's own numbers are logged with its first step only; a gradient of rounding errors is none."""
    watching = watch()
    for _ in range(4):
        watching.step(equal(0.0) | {"train/grad_norm": 1e-9})
        watching.step({"train/grad_norm": 1e-9, "train/lr": 1e-4})
    assert watching.verdict().learned is False


def test_other_terms_of_the_loss_train_without_an_advantage_but_not_unremarked() -> None:
    watching = watch("algorithm.kl.coef=0.1")
    for _ in range(6):
        watching.step(equal(0.0) | {"train/grad_norm": 0.3})
    verdict = watching.verdict()
    assert verdict.learned is True
    assert "only the loss's other terms train" in verdict.warnings[0]


def test_where_no_reward_is_wanted_equal_ones_are_no_news() -> None:
    watching = watch("algorithm.name=on_policy_distill", "algorithm.reference_path=some/teacher")
    for _ in range(6):
        watching.step(equal(0.0) | {"train/grad_norm": 0.3})
    verdict = watching.verdict()
    assert verdict.learned is True
    assert verdict.warnings == []


def test_a_reward_that_fell_is_named_and_one_that_only_wavers_is_not() -> None:
    def verdict_of(rewards: list[float]) -> Any:
        watching = watch()
        for reward in rewards:
            watching.step(batch(reward))
        return watching.verdict()

    fell = verdict_of([0.6 + 0.02 * (i % 2) for i in range(10)] + [0.1 + 0.02 * (i % 2) for i in range(10)])
    assert fell.learned is True
    assert "the reward fell from 0.61 to 0.11" in fell.warnings[0]
    assert verdict_of([0.5 + 0.2 * (-1) ** i for i in range(20)]).warnings == []
    assert verdict_of([0.6] * 3 + [0.1] * 3).warnings == [], "too few to tell"


@pytest.mark.parametrize(
    ("recipe", "losses", "norm", "says"),
    [
        ("sft", [2.0] * 6, 1.0, "the loss was 2 in all 6 steps"),
        ("dpo", [math.log(2)] * 6, 1e-3, "the loss was 0.6931 in all 6 steps"),
        ("sft", [math.nan] * 6, math.nan, "the loss was nan or inf in all 6 steps"),
        ("sft", [2.0, 2.1, 1.9, 2.0, 2.2, 2.1], 0.0, "the gradient was 0 in all 6 steps"),
    ],
)
def test_so_does_one_that_trains_on_data(recipe: str, losses: list[float], norm: float, says: str) -> None:
    watching = watch(trains_on="pairs" if recipe == "dpo" else "answers", loss=recipe)
    for loss in losses:
        watching.step({f"train/loss/{recipe}": loss, "train/grad_norm": norm, "train/lr": 1e-3})
    assert watching.verdict().learned is False
    assert says in watching.verdict().warnings[0]


def test_a_loss_that_moves_is_learning() -> None:
    watching = watch(trains_on="answers", loss="sft")
    for i in range(8):
        watching.step({"train/loss/sft": 2.0 - i / 10, "train/grad_norm": 1.0, "train/lr": 1e-3})
    assert watching.verdict().learned is True
    assert watching.verdict().warnings == []


def test_what_was_read_from_an_earlier_part_counts_but_is_not_said_again() -> None:
    rows = [{"step": i + 1, "time": 0.0, "role": "trainer", **equal(0.0)} for i in range(6)]
    watching = watch(earlier=[*rows, {"step": 6, "role": "collector", "collector/pulls": 1.0}])
    assert watching.step(equal(0.0)) == []
    assert watching.verdict().learned is False
    watching.step(batch())
    assert watching.verdict().learned is True
