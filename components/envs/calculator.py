"""Arithmetic from text, by its syntax tree: no names, no attributes, no calls but those listed, bounded work."""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from itertools import accumulate
from typing import Any

MAX_CHARS = 300
MAX_DEPTH = 40
MAX_BITS = 4096
"""Whole numbers stay below 2 ** MAX_BITS in every step, so no power or product takes long."""
_DEPTH = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)
_UNKNOWN = re.compile(r"[^\w\s+\-*/%().,]|__")

_BINARY: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Any] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
    "log": math.log,
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> int | float:
    """The value of an expression such as "3 * (4 + 5) ** 2 / sqrt(16)". Raises ValueError for anything else.

    Costs at most MAX_CHARS operations on numbers of MAX_BITS: the size of each result is known before it is computed.
    """
    return _value(syntax_tree(expression).body)


def syntax_tree(expression: str) -> ast.Expression:
    """The tree of an expression that is short, shallow, and made of known characters. Raises ValueError for others."""
    text = expression.strip()
    if len(text) > MAX_CHARS:
        raise ValueError(f"{len(text)} characters; at most {MAX_CHARS} are allowed")
    # In every order of brackets, because Python's parser may take long to find the fault in deep, broken nests.
    if max(accumulate((_DEPTH.get(letter, 0) for letter in text), initial=0)) > MAX_DEPTH:
        raise ValueError(f"{text[:60]!r} is nested too deep; at most {MAX_DEPTH} brackets are allowed")
    if unknown := _UNKNOWN.search(text):
        raise ValueError(f"{text[:60]!r} is not arithmetic: {unknown.group()!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "1if" and the like, of which Python would print a warning
            return ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text[:60]!r} is no expression") from None


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _number(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _applied(_BINARY[type(node.op)], _value(node.left), _value(node.right))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _applied(function, *(_value(argument) for argument in node.args))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not arithmetic")


def _applied(function: Any, *arguments: int | float) -> int | float:
    """A function or operator on numbers; a result that might be too large is refused before it is computed."""
    size = _SIZES.get(function)
    if size is not None and len(arguments) == 2 and size(*arguments) > MAX_BITS:
        raise ValueError("a number too large to calculate")
    try:
        return _number(function(*arguments))
    except (ZeroDivisionError, OverflowError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _bits(value: int | float) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _power_bits(base: int | float, exponent: int | float) -> float:
    """Of a power; of a negative one too, because Python computes it from the positive one's size."""
    if isinstance(base, float) or isinstance(exponent, float) or abs(base) <= 1:
        return 64
    return math.log2(abs(base)) * abs(exponent) if abs(exponent) <= MAX_BITS else math.inf


_SIZES: dict[Any, Any] = {
    operator.add: lambda a, b: max(_bits(a), _bits(b)) + 1,
    operator.sub: lambda a, b: max(_bits(a), _bits(b)) + 1,
    operator.mul: lambda a, b: _bits(a) + _bits(b),
    operator.pow: _power_bits,
    round: lambda a, digits: 4 * abs(digits),  # Python computes 10 ** digits
}
"""An upper bound of the bits of a result, and of what is computed on the way, from the two arguments.

What is missing gives no more bits than its arguments have, or a float.
"""


def _number(value: Any) -> int | float:
    if type(value) not in (int, float):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("a number too large to calculate")
    return value
