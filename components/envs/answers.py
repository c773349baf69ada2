"""Rewards that depend only on the text: where the answer is, how it is formatted, how long it is."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction
from typing import Any

import regex

from ..types import Completion, Task
from .calculator import syntax_tree

MAX_MATCHING_S = 2.0
MAX_CHARS_AFTER_NUMBER = 8000
"""How far from the end of a text its last number may stand, because searching takes time."""
THINK_THEN_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NUMBER = re.compile(r"(?:(?<![\w)\].])[-−])?[0-9]+(?:\.[0-9]+)?")
_SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}


def exact_match(task: Task, text: str) -> float:
    """1.0 when the text equals the task's answer. White space at the ends and its amount in between do not count.

    No text equals an empty answer.

    If the task's answers follow a mark ("#### 72", `task.answer_after`), the text's answer is what follows that mark,
    provided the text contains it.
    """
    mark = task.info.get("answer_after")
    if mark and mark in text:
        text = text.rpartition(mark)[2]
    wanted = " ".join(task.answer.split())
    return float(wanted != "" and " ".join(text.split()) == wanted)


def boxed(task: Task, text: str) -> float:
    """1.0 when the last \\boxed{...} holds the task's answer; white space, dollars, commas in numbers do not count."""
    found = last_boxed(text)
    return float(found is not None and _is_same(found, task.answer))


def tagged(task: Task, text: str, *, tag: str = "answer") -> float:
    """1.0 when the last <tag>...</tag> holds the task's answer, compared as `boxed` does."""
    found = last_tagged(text, tag)
    return float(found is not None and _is_same(found, task.answer))


def last_number(task: Task, text: str) -> float:
    """1.0 when the last number in the text equals the task's answer, whatever stands around it: "42 - 25 = 17." for 17.

    Commas in numbers do not count, nor zeros after a decimal point. In "42-25" the last number is 25, not -25. Digits
    are those of ASCII. No text equals an answer that is not a number.
    """
    found = _NUMBER.findall(_GROUPED.sub("", text[-MAX_CHARS_AFTER_NUMBER:]))
    wanted = _fraction(_GROUPED.sub("", task.answer))
    return float(bool(found) and wanted is not None and _fraction(found[-1].replace("−", "-")) == wanted)


def answer_format(task: Task, text: str, *, pattern: str = THINK_THEN_ANSWER) -> float:
    """1.0 when the whole text has this form (a regular expression; "." matches line ends too).

    Some expressions take time polynomial in the text's length: after `MAX_MATCHING_S` the reward is 0.0.
    """
    if pattern == THINK_THEN_ANSWER:
        text = text.strip()
        inner = text[len("<think>") : -len("</answer>")]
        framed = text.startswith("<think>") and text.endswith("</answer>")
        return float(framed and re.search(r"</think>\s*<answer>", inner) is not None)
    try:
        return float(regex.fullmatch(pattern, text, regex.DOTALL, timeout=MAX_MATCHING_S, concurrent=True) is not None)
    except TimeoutError:
        return 0.0


answer_format.blocking = True  # type: ignore[attr-defined]


def countdown(task: Task, text: str, *, formed: float = 0.1) -> float:
    """1.0 for an expression that makes the target and uses each number as often as it is given. Any other arithmetic
    earns `formed`, any other text 0.0. Arithmetic is whole numbers, + - * / and parentheses, and its value is exact.

    The expression is the last <answer>...</answer>, else the last line, without what follows "=". The task's info holds
    "numbers" and "target" (or they stand in its reasoning-gym entry); the target may be the task's answer.
    """
    entry = task.info.get("entry", {}).get("metadata", {})
    numbers = task.info.get("numbers", entry.get("numbers"))
    target = task.info.get("target", entry.get("target", task.answer))
    if numbers is None:
        raise ValueError(f'env.reward: countdown cannot score task {task.task_id}; its info has no "numbers"')
    wanted = _fraction(str(target))
    if wanted is None:
        raise ValueError(f"env.reward: countdown cannot score task {task.task_id}; its target is {str(target)[:40]!r}")
    lines = (last_tagged(text, "answer") or text).strip().splitlines()
    expression = lines[-1].split("=")[0].strip() if lines else ""
    try:
        value, used = _arithmetic(expression)
    except ValueError:
        return 0.0
    return 1.0 if value == wanted and sorted(used) == sorted(int(n) for n in numbers) else formed


countdown.blocking = True  # type: ignore[attr-defined]


def _fraction(text: str) -> Fraction | None:
    """A task's number; None for any other text, also for "1e999999999", which would be expensive to compute."""
    found = re.fullmatch(r"\s*-?\d{1,40}(?:\.\d{1,40}|/\d{1,40})?\s*", text)
    return Fraction(text) if found and not re.search(r"/0+\s*$", text) else None


def length(task: Task, text: str, completion: Completion, *, max_tokens: int = 1024) -> float:
    """From 0.0 for an empty completion down to -1.0 at `max_tokens` and beyond: give it a small weight."""
    return -min(1.0, len(completion.tokens) / max_tokens)


def overlong(task: Task, text: str, completion: Completion, *, max_tokens: int = 1024, buffer: int = 128) -> float:
    """0.0 up to `max_tokens` - `buffer`, then falling linearly to -1.0 at `max_tokens`; -1.0 if it was cut off.

    The soft overlong punishment of DAPO (Yu et al. 2025, section 3.4). Set `max_tokens` to
    `rollout.max_response_tokens`.
    """
    if completion.finish_reason == "length":
        return -1.0
    return -min(1.0, max(0.0, (len(completion.tokens) - (max_tokens - buffer)) / buffer))


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, up to its matching brace; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def last_tagged(text: str, tag: str) -> str | None:
    """The content of the last <tag>...</tag>; None if there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if 0 <= start < end else None


def _arithmetic(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of whole numbers, + - * / and parentheses, and the numbers in it.

    Raises ValueError for anything else: with functions, powers or remainders, numbers "make" any target.
    """
    for sign, plain in _SIGNS.items():
        expression = expression.replace(sign, plain)
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
            return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{type(node).__name__} is not arithmetic")

    try:
        return value(syntax_tree(expression).body), used
    except ZeroDivisionError:
        raise ValueError("a division by zero") from None


def _is_same(found: str, answer: str) -> bool:
    return _plain(found) == _plain(answer) if _plain(answer) else found.strip() == answer.strip() != ""


def _plain(text: str) -> str:
    """Without dollars, commas in numbers, a final full stop and white space, except between digits: "3 4" is not 34."""
    text = text.replace("$", "").replace("\\!", "").replace("\\,", "")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", " ".join(text.split())).rstrip(".")
