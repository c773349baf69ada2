"""Scores answers to reasoning-gym's tasks safely: what may reach a dataset's own scorer, and which scores count.

Some datasets compile an answer as Python (`eval`, sympy's `parse_expr`). Two layers contain that:

1. Before the library sees an answer for such a dataset, the answer must fit a small grammar (`GRAMMARS`): numbers,
   operators and brackets, names of the task and of common functions, bounded powers; no attribute, no call but of these
   functions. What does not fit earns 0.0. A dataset that compiles answers and has no grammar is refused.
2. Every answer, to any dataset, is scored in its own jailed process, so no answer can affect another's score.

A verdict that is no number from 0 to 1 pays nothing: some formulas of the library exceed 1 for wrong answers. Where the
library pays for an answer that solves nothing, the answer must also pass `STRICTER`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from .jail import Jail, JailError, Limits
from .math_answers import words

logger = logging.getLogger(__name__)

MAX_CHARS = 8000
LIMITS = Limits(cpu_s=5, timeout_s=5.0, memory_mb=512, disk_mb=1, threads=2)
_SCRIPT = Path(__file__).with_name("gym_process.py")

Entry = dict[str, Any]
_FUNCTIONS = words(
    """
    sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs Integral
    """
)
MAX_DIGITS, MAX_EXPONENT, MAX_NODES = 12, 100, 400


def score(info: dict[str, Any], text: str) -> float:
    """The score of an answer, 0.0 to 1.0, by the dataset in a task's `info`. Starts a process: call it in a thread.

    Raises ValueError for a dataset that cannot be scored in safety, and NoJailError.
    """
    text, entry = text.strip(), info["entry"]
    if len(text) > MAX_CHARS:
        return 0.0
    dataset = info["source_dataset"]
    right = entry["answer"]
    exact = isinstance(right, str) and text == right.strip()
    if dataset not in GRAMMARS and (dataset == "composite" or compiles_answers(dataset)):
        raise ValueError(
            f"env.reward: reasoning_gym cannot score {dataset} in safety: its scorer compiles answers as "
            "Python, or hands them on; use another reward, such as exact_match"
        )
    if not exact:
        for check in (GRAMMARS.get(dataset), STRICTER.get(dataset), _names_numbers):
            if check is not None and not check(text, entry):
                return 0.0
    try:
        options = info["options"] if reads_settings(dataset) else {}
        arguments = (dataset, options, entry, bool(info.get("as_tuples")), text)
        value = jail_of(dataset).run("gym_process:score_entry", *arguments, limits=LIMITS)
    except JailError as error:
        logger.warning("reasoning_gym: no score: %s: %s, on %.120r", dataset, error, text)
        return 0.0
    return min(float(value), 1.0) if isinstance(value, float) and 0.0 <= value <= 1.0 + 1e-9 else 0.0


_jails: dict[str, Jail] = {}


def jail_of(dataset: str) -> Jail:
    """The jail of a dataset's answers: an interpreter in which that dataset alone is imported and made."""
    if dataset not in _jails:
        prepare = ("gym_process:prepare", dataset, _class_of(dataset).__module__)
        _jails.setdefault(dataset, Jail([_SCRIPT], prepare=prepare, start_timeout_s=300.0))
    return _jails[dataset]


def close_jails() -> None:
    """End their interpreters; the next verdict starts a new one."""
    for jail in _jails.values():
        jail.close()


# -- grammars: what may be compiled -------------------------------------------------------------------------------


def _tree(text: str) -> ast.expr | None:
    """The syntax tree of an expression, which is only parsed; None where it is none or too large."""
    if len(text) > 4000 or any(len(digits) > MAX_DIGITS for digits in re.findall(r"\d+", text)):
        return None
    depth = 0
    for letter in text:
        depth += 1 if letter in "([{" else -1 if letter in ")]}" else 0
        if depth > 20:
            return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if sum(1 for _ in ast.walk(tree)) <= MAX_NODES * 10 else None


