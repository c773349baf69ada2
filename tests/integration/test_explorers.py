"""A train job and explorers with a folder in common, and nothing else; they come in any order and may be killed."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from .conftest import DIGITS_LAST, Started

SMALL = ["stages.async_rl.train.steps=8", "stages.async_rl.train.groups_per_step=16", "rollout.engine.name=hf"]


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    index = run / "meeting/groups/index.sqlite"
    if not index.exists():
        return []
    with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as connection:
        has_begun = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'groups'").fetchall()
        return connection.execute(query).fetchall() if has_begun else []


def wait_for_groups(train: Started, explorer: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not rows(train.run_dir, f"SELECT row FROM groups WHERE explorer = '{explorer}'"):
        assert train.process.poll() is None, train.output()
        assert time.monotonic() < deadline, f"{explorer} delivered nothing in {timeout_s:g} s:\n{train.output()}"
        time.sleep(0.1)


@pytest.mark.slow
def test_explorers_that_come_before_the_train_job_die_under_it_or_differ_from_it_cost_no_group(
    start: Any, of_sums: list[str], from_untrained: list[str]
) -> None:
    settings = [*SMALL, *of_sums, *from_untrained, *DIGITS_LAST, "explorer.silent_s=6"]
    first = start("explore", *settings, "explorer.name=first")
    first.wait_for("waits for a train job", 600)
    train = start("train", *settings)
    wait_for_groups(train, "first", 600)
    first.kill()
    other = start("explore", *settings, "explorer.name=other", "rollout.temperature=0.5").wait(600)
    assert other.code == 2, other.output
    assert "rollout.temperature: got 0.5, expected 1.0 as in the train job" in other.last_line()
    own = start("explore", *settings, "explorer.name=second", "explorer.tasks=own", "seed=5")
    run = train.wait(900)
    assert run.code == 0, run.output
    assert "explorer first is gone" in run.output
    last = own.wait(600)
    assert last.code == 0, last.output
    assert max(run.series("train/policy_lag/max")) <= 2
    trained = rows(run.dir, "SELECT group_id, source, draw, explorer FROM groups WHERE state = 'trained'")
    assert len(trained) == 8 * 16
    assert len({group_id for group_id, *_ in trained}) == len(trained), "a group was trained on twice"
    draws = [(source, draw) for _, source, draw, _ in trained if source]
    assert draws, "nothing of the second one's own tasks"
    assert len(set(draws)) == len(draws), "a task of its own was trained on twice"
    assert {explorer for *_, explorer in trained} == {"first", "second"}
    assert not [*first.left_over(60), *own.left_over(60), *train.left_over(60)]


@pytest.mark.slow
def test_a_train_job_has_its_versions_evaluated_by_explorers_as_an_evaluation_of_its_weights_says(
    start: Any, of_sums: list[str], from_untrained: list[str]
) -> None:
    """Before, in the middle and after; what explorers say of the last version is what its saved weights do."""
    sampled = ["eval.num_tasks=60", "eval.temperature=1"]
    settings = [*of_sums, *from_untrained, *DIGITS_LAST, "rollout.engine.name=hf", *sampled]
    steps = ["stages.async_rl.train.steps=4", "stages.async_rl.train.groups_per_step=8", "eval.every=2"]
    train = start("train", *settings, *steps)
    explorers = [start("explore", *settings, *steps, f"explorer.name={name}") for name in "ab"]
    run = train.wait(600)
    assert run.code == 0, run.output
    assert [explorer.wait(300).code for explorer in explorers] == [0, 0]
    evaluations = [row for row in run.metrics() if row["role"] == "evaluation"]
    assert [row["eval/held_out/policy_version"] for row in evaluations] == [0, 2, 4]
    numbers = [(row["eval/held_out/reward"], row["eval/held_out/response_tokens_mean"]) for row in evaluations]
    assert len({*numbers}) > 1, "the same for all versions says little"
    before, after = run.summary["stages"]["async_rl"]["eval"].values()
    assert (before["policy_version"], after["policy_version"]) == (0, 4)
    weights = next((run.dir / "stages/async_rl/checkpoints").glob("step-*/hf"))
    shared = [s for s in settings if not s.startswith(("model.path", "stages."))]
    done = start("evaluate", *shared, f"model.path={weights}", name="e").wait(300)
    assert done.code == 0, done.output
    (measured,) = done.summary["eval"].values()
    assert {**measured, "policy_version": 4} == after
    assert len(rows(run.dir, "SELECT task_id FROM groups WHERE state = 'trained'")) == 4 * 8
