"""reasoning-gym: answers that would run, forge their verdict or that of others, or are paid without a solution."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from leeway.envs import gym_answers
from leeway.envs.jail import Jail
from leeway.envs.rewards import reasoning_gym
from leeway.envs.scoring import score
from leeway.tasks.reasoning_gym_tasks import generate_rows
from leeway.types import Task

from ..tiers import sample

COMPILING = {
    "binary_matrix",
    "bitwise_arithmetic",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
READING_SETTINGS = {
    "arc_agi",
    "calendar_arithmetic",
    "composite",
    "decimal_arithmetic",
    "polynomial_equations",
    "propositional_logic",
    "puzzle24",
    "rearc",
    "rush_hour",
    "sokoban",
    "time_intervals",
    "word_ladder",
}
CODE = {
    "system": "__import__('os').system('touch {0}')",
    "open": "open('{0}', 'w')",
    "in a list": "[open('{0}', 'w').write('x')]",
    "as a number": "24 + open('{0}', 'w').write('')",
    "subclasses": "[c for c in ().__class__.__base__.__subclasses__() if open('{0}', 'w')]",
    "lambda": "(lambda: open('{0}', 'w'))()",
    "star": "[*open('{0}', 'w')]",
    "f-string": "f\"{{open('{0}', 'w')}}\"",
    "walrus": "[x := open('{0}', 'w')]",
    "sympify": "sympify(\"open('{0}', 'w')\")",
    "call of a letter": "C(open('{0}', 'w'))",
    "after a newline": "1\nopen('{0}', 'w')",
    "score of all": "[setattr(__import__('reasoning_gym').dataset, 'x', 1), open('{0}', 'w')]",
    "exit": "[__import__('os')._exit(0) if open('{0}', 'w') else 0]",
}  # fmt: skip
EXPENSIVE = [
    "9**9**9**9",
    "((9**9)**9)**9",
    "x**99999999999",
    "(x+1)**(10**9)",
    "factorial(10**9)",
    "9" * 5000,
    "(" * 3000,
    "[" * 100 + "]" * 100,
    "1e999999999",
    "exp(exp(exp(exp(99))))",
]
UNSOLVED = {
    "any text for True": ("game_of_life_halting", "yes, it does"),
    "no text for True": ("game_of_life_halting", "0"),
    "nan for a complex number": ("complex_arithmetic", "nan"),
    "nan with a sign": ("complex_arithmetic", "-NaN+nani"),
    "infinity": ("complex_arithmetic", "inf"),
    "the first character of a probability": ("coin_flip", "0"),
    "a probability that must be computed": ("coin_flip", "1e-999999999"),
    "numbers of its own": ("puzzle24", "6*4*1*1"),
    "a number that is cut": ("puzzle24", "24.9"),
    "NaN in each place": ("number_sorting", "[NaN, NaN, NaN, NaN, NaN, NaN, NaN]"),
    "the target itself": ("countdown", "{target}"),
    "digits in a power": ("countdown", "2**9"),
    "a derivative that is anything": ("simple_integration", "Integral"),
    "an empty board": ("n_queens", "_ _ _"),
}


@pytest.fixture(scope="module", autouse=True)
def jail() -> Iterator[None]:
    if why := reasoning_gym.why_not():  # type: ignore[attr-defined]
        pytest.skip(why)
    yield
    gym_answers.close_jails()


def make(dataset: str) -> Task:
    (row,) = generate_rows(dataset, options={}, size=1, seed=3)
    return Task(task_id="t", prompt="", answer=row.answer, info=json.loads(json.dumps(row.info)))


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {dataset: make(dataset) for dataset in sorted(COMPILING | {dataset for dataset, _ in UNSOLVED.values()})}


def test_the_datasets_that_compile_answers_are_known() -> None:
    """Read from the library's source: one that a new version adds must get a grammar first."""
    assert {name for name in DATASETS if name != "composite" and gym_answers.compiles_answers(name)} == COMPILING
    assert set(gym_answers.GRAMMARS) == COMPILING


def test_a_dataset_that_compiles_and_has_no_grammar_is_refused(
    monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Task]
) -> None:
    monkeypatch.delitem(gym_answers.GRAMMARS, "countdown")
    with pytest.raises(ValueError, match="cannot score countdown in safety"):
        reasoning_gym(tasks["countdown"], "1")
    with pytest.raises(ValueError, match="composite"):
        generate_rows("composite", options={}, size=1, seed=0)


@pytest.mark.attack
@pytest.mark.parametrize("name", CODE)
def test_code_is_never_compiled(name: str, tasks: dict[str, Task], nothing_written: Path) -> None:
    for dataset in COMPILING:
        task = tasks[dataset]
        text = CODE[name].format(nothing_written)
        assert not gym_answers.GRAMMARS[dataset](text, task.info["entry"])
        assert reasoning_gym(task, text) == 0.0


@pytest.mark.attack
@pytest.mark.parametrize("text", EXPENSIVE, ids=lambda text: text[:16])
def test_what_would_take_for_ever_reaches_no_parser(text: str, tasks: dict[str, Task]) -> None:
    for dataset in COMPILING - {"bitwise_arithmetic"}:
        assert reasoning_gym(tasks[dataset], text) <= 0.05, dataset


@pytest.mark.attack
@pytest.mark.parametrize("name", UNSOLVED)
def test_an_answer_that_solves_nothing_is_not_paid(name: str, tasks: dict[str, Task]) -> None:
    dataset, text = UNSOLVED[name]
    task = tasks[dataset]
    assert reasoning_gym(task, text.format(**task.info["entry"]["metadata"])) <= 0.05