def is_arithmetic(text: str, entry: Entry) -> bool:
    """Whole numbers, + - * / and brackets."""
    if not re.fullmatch(r"[\d\s+\-*/()]{1,300}", text) or re.search(r"\*\s*\*|/\s*/", text):
        return False
    return _tree(" ".join(text.split())) is not None


def is_formula(text: str, entry: Entry) -> bool:
    """Numbers, the task's letters, + - * / **, brackets, and common functions of one argument.

    An exponent is a whole number or fraction of at most MAX_EXPONENT, or (of e alone) linear; the product of nested
    ones is bounded too.
    """
    if not re.fullmatch(r"[\w\s+\-*/().,]{1,1000}", text, re.ASCII) or re.search(r"__|\d[eE][-+]?\d", text):
        return False
    tree = _tree(" ".join(text.split()))
    return tree is not None and _is_formula(tree, _letters(entry), MAX_EXPONENT)


def _letters(entry: Entry) -> set[str]:
    """The names of one letter (or a letter and digits) that the task itself uses, and the constant of integration."""
    metadata = entry["metadata"]
    known = f"{entry['answer']} {metadata.get('variable', '')} {metadata.get('integrand', '')}"
    return {name for name in re.findall(r"[A-Za-z]\w*", known) if re.fullmatch(r"[A-Za-z]\d*", name)} | {"C"}


def _is_formula(node: ast.expr, letters: set[str], exponent: float) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Name):
        return node.id in letters or node.id in ("pi", "E")
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd) and _is_formula(node.operand, letters, exponent)
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.keywords or node.func.id not in _FUNCTIONS:
            return False
        least, most = (2, 2) if node.func.id == "Integral" else (1, 1)
        return least <= len(node.args) <= most and all(_is_formula(a, letters, exponent) for a in node.args)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            if isinstance(node.left, ast.Name) and node.left.id == "E":
                return _is_formula(node.right, letters, 1)
            power = _number(node.right)
            return (
                power is not None
                and abs(power) <= exponent
                and _is_formula(node.left, letters, exponent / max(1.0, abs(power)))
            )
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            return _is_formula(node.left, letters, exponent) and _is_formula(node.right, letters, exponent)
    return False


def _number(node: ast.expr) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _number(node.operand)
        return value if value is None or isinstance(node.op, ast.UAdd) else -value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        above, below = _number(node.left), _number(node.right)
        return above / below if above is not None and below else None
    return None


def is_literal(text: str, entry: Entry) -> bool:
    """Lists and tuples of numbers and short texts, nested at most five times."""
    tree = _tree(text)
    return tree is not None and isinstance(tree, ast.List | ast.Tuple) and _is_literal(tree, 5)


def _is_literal(node: ast.expr, depth: int) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return depth > 0 and all(_is_literal(item, depth - 1) for item in node.elts)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float, str)


def is_board(text: str, entry: Entry) -> bool:
    """A board of queens as it is drawn, or as a list."""
    return re.fullmatch(r"[_Q \n]{1,2000}", text) is not None or is_literal(text, entry)


GRAMMARS: dict[str, Callable[[str, Entry], bool]] = {
    "binary_matrix": is_literal,
    "bitwise_arithmetic": lambda text, entry: (
        re.fullmatch(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)", text) is not None
    ),
    "countdown": is_arithmetic,
    "intermediate_integration": is_formula,
    "n_queens": is_board,
    "number_sorting": is_literal,
    "polynomial_multiplication": is_formula,
    "puzzle24": is_arithmetic,
    "simple_integration": is_formula,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
}
"""Of each dataset whose scorer compiles text (an answer or what is computed for it), the answers that may reach it."""


# -- stricter than the library ------------------------------------------------------------------------------------


def _names_numbers(text: str, entry: Entry) -> bool:
    """No "nan", which is unlike any number and so within every distance of it, and no infinity, as numbers."""
    named = re.findall(r"(?<![a-z])(?:nan|inf|infinity)(?:\d*)(?![a-z])", text.lower())
    return not named or all(name in str(entry["answer"]).lower() for name in named)


