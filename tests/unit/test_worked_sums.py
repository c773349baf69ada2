"""Worked sums: each is right in all of its parts, and the reward reads what its last part says."""

from __future__ import annotations

import re

from leeway.config import load_config
from leeway.envs.answers import last_number
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


def test_the_bundled_config_pays_for_the_last_number_and_warms_up_on_the_working() -> None:
    config = load_config("smollm2_135m", ["model.path=./unused"])
    tasks = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval).tasks
    held_out = build_taskset(config.task, seed=config.seed, split="eval", eval_config=config.eval).tasks
    assert not {task.task_id for task in tasks} & {task.task_id for task in held_out}
    assert len(held_out) == config.eval.num_tasks
    for task in [*tasks[:200], *held_out]:
        working = str(task.info["solution"])
        assert working.endswith(f"={task.answer}")
        assert last_number(task, working) == 1.0
        assert last_number(Task(task_id="", prompt="", answer=task.answer), working.rpartition("=")[0]) == float(
            re.findall(r"\d+", working)[-2] == task.answer
        )
