"""The script of a scoring process: for each JSON line of formulas, one JSON line with their values.

Started by `guarded.py` as a file, not as a module of the package, so that it imports nothing but the parser (the
package's shared types would load torch). A formula may take any time and memory; here it can be killed.

A formula is parsed by math-verify's LaTeX parser (a grammar, no `eval`) and then only evaluated, in floating point, at
fixed points. sympy's own parser, which does `eval`, is switched off: text that reached it would run.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MAX_CPU_S = 2.0
"""Processor time for one answer after which the kernel ends this process."""

MAX_MEMORY_BYTES = 2**30
"""Beyond what the process has when it is ready."""

MAX_BITS = 4096
MAX_FACTORIAL = 400
_DIGITS = 60
_NUM_POINTS = 3


def values(formulas: Sequence[str]) -> list[list[str] | None]:
    """The values of each LaTeX formula at the fixed points: "p/q 0" if exact, "real imaginary", "oo" or "-oo".

    A formula without letters has one value. None for one that cannot be parsed or has no value at one of the points.
    """
    return [_values(formula) for formula in formulas]


@lru_cache(maxsize=4096)
def _values(formula: str) -> list[str] | None:
    try:
        parsed = parse_latex(formula)
        exact = _exact(parsed)
        if exact is not None:
            return [f"{exact} 0"]
        names = sorted({symbol.name for symbol in parsed.free_symbols} - {"i"})
        return [_at(parsed, point) for point in range(_NUM_POINTS if names else 1)]
    except (Exception, RecursionError):  # whatever a parser makes of a model's text: what cannot be read has no value
        return None


def parse_latex(formula: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    return latex2sympy(
        formula, is_real=None, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
    )


def _exact(node: Any) -> Any:
    """The value of arithmetic with integers, as sympy's Rational; None for anything else or larger than MAX_BITS."""
    import sympy

    if isinstance(node, sympy.Rational):
        return node
    if not isinstance(node, (sympy.Add, sympy.Mul, sympy.Pow, sympy.factorial, sympy.UnevaluatedExpr)):
        return None
    parts = [_exact(part) for part in node.args]
    if any(part is None for part in parts):
        return None
    if isinstance(node, sympy.factorial):
        return sympy.factorial(parts[0]) if parts[0].is_Integer and 0 <= parts[0] <= MAX_FACTORIAL else None
    if isinstance(node, sympy.Pow):
        base, power = parts
        size = max(abs(base.p).bit_length(), base.q.bit_length())
        if not isinstance(power, sympy.Integer) or size * abs(power.p) > MAX_BITS or (base == 0 and power.p <= 0):
            return None
        return base**power
    total = parts[0]
    for part in parts[1:]:
        total = total + part if isinstance(node, sympy.Add) else total * part
        if max(abs(total.p).bit_length(), total.q.bit_length()) > MAX_BITS:
            return None
    return total


def _at(node: Any, point: int) -> str:
    import sympy

    at = {s: sympy.I if s.name == "i" else sympy.Float(_place(s.name, point), _DIGITS + 20) for s in node.free_symbols}
    value = sympy.sympify(node.xreplace(at)).evalf(_DIGITS, maxn=400)
    if value in (sympy.oo, -sympy.oo):
        return str(value)
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        raise ValueError("no number")
    return f"{_decimal(real)} {_decimal(imaginary)}"


def _place(name: str, point: int) -> str:
    """The value of a letter at a point: negative at the second, positive at the others, different for each name."""
    digits = int.from_bytes(hashlib.sha256(f"{name} {point}".encode()).digest()[:8])
    return f"{'-' if point == 1 else ''}{(1, 0, 2)[point]}.{digits % 10**15 + 10**14:015d}"


def _decimal(number: Any) -> str:
    import sympy

    return str(sympy.Float(number, _DIGITS)) if number else "0"


def close_evaluating_parser() -> None:
    """Make sympy parse numbers only: `sympify("...")`, which `Number("...")` calls too, compiles it as Python."""
    import sympy
    from sympy.parsing import sympy_parser

    def numbers_only(text: Any, *_: Any, **__: Any) -> Any:
        if isinstance(text, str) and re.fullmatch(r"[0-9]{1,400}(\.[0-9]{1,400})?", text):
            return sympy.Rational(text)
        raise ValueError("text is not evaluated here")

    sympy_parser.eval_expr = numbers_only
    sympy_parser.parse_expr = numbers_only


def warm_up() -> None:
    """Fill the parser's tables: the first formulas of a process take ten times as long as later ones."""
    values(
        ["x^{2}+\\frac{1}{2}\\sqrt{3}-2", "-\\sin(2x)", "3(x+1)(x-1)", "\\pi*2", "5!", "\\log_{2} 8", "|x|", "2^{10}"]
    )


def main() -> None:
    # Ctrl-C reaches the whole terminal group; the parent closes our stdin instead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers, sys.stdout = sys.stdout, sys.stderr  # a parser that prints must not write into our answers
    warm_up()
    close_evaluating_parser()
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES, size + MAX_MEMORY_BYTES))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF's default action ends us even inside a C loop
        found = values(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