def _makes_24(text: str, entry: Entry) -> bool:
    """The task's four numbers, each once: the library takes any four numbers of the range."""
    return sorted(int(n) for n in re.findall(r"\d+", text)) == sorted(entry["metadata"]["numbers"])


def _says_whether(text: str, entry: Entry) -> bool:
    """The right one of True and False: the library takes any text for True."""
    return text.lower() == str(entry["answer"]).strip().lower()


def _is_probability(text: str, entry: Entry) -> bool:
    """The number, to four decimals: the library pays in full for the first characters of it, such as "0"."""
    found = re.fullmatch(r"\+?(\d{1,30}|\d{0,30}\.\d{1,30}(?:[eE]-?\d{1,2})?)(?:\s*/\s*(\d{1,30}))?", text)
    if not found or ("." in found[1] and found[2]) or (found[2] and not int(found[2])):
        return False
    value = Fraction(found[1]) / int(found[2] or 1)
    return abs(value - Fraction(str(entry["answer"]).replace(",", ""))) <= Fraction(1, 10_000)


STRICTER: dict[str, Callable[[str, Entry], bool]] = {
    "coin_flip": _is_probability,
    "game_of_life_halting": _says_whether,
    "puzzle24": _makes_24,
}


# -- which datasets compile answers -------------------------------------------------------------------------------

_COMPILING = words(
    """
    eval exec compile parse_expr sympify nsimplify lambdify literal_eval __import__ import_module system popen Popen
    check_output check_call spawn S parse_latex unpickle run_path
    """
)
_LIBRARY = "reasoning_gym"


@lru_cache(maxsize=256)
def compiles_answers(dataset: str) -> bool:
    """Whether a dataset's `score_answer`, or what it may call of the library, compiles text or starts something."""
    return any(
        name in _COMPILING and not (isinstance(node, ast.Attribute) and _is_regex(module, node))
        for node, name, module in _names_on_the_way(dataset)
    )


@lru_cache(maxsize=256)
def reads_settings(dataset: str) -> bool:
    """Whether verdicts may depend on the dataset's options: `score_answer` reads what `__init__` has set."""
    cls = _class_of(dataset)
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls", cls.__name__)
        and not callable(getattr(cls, name, None))
        for node, name, _ in _names_on_the_way(dataset)
    )


def _class_of(dataset: str) -> type:
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise ValueError(f"env.reward: reasoning_gym cannot score {dataset!r:.80}; it has no dataset of that name")
    return DATASETS[dataset][0]


def _names_on_the_way(dataset: str) -> Iterator[tuple[ast.Name | ast.Attribute, str, Any]]:
    """The names that stand in `score_answer` and in what it may call of the library: (node, name, module it is in).

    Read from the source, never run: names are followed through methods, functions and imports of the library, and those
    that lead on are left out.
    """
    cls = _class_of(dataset)
    seen: set[object] = set()
    ahead: list[Any] = [getattr(cls, "score_answer")]  # noqa: B009
    while ahead:
        thing = ahead.pop()
        if thing in seen:
            continue
        seen.add(thing)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
        except (OSError, TypeError, SyntaxError):
            continue
        module = importlib.import_module(thing.__module__)
        for node in ast.walk(tree):
            target = None
            if isinstance(node, ast.Name):
                name = node.id
                target = getattr(module, name, None)
            elif isinstance(node, ast.Attribute):
                name = node.attr
                target = getattr(cls, name, None)
                if isinstance(node.value, ast.Name) and inspect.ismodule(owner := getattr(module, node.value.id, None)):
                    target = getattr(owner, name, None)
            else:
                continue
            if _is_ours(target):
                ahead.append(target)
            else:
                yield node, name, module


def _is_ours(target: Any) -> bool:
    if not (inspect.isfunction(target) or inspect.ismethod(target) or inspect.isclass(target)):
        return False
    return (target.__module__ or "").partition(".")[0] == _LIBRARY


def _is_regex(module: Any, node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and getattr(module, node.value.id, None) is re