@pytest.mark.attack
def test_an_answer_changes_no_later_verdict(monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Task]) -> None:
    """The second layer by itself: without any grammar, what an answer replaces is gone with its process."""
    task = tasks["spiral_matrix"]
    monkeypatch.setitem(gym_answers.GRAMMARS, "spiral_matrix", lambda text, entry: True)
    forge = "[setattr(type(self), 'score_answer', lambda *a: 1.0), setattr(self, 'score_answer', lambda *a: 1.0)]"
    reasoning_gym(task, forge)
    assert reasoning_gym(task, "[1]") == 0.0
    assert reasoning_gym(task, task.answer) == 1.0


@pytest.mark.attack
def test_a_verdict_outside_of_its_range_pays_nothing(monkeypatch: pytest.MonkeyPatch, tasks: dict[str, Task]) -> None:
    """The library's mark for dates grows with the error where the right answer is -1."""
    task = make("calendar_arithmetic")
    info: dict[str, Any] = json.loads(json.dumps(task.info))
    info["entry"]["metadata"]["task"] = "recurring_event_day"
    info["entry"]["answer"] = "-1"
    for wrong in ("0", "3", "7", "999"):
        assert gym_answers.score(info, wrong) == 0.0
    assert gym_answers.score(info, "-1") == 1.0
    for value in (1.5, -1.0, float("nan"), float("inf"), True, "1.0", None):
        monkeypatch.setattr(Jail, "run", lambda *_, value=value, **__: value)
        assert gym_answers.score(task.info, "x") == 0.0


@pytest.mark.attack(cases=6)
def test_a_row_that_names_a_dataset_runs_nothing(tasks: dict[str, Task], nothing_written: Path) -> None:
    """A row of a file may hold the keys that reasoning-gym's own tasks have."""
    info, code = tasks["puzzle24"].info, f"open({str(nothing_written)!r}, 'w')"
    for options in ({"operators": [code]}, {"min_value": code}, {"no_such": 1}):
        reasoning_gym(Task(task_id="t", prompt="p", info={**info, "options": options}), "1")
    sorting = tasks["number_sorting"].info
    entry = {**sorting["entry"], "answer": f"[{code}]"}
    assert reasoning_gym(Task(task_id="t", prompt="p", info={**sorting, "entry": entry}), "[1]") == 0.0
    for wrong in ({"source_dataset": "../../etc"}, {"source_dataset": "composite"}):
        with pytest.raises(ValueError, match="cannot score"):
            reasoning_gym(Task(task_id="t", prompt="p", info={**info, **wrong}), "1")


@pytest.mark.honest
@pytest.mark.parametrize("dataset", sorted(COMPILING))
def test_the_datasets_own_answer_pays(dataset: str, tasks: dict[str, Task]) -> None:
    assert reasoning_gym(tasks[dataset], tasks[dataset].answer) == 1.0


@pytest.mark.honest("mathematics")
@pytest.mark.parametrize(
    ("dataset", "form"),
    [
        ("countdown", "({})"),
        ("simple_integration", "{}"),
        ("simple_integration", "({}) + 7"),
        ("simple_integration", "0.5*2*({})"),
        ("intermediate_integration", "{} + C"),
        ("polynomial_multiplication", "({})"),
        ("polynomial_multiplication", "-(-({}))"),
        ("puzzle24", "( {} )"),
    ],
)
def test_another_writing_pays(dataset: str, form: str, tasks: dict[str, Task]) -> None:
    assert reasoning_gym(tasks[dataset], form.format(tasks[dataset].answer)) == 1.0


def test_settings_count_where_verdicts_depend_on_them(tasks: dict[str, Task]) -> None:
    """Only then is the dataset made for a verdict; otherwise it was made, with its files, before the jail forked."""
    assert {name for name in DATASETS if gym_answers.reads_settings(name)} == READING_SETTINGS
    (row,) = generate_rows("word_ladder", options={"min_word_length": 3, "max_word_length": 3}, size=1, seed=3)
    info: dict[str, Any] = json.loads(json.dumps(row.info))
    assert gym_answers.score(info, row.answer) == 1.0
    longer = json.loads(json.dumps(make("word_ladder").info))
    info["options"] = {"min_word_length": 5, "max_word_length": 5}
    assert gym_answers.score(info, row.answer) == 0.0  # its words have three letters
    assert gym_answers.score(longer, longer["entry"]["answer"]) == 1.0


@pytest.mark.slow
def test_each_dataset_can_be_imported_alone() -> None:
    """The library's imports go round in a circle; where a new version goes round otherwise, the jail refuses it."""
    code = """
import os, sys
folder, *datasets = sys.stdin.read().splitlines()
sys.path.append(folder)
import gym_process
gym_process.TRY_S = 0.0
for line in datasets:
    if os.fork() == 0:
        gym_process.prepare(*line.split())
        os._exit(0)
    if os.wait()[1]:
        print("failed:", line)
"""
    datasets = [f"{name} {cls.__module__}" for name, (cls, _) in DATASETS.items() if name != "composite"]
    lines = "\n".join([str(Path(gym_answers.__file__).parent), *sample(datasets[::10], datasets)])
    done = subprocess.run([sys.executable, "-c", code], input=lines, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "failed" not in done.stdout, (done.stdout, done.stderr[-2000:])


def test_a_loop_goes_on_meanwhile(tasks: dict[str, Task]) -> None:
    task = tasks["simple_integration"]

    async def beside() -> list[float]:
        turns = 0
        scoring = asyncio.gather(*(score(reasoning_gym, task, text) for text in (task.answer, "x", "1+")))
        while not scoring.done():
            turns += 1
            await asyncio.sleep(0.001)
        assert turns > 3
        return [one.reward for one in await scoring]

    assert asyncio.run(beside()) == [1.0, 0.0, 0.0]
