"""Whether the answer of a completion is the gold answer: the comparing side of the reward `math_verify`.

What is equal: numbers by value (a decimal with six digits or more may stand for a number that it rounds or cuts off);
formulas by their values at fixed points; lists, sets and unions in any order; tuples and intervals with the same
brackets, in order; equations and inequalities that differ by a factor; "x = 5" and 5; "5 cm" and 5, not 5 m;
50% and 50 and 0.5; words apart from case. Everything else is equal only if it is written the same, apart from spaces.

An answer must also be finished. It must be evaluated as far as the gold: 12*7+3 and 174/2 are not 87, and 2x < 6 is
not x < 3. And it must say more than the question: (x-1)(x+1) is not x^2-1 where that is what was to be expanded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Context, Decimal, Overflow
from fractions import Fraction
from functools import lru_cache
from typing import cast

from .math_answers import FLIPPED, Leaf, Many, Node, Relation, Values, boxes, delivered, plain, read, to_latex, written

_CONTEXT = Context(prec=60, Emax=10**12, Emin=-(10**12))
_TOLERANCE = Decimal("1e-40")
_MIN_DIGITS = 6
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?|[A-Za-z]\([A-Za-z]\)")

Point = str | Fraction | tuple[Decimal, Decimal]
"""A formula's value at one of the points: exact, as (real, imaginary), or the name of an infinity."""


_POWER = r"\^(?:\d+|\{-\d+\})"
_BASE = r"(?:\d+|\([-+]?\d+(?:/\d+)?\))"
_EVALUATED = re.compile(rf"[-+]?(?:{_BASE}(?:{_POWER})?|{_BASE}\*?10{_POWER}|\d+!!?|\\binom\d+)")
"""As `written`: what may stand for a number besides its digits. One power, a power of ten times a number, a factorial,
a binomial coefficient."""
_OF_POWERS = re.compile(rf"[-+]?\(?\d+(?:{_POWER})?\)?/\(?\d+(?:{_POWER})?\)?")
MAX_QUESTION_CHARS = 20_000


def is_right(gold: str, completion: str, values: Values, question: str = "") -> bool:
    """Whether `completion` gives the answer `gold`. `values` is called at most twice, for formulas only."""
    gold = gold_text(gold)
    if not gold:
        return False
    wanted = _squeezed(gold)
    if _squeezed(completion[-4 * len(gold) - 100 :] if len(completion) > 4 * len(gold) + 100 else completion) == wanted:
        return True
    answer = delivered(completion)
    if answer is None:
        return False
    if _squeezed(answer) == wanted:
        return True
    first, second = read(gold), read(answer)
    if first is None or second is None:
        return False
    if isinstance(first, Relation) and isinstance(second, Relation) and _repeats(answer, gold, question):
        return False
    return _Comparison(first, second, values, question).same(first, second)


@lru_cache(maxsize=4096)
def gold_text(gold: str) -> str:
    r"""The answer in a task's answer: what is in its last \boxed{}, or what its last "answer is" says, or all of it."""
    found = boxes(gold)
    if found is None and ("####" in gold or len(gold.split()) > 2):
        found = delivered(gold) if re.search(r"####|answer\s*(?:is|:)", gold, re.IGNORECASE) else None
    return (gold if found is None else found).strip()


def _squeezed(text: str) -> str:
    """Without spaces that mean nothing: those not between two letters or digits."""
    return re.sub(r" (?=\W)|(?<=\W) ", "", plain(text))


