"""Arithmetic from text, by its syntax tree: no names, no attributes, no calls but those listed, bounded work."""

from __future__ import annotations

import ast
import math
import operator
from typing import Any

MAX_CHARS = 300
MAX_BITS = 4096
"""Whole numbers stay below 2 ** MAX_BITS in every step, so no power or product takes long."""

_BINARY: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
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
    """The value of an expression such as "3 * (4 + 5) ** 2 / sqrt(16)". Raises ValueError for anything else."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"{len(expression)} characters; at most {MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression[:60]!r} is no expression") from None
    except (ZeroDivisionError, OverflowError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def numbers_in(expression: str) -> list[int]:
    """The whole numbers written in an expression, in order. Raises ValueError where it is none."""
    calculate(expression)
    return [n.value for n in ast.walk(ast.parse(expression.strip(), mode="eval")) if isinstance(n, ast.Constant)]  # type: ignore[misc]


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _bounded(function(*(_value(argument) for argument in node.args)))
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        if exponent * abs(base).bit_length() > MAX_BITS:
            raise ValueError("a power too large to calculate")
        if -exponent > MAX_BITS:
            return 0.0
    return _bounded(base**exponent)


def _bounded(value: Any) -> Any:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("a number too large to calculate")
    return value
