"""Rewards: what they pay, and that checking an answer never stalls, from any thread."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from leeway.envs.answers import answer_format, boxed, countdown, last_number, length, overlong, tagged
from leeway.envs.guarded import ScorerPool
from leeway.envs.rewards import exact_match, math_verify, reasoning_gym, resolve_reward
from leeway.tasks.reasoning_gym_tasks import generate_rows
from leeway.types import Completion, Task


def make(answer, **info):
    return Task(task_id="t", prompt="p", answer=answer, info=info)


def gym_task(dataset, **options):
    (row,) = generate_rows(dataset, options=options, size=1, seed=3)
    # As it arrives after a trip through a JSON ledger.
    return Task(task_id="t", prompt="p", answer=row.answer, info=json.loads(json.dumps(row.info)))


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("-12", " -12\n", 1),
        ("-12", "12", 0),
        ("-12", "-12 apples", 0),
        ("a  b", "a b", 1),
        ("", "", 0),
        ("7", "#### 7", 0),
    ],
)
def test_exact_match(answer, text, expected):
    assert exact_match(make(answer), text) == expected


def test_exact_match_after_the_mark_of_the_tasks():
    task = make("7", answer_after="####")
    assert [exact_match(task, t) for t in ("3+4\n#### 7", "#### 7\n#### 8", "7", "three")] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("72", "48/2 = 24, so 48+24 = 72\n#### 72", 1),
        ("72", "#### 71", 0),
        ("1,234", "The answer is 1234.", 1),
        ("-12", "\\boxed{-12}", 1),
        ("\\frac{1}{2}", "so it is $0.5$", 1),
        ("3/4", "\\boxed{\\frac{6}{8}}", 1),
        ("18", "\\boxed{18} dollars, not 20", 1),
        ("72", "", 0),
        ("", "72", 0),
        ("72", "no number", 0),
        ("x", "(" * 20000, 0),
        ("72", "x" * 200000 + " 72", 1),
    ],
)
def test_math_verify(answer, text, expected):
    assert math_verify(make(answer), text) == expected


def test_math_verify_works_from_threads_and_from_a_loop():
    cases = [(make(str(i)), f"so {i % 7}") for i in range(40)]
    expected = [float(i == i % 7) for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda case: math_verify(*case), cases)) == expected

    async def all_at_once():
        return await asyncio.gather(*(asyncio.to_thread(math_verify, *case) for case in cases))

    assert asyncio.run(all_at_once()) == expected


ENDLESS = [
    "9^{9^{9}}!",
    pytest.param("\\binom{99999999999}{49999999999}", marks=pytest.mark.long("another formula, the same limit")),
]


@pytest.mark.slow
@pytest.mark.parametrize("formula", ENDLESS)
def test_endless_computation_costs_its_processor_time_and_nothing_more(formula):
    pool = ScorerPool(num_workers=1)
    assert pool.values(["x+x"]) == pool.values(["2x"])
    assert pool.values([formula]) == [None]
    assert pool.values(["x+x"]) == pool.values(["2x"])
    pool.close()


@pytest.mark.slow
def test_killed_process_is_replaced_and_none_is_left_behind():
    pool = ScorerPool(num_workers=1)
    assert pool.values(["1"]) == [["1 0"]]
    pid = pool._idle[0]._process.pid
    os.kill(pid, signal.SIGKILL)
    assert pool.values(["1"]) == [["1 0"]]
    last = pool._idle[0]._process.pid
    assert last != pid
    pool.close()
    for gone in (pid, last):
        with pytest.raises(ProcessLookupError):
            os.kill(gone, 0)


@pytest.mark.slow
def test_process_ends_with_its_parent():
    pool = ScorerPool(num_workers=1)
    assert pool.values(["1"]) == [["1 0"]]
    process = pool._idle[0]._process
    assert process.stdin is not None
    process.stdin.close()  # what the kernel does when the parent is killed
    assert process.wait(timeout=200) == 0


def test_checker_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="math_verify process did not start"):
        ScorerPool(start_timeout_s=200).values(["1"])


@pytest.mark.slow
def test_reasoning_gym_scores_with_the_datasets_own_function():
    task = gym_task("chain_sum", min_terms=2, max_terms=2, min_digits=2, max_digits=2)
    assert reasoning_gym(task, f" {task.answer} ") == 1.0
    assert reasoning_gym(task, "1x") == 0.0
    assert 0.0 < reasoning_gym(task, f"it is {task.answer}") < 1.0
    ended = replace(task, info={**task.info, "entry": {**task.info["entry"], "answer": f"{task.answer}\n"}})
    assert reasoning_gym(ended, task.answer) == 1.0, "an answer that ends with a line's end"
    with pytest.raises(ValueError, match=r"task\.name=reasoning_gym"):
        reasoning_gym(make("1"), "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", ["spiral_matrix", "countdown", "rubiks_cube", "rearc", "zebra_puzzles", "prime_factorization"]
)
def test_entry_survives_json(dataset):
    task = gym_task(dataset)
    if task.answer:
        assert reasoning_gym(task, task.answer) == 1.0
    assert reasoning_gym(task, "nonsense") < 0.1


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("\\frac{1}{2}", "\\boxed{1} no, \\boxed{\\frac{1}{2}}.", 1),
        ("1234", "\\boxed{$1,234$}", 1),
        ("7", "7", 0),
        ("7", "\\boxed{7", 0),
        ("7", "\\boxed{7} then \\boxed{8}", 0),
        ("(1,2)", "\\boxed{(1, 2)}", 1),
    ],
)
def test_boxed(answer, text, expected):
    assert boxed(make(answer), text) == expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("17", "42 - 25 = 17.", 1),
        ("17", "17, no: 18", 0),
        ("17", "the answer is 17", 1),
        ("-17", "25 - 42 = -17", 1),
        ("-17", "25 - 42 = \u221217", 1),
        ("25", "42-25", 1),
        ("-25", "42-25", 0),
        ("1234", "It is $1,234.", 1),
        ("234", "1,234", 0),
        ("17", "17.0", 1),
        ("17", "17.5", 0),
        ("17", "\u0661\u0667", 0),
        ("17", "1" * 5000, 0),
        ("17", "17" + " " * 9000, 0),
        ("17", "", 0),
        ("", "17", 0),
        ("x", "x", 0),
    ],
)
def test_last_number(answer, text, expected):
    assert last_number(make(answer), text) == expected


def test_tagged_and_format():
    text = "<think>it is <answer>8</answer></think> <answer> 7 </answer>\n"
    assert [tagged(make(a), text) for a in ("7", "8")] == [1.0, 0.0]
    assert [tagged(make("7"), t) for t in ("7", "</answer>7<answer>", "<answer>7")] == [0.0] * 3
    assert tagged(make("7"), "<x>7</x>", tag="x") == 1.0
    assert [answer_format(make(""), t) for t in (text, "so " + text, "<think></think>")] == [1.0, 0.0, 0.0]
    assert answer_format(make(""), "12", pattern=r"\d+") == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 * (4 + 4)", 1.0),
        ("I try\n<answer>(4 + 4) * 3 = 24</answer> ok", 1.0),
        ("4 * 6", 0.1),
        ("3 * 8", 0.1),
        ("3 * 4 + 4", 0.1),
        ("24", 0.1),
        ("no idea", 0.0),
        ("", 0.0),
        ("9**9**9**9", 0.0),
        ("1e999", 0.0),
        ("3 * (4 + 4) * 1.0", 0.0),
    ],
)
def test_countdown(text, expected):
    assert countdown(make("24", numbers=[3, 4, 4]), text) == expected


@pytest.mark.slow
def test_countdown_reads_reasoning_gyms_entries():
    task = gym_task("countdown")
    assert countdown(task, f"<answer>{task.info['entry']['metadata']['expression']}</answer>") == 1.0
    with pytest.raises(ValueError, match="numbers"):
        countdown(make("1"), "1")


def completion(num_tokens, finish_reason="stop"):
    zeros = [0] * num_tokens
    return Completion(tokens=zeros, logprobs=zeros, policy_versions=zeros, finish_reason=finish_reason, text="")


def test_length_and_overlong():
    task = make("")
    assert [length(task, "", completion(n), max_tokens=100) for n in (0, 25, 100, 300)] == [0, -0.25, -1, -1]
    got = [overlong(task, "", completion(n), max_tokens=100, buffer=20) for n in (10, 80, 90, 100)]
    assert got == [0, 0, -0.5, -1]
    assert overlong(task, "", completion(10, "length"), max_tokens=100, buffer=20) == -1.0


def test_resolve():
    assert resolve_reward("exact_match") is exact_match
    assert resolve_reward("operator:eq") is operator.eq
    for name, message in [
        ("exact_mtach", "expected one of exact_match, math_verify"),
        ("no_such_pkg.rewards:f", "no module 'no_such_pkg'"),
        ("json:no_such", "has no 'no_such'"),
        ("json:__name__", "expected a function"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            resolve_reward(name)
        assert "env.reward" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_rows_are_generated_once_in_a_process_and_each_caller_has_its_own_list(monkeypatch) -> None:
    from leeway.tasks import reasoning_gym_tasks

    real, made = reasoning_gym_tasks._generate, []
    monkeypatch.setattr(reasoning_gym_tasks, "_generate", lambda *a, **o: made.append(o) or real(*a, **o))
    monkeypatch.setattr(reasoning_gym_tasks, "_kept", {})
    for options in ({"min_terms": 2}, {"min_terms": 2}, {"min_terms": 3}):
        rows = generate_rows("chain_sum", options=options, size=3, seed=1)
        assert len(rows) == 3
        rows.clear()
    assert [o["options"] for o in made] == [{"min_terms": 2}, {"min_terms": 3}]
    for seed in range(9):
        generate_rows("chain_sum", options={}, size=1, seed=seed)
    assert len(reasoning_gym_tasks._kept) == reasoning_gym_tasks.MOST_KEPT