class _Comparison:
    """Compares two answers; the values of all formulas in them are computed once, in advance."""

    def __init__(self, first: Node, second: Node, values: Values, question: str) -> None:
        self._question = question
        self._values: dict[str, list[Point] | None] = {}
        gold, answer = (list(dict.fromkeys(_formulas(node))) for node in (first, second))
        if not gold and not answer:
            return
        for texts in (tuple(gold), tuple(text for text in answer if text not in gold)):
            if texts:
                self._values |= {t: _points(v) for t, v in zip(texts, values(texts), strict=True)}

    def same(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self._same_relation(gold, answer)
        if isinstance(gold, Many) and isinstance(answer, Many):
            return self._same_many(gold, answer)
        if isinstance(gold, Leaf) and isinstance(answer, Leaf):
            return self._same_leaf(gold, answer) and self._is_finished(gold, answer)
        return False

    # -- many values

    def _same_many(self, gold: Many, answer: Many) -> bool:
        if gold.kind != answer.kind:
            named, other = (gold, answer) if gold.kind == "list" else (answer, gold)
            if named.kind != "list" or other.brackets != "()" or not self._names(named):
                return False  # "x = 1, y = 2" is (1, 2)
            return self._in_order(_by_name(named.parts), other.parts)
        if len(gold.parts) != len(answer.parts) or gold.brackets != answer.brackets:
            return False
        if gold.kind in ("tuple", "matrix"):
            return self._in_order(gold.parts, answer.parts)
        first, second = _one_name(gold.parts), _one_name(answer.parts)
        names = self._names(gold), self._names(answer)
        if bool(names[0]) != bool(names[1]) and len({*names[0], *names[1]}) > 1:
            # Only one of them says which value is whose; in the other the order says it, as that of the names.
            return self._in_order(_by_name(first), second) if names[0] else self._in_order(first, _by_name(second))
        return self._in_any_order(first, second)

    def _in_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        return len(gold) == len(answer) and all(map(self.same, gold, answer))

    def _in_any_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        left = list(answer)
        for part in gold:
            found = next((i for i, other in enumerate(left) if self.same(part, other)), None)
            if found is None:
                return False
            del left[found]
        return not left

    def _names(self, many: Many) -> list[str]:
        """The left sides of a list of assignments; [] where it is none."""
        names = [_name_of(part) for part in many.parts]
        return [] if None in names else cast("list[str]", names)

    # -- equations and inequalities

    def _same_relation(self, gold: Node, answer: Node) -> bool:
        gold, answer = self._shortened(gold), self._shortened(answer)
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._same_relations(gold, answer)
        if isinstance(gold, Many) or isinstance(answer, Many):
            first, second = (_as_interval(node) if isinstance(node, Relation) else node for node in (gold, answer))
            return isinstance(first, Many) and isinstance(second, Many) and self._same_many(first, second)
        relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
        if not isinstance(relation, Relation):
            return self.same(gold, answer)
        if _name_of(relation) is None:
            return False
        value = _unnamed(relation)
        return self.same(value, other) if relation is gold else self.same(other, value)

    def _shortened(self, node: Node) -> Node:
        """A chain of equalities as its two ends; one without a name, if it is true, as its value."""
        if not isinstance(node, Relation) or set(node.signs) != {"="}:
            return node
        name = node.sides[0] if len(node.sides) > 2 and _is_name(node.sides[0]) else None
        if name is None and _name_of(node) is not None:
            return node
        values = [side for side in node.sides if side is not name]
        if not all(isinstance(value, Leaf) and self._same_leaf(cast(Leaf, values[-1]), value) for value in values):
            return node
        result = next((value for value in reversed(values) if cast(Leaf, value).exact is not None), values[-1])
        return result if name is None else Relation((name, result), ("=",))

    def _same_relations(self, gold: Relation, answer: Relation) -> bool:
        flipped = tuple(FLIPPED[sign] for sign in reversed(gold.signs))
        if gold.signs == answer.signs and self._in_order(gold.sides, answer.sides):
            return True
        if flipped == answer.signs and self._in_order(gold.sides[::-1], answer.sides):
            return True
        if len(gold.signs) != 1 or len(answer.signs) != 1 or _is_solved(gold):
            return False
        factor = self._factor(gold, answer)
        if factor is None:
            return False
        if gold.signs[0] in ("=", "\\ne"):
            return gold.signs == answer.signs
        return (gold.signs if factor > 0 else flipped) == answer.signs

    def _factor(self, gold: Relation, answer: Relation) -> Decimal | None:
        """The constant real k with (left - right of gold) = k (left - right of answer); None if there is none."""
        first, second = (self._values.get(_difference(relation) or "") for relation in (gold, answer))
        if not first or not second or len(first) != len(second) or len(first) < 3:
            return None
        ratios = []
        for a, b in zip(first, second, strict=True):
            if not isinstance(a, tuple) or not isinstance(b, tuple) or a[1] or b[1] or not a[0] or not b[0]:
                return None
            ratios.append(_CONTEXT.divide(a[0], b[0]))
        return ratios[0] if all(_close(ratio, ratios[0]) for ratio in ratios) else None

    # -- one value

    def _same_leaf(self, gold: Leaf, answer: Leaf) -> bool:
        if gold.kind == answer.kind and gold.kind in ("word", "broken"):
            return _same_word(gold.text, answer.text) and gold.unit == answer.unit and gold.percent == answer.percent
        if "word" in (gold.kind, answer.kind) or "broken" in (gold.kind, answer.kind):
            return False
        if gold.unit and answer.unit and gold.unit != answer.unit:
            return False
        if (gold.unit or answer.unit) and gold.percent != answer.percent:
            return False
        if gold.exact is not None and answer.exact is not None:
            return _same_number(gold, answer)
        if gold.percent != answer.percent:
            return False
        return self._same_formula(gold, answer)

    def _same_formula(self, gold: Leaf, answer: Leaf) -> bool:
        if gold.text.replace(" ", "").lstrip("+") == answer.text.replace(" ", "").lstrip("+"):
            return True
        first, second = self._at_points(gold), self._at_points(answer)
        if not first or not second:
            return False
        for number, other in ((gold, second), (answer, first)):
            if number.places is not None and len(other) == 1 and _rounds_to(other[0], number):
                return True
        if len(first) != len(second):  # one has no letters
            first, second = first * len(second), second * len(first)
        return all(map(_same_point, first, second))

    def _is_finished(self, gold: Leaf, answer: Leaf) -> bool:
        """Whether an answer of the gold's value is evaluated as far, and does not repeat the question."""
        if gold.kind in ("word", "broken"):
            return True
        first, second = ((self._at_points(leaf) or [""])[0] for leaf in (gold, answer))
        if (
            isinstance(first, Fraction)
            and _same_point(first, second)  # neither rounds the other
            and _is_evaluated(gold, first)
            and not _is_evaluated(answer, first)
        ):
            return False
        in_digits = all(leaf.kind == "number" and not _is_quotient(leaf) for leaf in (gold, answer))
        if in_digits and gold.percent == answer.percent:
            return True
        return not _repeats(answer.text + "%" * answer.percent, gold.text + "%" * gold.percent, self._question)

    def _at_points(self, leaf: Leaf) -> list[Point] | None:
        if leaf.exact is None:
            return self._values.get(leaf.text)
        return [leaf.exact]


def _as_interval(relation: Relation) -> Many | None:
    """(2, 5] of "2 < x <= 5", (3, infinity) of "x > 3"."""
    sides, signs = relation.sides, relation.signs
    if signs[0] in (">", "\\ge"):
        sides, signs = sides[::-1], tuple(FLIPPED[sign] for sign in reversed(signs))
    if any(sign not in ("<", "\\le") for sign in signs):
        return None
    if len(signs) == 2 and _is_name(sides[1]):
        ends = (sides[0], sides[2])
    elif len(signs) == 1 and _is_name(sides[0]):
        ends, signs = (Leaf("formula", "-\\infty"), sides[1]), ("<", *signs)
    elif len(signs) == 1 and _is_name(sides[1]):
        ends, signs = (sides[0], Leaf("formula", "\\infty")), (*signs, "<")
    else:
        return None
    return Many("tuple", ends, ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"))


def _is_evaluated(leaf: Leaf, value: Fraction) -> bool:
    """Whether a leaf of this value is the number itself, or what may stand for it."""
    if leaf.exact is not None:
        return leaf.exact.denominator != 1 or not _is_quotient(leaf)
    text = written(leaf.text)
    return bool(_EVALUATED.fullmatch(text) or (value.denominator != 1 and _OF_POWERS.fullmatch(text)))


def _is_quotient(leaf: Leaf) -> bool:
    return "/" in leaf.text or "frac" in leaf.text


def _repeats(answer: str, gold: str, question: str) -> bool:
    """Whether an answer stands in the question, where the gold is written in another way."""
    text, asked = written(answer), written(question[-MAX_QUESTION_CHARS:])
    if text == written(gold) or not re.search(r"[^\w ?]", text):
        return False
    if not re.search("[a-z]", text):  # (-2)^10 is 2^10, and -6/-36 is 6/36
        text, asked = (re.sub(r"[-+(){}]", "", each) for each in (text, asked))
    return re.search(rf"(?<![\w.]){re.escape(text)}(?![\w^!]|\.\d)", asked) is not None


def _is_solved(relation: Relation) -> bool:
    """Whether it says what a name is, or is not, without another letter."""
    for name, value in (relation.sides, relation.sides[::-1]):
        if _is_name(name) and isinstance(value, Leaf) and not re.search(r"(?<![\\A-Za-z])[A-Za-z]", value.text):
            return True
    return False


def _formulas(node: Node) -> list[str]:
    if isinstance(node, Leaf):
        return [node.text] if node.kind == "formula" else []
    parts = node.parts if isinstance(node, Many) else node.sides
    found = [text for part in parts for text in _formulas(part)]
    difference = _difference(node) if isinstance(node, Relation) else None
    return [*found, difference] if difference else found


def _difference(relation: Relation) -> str | None:
    sides = relation.sides
    if len(sides) != 2 or not all(isinstance(side, Leaf) for side in sides):
        return None
    return to_latex("-".join(f"({cast(Leaf, side).text})" for side in sides))


def _is_name(node: Node) -> bool:
    if not isinstance(node, Leaf):
        return False
    return node.kind == "word" or bool(_NAME.fullmatch(node.text)) or (node.kind == "broken" and "=" not in node.text)


def _name_of(node: Node) -> str | None:
    """ "x" of the assignment "x = 5"."""
    if not isinstance(node, Relation) or node.signs != ("=",):
        return None
    for side in node.sides:
        if _is_name(side):
            return cast(Leaf, side).text
    return None


def _unnamed(node: Node) -> Node:
    if not isinstance(node, Relation) or _name_of(node) is None:
        return node
    return node.sides[1] if _is_name(node.sides[0]) else node.sides[0]


def _by_name(parts: Sequence[Node]) -> list[Node]:
    return [_unnamed(part) for part in sorted(parts, key=lambda part: _name_of(part) or "")]


def _one_name(parts: Sequence[Node]) -> Sequence[Node]:
    """ "x = 1, 2" as "x = 1, x = 2": without the name, if there is only one."""
    names = {name for part in parts if (name := _name_of(part)) is not None}
    return [_unnamed(part) for part in parts] if len(names) == 1 else parts


def _same_word(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    return (len(gold) > 2 or gold.lower() == "no") and gold.casefold() == answer.casefold()


def _same_number(gold: Leaf, answer: Leaf) -> bool:
    first, second = cast(Fraction, gold.exact), cast(Fraction, answer.exact)
    if gold.percent == answer.percent:
        return _equal_or_rounded(gold, answer)
    percent, number = (first, second) if gold.percent else (second, first)
    return percent / 100 == number or (percent == number and abs(number) > 1)  # 50% for 0.5, and for 50


def _equal_or_rounded(gold: Leaf, answer: Leaf) -> bool:
    first, second = cast(Fraction, gold.exact), cast(Fraction, answer.exact)
    if first == second:
        return True
    if gold.places is not None and answer.places is not None:
        if gold.places == answer.places:
            return False
        coarse, fine = (gold, answer) if gold.places < answer.places else (answer, gold)
        value, step = cast(Fraction, fine.exact), Fraction(1, 10 ** cast(int, coarse.places))
        return _digits(coarse) >= _MIN_DIGITS and abs(value - cast(Fraction, coarse.exact)) * 2 <= step
    return any(
        number.places is not None and _rounds_to(other, number) for number, other in ((gold, second), (answer, first))
    )


def _rounds_to(value: Point, decimal: Leaf) -> bool:
    """Whether a decimal with enough digits is `value`, rounded or cut off in its last place."""
    if isinstance(value, tuple) and not value[1] and abs(value[0].adjusted()) < 100:
        value = Fraction(value[0])
    if not isinstance(value, Fraction) or _digits(decimal) < _MIN_DIGITS:
        return False
    return abs(value - cast(Fraction, decimal.exact)) < Fraction(10) ** -cast(int, decimal.places)


def _digits(decimal: Leaf) -> int:
    return len(re.sub(r"[eE].*|\D", "", decimal.text).lstrip("0"))


def _points(values: list[str] | None) -> list[Point] | None:
    try:
        return None if values is None else [_point(*value.split()) for value in values]
    except Overflow:  # "(10^{60})!": it has no value here
        return None


def _point(real: str, imaginary: str | None = None) -> Point:
    if imaginary is None:
        return real
    if "." not in real and imaginary == "0":
        return Fraction(real)
    return _CONTEXT.create_decimal(real), _CONTEXT.create_decimal(imaginary)


def _same_point(first: Point, second: Point) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    (a, b), (c, d) = _complex(first), _complex(second)
    return _close(a, c, b.copy_abs()) and _close(b, d, a.copy_abs())


def _complex(point: Fraction | tuple[Decimal, Decimal]) -> tuple[Decimal, Decimal]:
    if isinstance(point, tuple):
        return point
    return _CONTEXT.divide(Decimal(point.numerator), Decimal(point.denominator)), Decimal(0)


def _close(first: Decimal, second: Decimal, beside: Decimal = Decimal(0)) -> bool:
    """Equal to 40 digits of the larger, or of the other part of a complex number."""
    # Not abs(): it rounds in the context of the thread, whose exponents end at a million.
    size = max(first.copy_abs(), second.copy_abs(), beside)
    return _CONTEXT.subtract(first, second).copy_abs() <= _CONTEXT.multiply(_TOLERANCE, size)
