"""Worked sums: each is right in all of its parts, and the reward reads what its last part says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from leeway.config import Config
from leeway.config.stages import plan_run
from leeway.envs.answers import last_number
from leeway.tasks.questions import whole_answer
from leeway.tasks.taskset import build_taskset
from leeway.tasks.worked_sums import worked_sums
from leeway.types import Task


def test_every_sum_comes_once_and_each_part_of_its_working_is_right() -> None:
    items = [*worked_sums()]
    assert len({item["question"] for item in items}) == len(items) == 90 * 90 * 2
    for item in items:
        a, sign, b = re.fullmatch(r"(\d\d) ([+-]) (\d\d) =", item["question"]).groups()  # type: ignore[union-attr]
        parts = item["answer"].split(",")
        terms = [re.fullmatch(r"(-?\d+)([+-])(\d+)=(-?\d+)", part).groups() for part in parts]  # type: ignore[union-attr]
        for first, operator, second, result in terms:
            assert int(result) == (int(first) + int(second) if operator == "+" else int(first) - int(second))
        (tens, _, _, sum_of_tens), (ones, _, _, sum_of_ones), (more, operator, less, whole) = terms
        assert (tens + ones, terms[0][2] + terms[1][2]) == (a, b)
        assert {terms[0][1], terms[1][1]} == {sign}
        assert (int(more), int(operator + less)) == (10 * int(sum_of_tens), int(sum_of_ones))
        assert int(whole) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_a_seed_decides_the_order() -> None:
    assert [*worked_sums(seed=3)] == [*worked_sums(seed=3)] != [*worked_sums(seed=4)]


def test_the_bundled_config_warms_up_on_whole_workings_and_pays_for_the_last_number() -> None:
    sft, rl = plan_run("smollm2_135m", "async_rl", ["model.path=./unused"])
    assert (sft.name, rl.name) == ("sft", "async_rl")
    assert rl.config.env.reward == "last_number"
    (held_out, first), (held_out_of_rl, second) = (tasks_of(stage.config) for stage in (sft, rl))
    assert [task.task_id for task in held_out] == [task.task_id for task in held_out_of_rl]
    assert len(held_out) == rl.config.eval.num_tasks
    asked = {str(task.prompt) for task in held_out}
    assert not asked & {str(task.prompt) for task in [*first, *second]}
    for task in [*first[:200], *held_out]:
        learned = whole_answer(task.answer, task.info)
        assert learned.count("=") == 3
        assert last_number(task, learned) == 1.0
        assert rl.config.rollout.max_response_tokens > len(learned), "a token is a character, and one ends the answer"


def tasks_of(config: Config) -> tuple[Sequence[Task], Sequence[Task]]:
    """(held out, trained on)."""
    own = (build_taskset(config.task, seed=config.seed, split=s, eval_config=config.eval) for s in ("eval", "train"))
    held_out, train = (taskset.tasks for taskset in own)
    return held_out, train
