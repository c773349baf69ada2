"""Rewards that look at the text alone: nothing but a solution is paid, and no text keeps them busy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from leeway.envs import answers
from leeway.types import Task

Limit = Callable[[float], AbstractContextManager[None]]
GOLD = {"exact_match": "42", "boxed": "42", "tagged": "42"}


def task(answer: str = "42", **info: Any) -> Task:
    return Task(task_id="t", prompt="How many?", answer=answer, info=info)


def wrapped(reward: str, text: str) -> str:
    """The text as the answer, in the form that the reward looks for."""
    return {"boxed": f"So \\boxed{{{text}}}", "tagged": f"So <answer>{text}</answer>", "exact_match": text}[reward]


WRONG = {
    "nothing": "",
    "white space": " \n\t\u2003 ",
    "another number": "43",
    "all numbers": ", ".join(map(str, range(100))),
    "two candidates": "41 or 42",
    "the number and more": "42 43",
    "digits apart": "4 2",
    "digits on two lines": "4\n2",
    "Arabic digits": "٤٢",
    "full-width digits": "４２",
    "superscript": "⁴²",
    "a character without width": "4\u200b2",
    "text direction": "\u202e24",
    "a combining mark": "42\u0301",
    "null": "42\x00",
    "hexadecimal": "0x2a",
    "an expression": "6*7",
    "minus": "-42",
    "a pattern": ".*",
    "a format field": "{answer}",
    "the word answer": "answer",
    "code": "__import__('os').getpid() or 42",
}
RIGHT = {
    "plain": "42",
    "spaces around": "  42  ",
    "line ends around": "\n42\n",
}


@pytest.mark.attack
@pytest.mark.parametrize("reward", GOLD)
@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_wrong_answers_are_not_paid(reward: str, text: str) -> None:
    assert getattr(answers, reward)(task(), wrapped(reward, text)) == 0.0


@pytest.mark.honest
@pytest.mark.parametrize("reward", GOLD)
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_right_answers_are_paid(reward: str, text: str) -> None:
    assert getattr(answers, reward)(task(), wrapped(reward, text)) == 1.0


@pytest.mark.attack
@pytest.mark.parametrize("reward", GOLD)
@pytest.mark.parametrize("gold", ["", "  ", "\n"], ids=["empty", "spaces", "line end"])
@pytest.mark.parametrize("text", ["", "42", "."], ids=["nothing", "a number", "a stop"])
def test_where_the_task_has_no_answer_nothing_equals_it(reward: str, gold: str, text: str) -> None:
    assert getattr(answers, reward)(task(gold), wrapped(reward, text)) == 0.0


BOXED_HONEST = {
    "thousands": ("1234", "\\boxed{1,234}"),
    "thousands in the gold": ("1,234", "\\boxed{1234}"),
    "dollars": ("$5", "\\boxed{5}"),
    "a thin space": ("1000", "\\boxed{1\\,000}"),
    "a full stop": ("42", "\\boxed{42.}"),
    "spaces in an expression": ("x+1", "\\boxed{x + 1}"),
    "braces inside": ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}}"),
    "the last of two": ("7", "First \\boxed{3}, no: \\boxed{7}"),
    "a list": ("3 4", "\\boxed{3 4}"),
    "a list with more space": ("3 4", "\\boxed{3   4}"),
    "a stop alone": (".", "\\boxed{.}"),
    "a word": ("blue whale", "\\boxed{blue whale}"),
}
BOXED_WRONG = {
    "no box": ("42", "42"),
    "a box that never ends": ("42", "\\boxed{42"),
    "the right one first": ("42", "\\boxed{42} or \\boxed{43}"),
    "a list as one number": ("3 4", "\\boxed{34}"),
    "one number as a list": ("34", "\\boxed{3 4}"),
    "an empty box for a stop": (".", "\\boxed{}"),
    "only what is left out": ("42", "\\boxed{$\\!\\,.}"),
    "two in one box": ("42", "\\boxed{41, 42}"),
}


@pytest.mark.honest("mathematics")
@pytest.mark.parametrize(("gold", "text"), BOXED_HONEST.values(), ids=BOXED_HONEST)
def test_forms_of_a_boxed_answer(gold: str, text: str) -> None:
    assert answers.boxed(task(gold), text) == 1.0


@pytest.mark.attack
@pytest.mark.parametrize(("gold", "text"), BOXED_WRONG.values(), ids=BOXED_WRONG)
def test_boxes_without_the_answer(gold: str, text: str) -> None:
    assert answers.boxed(task(gold), text) == 0.0


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    ["#### 1 #### 2 #### 43", "#### 42 ####", "#### 42 or 43", "42 is it\n####"],
    ids=["several", "a mark at the end", "two after the mark", "before the mark"],
)
def test_only_what_follows_the_last_mark_counts(text: str) -> None:
    assert answers.exact_match(task(answer_after="####"), text) == 0.0


@pytest.mark.honest("mathematics")
@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("(25 − 1) × 3 + 7", 79),
        ("(25 - 1) \\times 3 + 7", 79),
        ("I try.\n<answer>(25-1)*3+7</answer>", 79),
        ("(25-1)*3+7 = 79", 79),
        ("First 25*3.\n(25 - 1)*3 + 7", 79),
        ("(25 - 1) / 3 * 7", 56),
        ("(25 - 1) ÷ 3 · 7", 56),
        ("-3 + 25 + 7 - 1", 28),
        ("25 / 3 / 7 / 1", "25/21"),
        ("((((25)))) - (3 + 7 + 1)", 14),
    ],
    ids=[
        "signs",
        "LaTeX",
        "tags",
        "result",
        "last line",
        "division",
        "other signs",
        "minus",
        "a fraction",
        "parentheses",
    ],
)
def test_countdown_pays_an_expression_that_makes_the_target(text: str, target: Any) -> None:
    assert answers.countdown(task(numbers=[25, 3, 7, 1], target=target), text) == 1.0


COUNTDOWN_WRONG = {
    "picked by a function": "min(25, 3, 7, 1)",
    "picked by max": "max(1, 3) + 0*25*7",
    "rounded": "round(25 / 7) * 1 - 0",
    "a floor": "floor(25/7/1) * 1 + 3*0",
    "a remainder": "25 % 7 - 1 * 3 + 3",
    "a floor division": "25 // 7 // 1 // 1 + 3 * 0",
    "a power of nought": "(25 * 7 * 1) ** 0 * 3",
    "shift": "3 << 0 * (25 + 7 + 1)",
    "bits": "(25 & 7 & 1) * 3",
    "the target": "3",
    "numbers that were not given": "2 + 1",
    "a number twice": "3 * 1 * 25 / 25 * 7 / 7",
    "a number left out": "25 - 21 - 1",
    "a comparison": "3 if 25 > 7 else 1",
    "truth": "True + True + True",
    "a name": "pi + 25 + 3 + 7 + 1",
    "an attribute": "(25).real",
    "a call": "__import__('os').getpid()",
    "a list": "[25, 3, 7, 1][1]",
    "a string": "'3' * 1",
    "an assignment": "(x := 3)",
    "a float that is near": "3.0000001",
    "complex": "3j * 1j",
    "an underscore": "2_5 - 2_2",
    "a lambda": "(lambda: 3)()",
    "nothing": "",
    "a division by nought": "3 / (25 - 25)",
    "two expressions": "3; 25 * 7 * 1",
    "null": "3\x00",
}


@pytest.mark.attack
@pytest.mark.parametrize("text", COUNTDOWN_WRONG.values(), ids=COUNTDOWN_WRONG)
def test_countdown_pays_nothing_else(text: str) -> None:
    assert answers.countdown(task(numbers=[25, 3, 7, 1], target=3), text, formed=0.1) <= 0.1


FRAMED = "<think>3 + 4</think> <answer>7</answer>"


@pytest.mark.honest
@pytest.mark.parametrize(
    "text",
    [FRAMED, f"\n{FRAMED}\n", "<think>\nlong\n</think>\n\n<answer>\n7\n</answer>", "<think></think><answer></answer>"],
    ids=["plain", "white space", "lines", "empty"],
)
def test_the_form_is_paid(text: str) -> None:
    assert answers.answer_format(task(), text) == 1.0
    assert answers.answer_format(task(), text, pattern=answers.THINK_THEN_ANSWER[:] + "(?:)") == 1.0


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    ["", "7", f"x{FRAMED}", f"{FRAMED}x", "<think>3</think>7", "<answer>7</answer>",
     "<think><answer>7</answer></think>", "<think>3</think> so <answer>7</answer>"],
)  # fmt: skip
def test_another_form_is_not_paid(text: str) -> None:
    assert answers.answer_format(task(), text) == 0.0
    assert answers.answer_format(task(), text, pattern=answers.THINK_THEN_ANSWER + "(?:)") == 0.0


@pytest.mark.attack
@pytest.mark.parametrize("piece", ["</think><answer>", "<think>", "</answer>", " ", "</think> "])
def test_no_text_keeps_the_form_busy(piece: str, at_most: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_MATCHING_S", 0.1)
    text = "<think>" + piece * (200_000 // len(piece)) + "!"
    with at_most(1.5):
        assert answers.answer_format(task(), text) == 0.0
        assert answers.answer_format(task(), text, pattern=answers.THINK_THEN_ANSWER + "(?:)") == 0.0
        assert answers.answer_format(task(), "a" * 50_000 + "!", pattern="(a+)+") == 0.0


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 30_000,
        "<answer>" * 30_000 + "</answer>",
        "</answer>" * 30_000,
        "{" * 200_000,
        "(" * 200_000,
        "1+" * 100_000 + "1",
        "9" * 200_000,
        "9*" * 140 + "9",
        "-" * 290 + "1",
        "1," * 100_000,
        " " * 200_000,
        "1 " * 100_000,
        "\n" * 200_000,
    ],
    ids=lambda text: repr(text[:9]),
)
def test_no_text_keeps_a_reward_busy(text: str, at_most: Limit) -> None:
    of = task(numbers=[1, 2], target=3, answer_after="####")
    with at_most(2.0):
        for reward in (answers.exact_match, answers.boxed, answers.tagged, answers.last_number, answers.answer_format):
            assert reward(of, text) == 0.0
        assert answers.boxed(of, f"\\boxed{{{text}}}") == 0.0
        assert answers.countdown(of, text) <= 0.1
