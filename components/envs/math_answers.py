r"""Which answer a completion gives, and whether it is the gold: the text side of the reward `math_verify`.

    completion --delivered--> one answer's text --read--> lists, tuples, unions, matrices, relations of leaves
    leaf: a word, a number as it is written, or a formula

Words and numbers are compared here. A formula is compared by its values at fixed points, which another process computes
(`scorer_process.py`): this file only cuts text, in time linear in its length, and evaluates nothing.

A completion has one answer: the last \boxed{}, else what follows the last "#### ", <answer> or "answer is", else the
whole text if it is nothing but an answer, else the last formula or number of the last sentence. What was delivered in
the first of these forms is the answer, even if it cannot be read: nothing is searched for elsewhere. Several values
("3 or 4") are one answer that equals only the same several values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

MAX_ANSWER_CHARS = 600
MAX_PARTS = 60
"""Of a list, a tuple or a matrix."""


def words(text: str) -> set[str]:
    return set(text.split())


Values = Callable[[Sequence[str]], list[list[str] | None]]
"""For each formula its values at the fixed points, as text that `_number` reads; None where it has none."""

_SPACES = re.compile(r"\s+")
_SIGNS = str.maketrans("−–×·⋅÷’\xa0\u202f", "--***/'  ") | str.maketrans(
    {
        "∪": "\\cup ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "∈": "\\in ",
        "°": "^\\circ ",
        "±": "\\pm ",
        "²": "^{2}",
        "³": "^{3}",
        "θ": "\\theta ",
        "½": "\\frac{1}{2}",
        "√": "\\sqrt ",
    }
)
_COMMANDS = [
    (re.compile(r"\\(?:displaystyle|textstyle|limits|boldsymbol|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])\s*\.?"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"(?<!\\)\\(?:qquad|quad|[,;:! ])"), " "),
    (re.compile(r"\\leq(?:slant)?(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\geq(?:slant)?(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:l|r)vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:lbrace|\{)"), r"\\{"),
    (re.compile(r"\\(?:rbrace|\})"), r"\\}"),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"(?<!\\)\\[$()\[\]]|\$"), ""),
    (re.compile(r"\\%"), "%"),
]
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_RATIO = re.compile(r"([-+]?)\s*(\d+)\s*/\s*([-+]?\d+)")
_FRAC = re.compile(r"([-+]?)\s*\\frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))")
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s*(?:\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s(\d+)\s*/\s*(\d+))")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*")
_CHOICE = re.compile(r"(?:(?:option|choice)\s+)?[(\[]?\s*([A-J])\s*[)\].:]?", re.IGNORECASE)
_RELATION = re.compile(r"<=|>=|!=|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])|[<>=]")
_SPELLED = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
_SEPARATOR = re.compile(r"[,;]\s*(?:and|or)(?![A-Za-z])|[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]*matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_FUNCTIONS = words(
    """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt
    """
)
_GREEK = words("theta alpha beta gamma delta lambda mu phi omega")
_CONSTANTS = {"pi": "\\pi", "infinity": "\\infty", "inf": "\\infty", "oo": "\\infty"} | {n: f"\\{n}" for n in _GREEK}
_NO_UNIT = words(
    """
    and or not no minus plus times over point hundred thousand million billion trillion dozen half third quarter
    tenth hundredth thousandth squared cubed factorial mod to by is x i e but than percent double twice if when for
    with maybe choose base k divided less more
    """
)
_UNITS = dict(
    pair.split(":")
    for pair in words(
        """
        centimeter:cm centimetre:cm meter:m metre:m kilometer:km kilometre:km millimeter:mm gram:g kilogram:kg
        second:s sec:s minute:min hour:h hr:h inche:inch in:inch feet:foot ft:foot pound:lb liter:l litre:l
        degree:deg usd:dollar rs:rupee people:person men:man women:woman children:child
        """
    )
)
_ONE_LETTER_UNITS = set("msghLlNJWVAKCF")
_CURRENCY = {"$": "dollar", "€": "euro", "£": "poundsterling", "¥": "yen", "₹": "rupee"}
_MONEY = re.compile(r"^(?:(-)\s*)?(?:\\)?([$€£¥₹])\s*(-?[\d.][\d.,]*)\s*$")


# -- which answer a completion gives ------------------------------------------------------------------------------


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANCHOR = re.compile(r"####|<answer>|(?<![a-z])(?:final\s+|correct\s+)?answer\s*(?:is|are|:|=)[\s:*]*", re.IGNORECASE)
_BETWEEN_BOXES = re.compile(r"[\s$,;.]*(?:\\text\s*\{)?\s*(?:and|or)?\s*\}?[\s$,;]*")
_WEAK_ANCHOR = re.compile(r"(?<![<>!=\\])=(?!=)|(?<![A-Za-z])(?:is|are|equals|was|were)(?![A-Za-z])", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(((?:[^\\\n]|\\(?!\)))+)\\\)|\\\[((?:[^\\]|\\(?!\]))+)\\\]")
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?[$€£¥₹]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?(?:\s*/\s*\d+)?(?:\s*(?:%|percent))?"
)
_PART_OF_MORE = re.compile(r"[-+*/^_(\[{\\<>]\s*$")
_MULTIPLIED = re.compile(
    r"\s*(?:hundred|thousand|million|billion|trillion|dozen|half|third|quarter|tenth|squared|cubed)"
)
_GOES_ON = re.compile(r"[A-Za-z]*\s*[*/^+_(\[{\\=-]|[A-Za-z]*\d|[xyzabcnk](?![A-Za-z])")
_JOINED = re.compile(r"(?:,|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))\s*$", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:(?<![A-Za-z])(?:not|never|than|neither|nor|except|isn't|aren't)|≠|!=|\\ne)\s*$", re.IGNORECASE
)


def delivered(text: str) -> str | None:
    """The text of the one answer that a completion gives; None where it gives none."""
    boxed = boxes(text)
    if boxed is not None:
        return boxed
    anchors = list(_ANCHOR.finditer(text))
    if anchors:
        return _after_anchor(text[anchors[-1].end() :])
    whole = text.strip()
    if len(whole) <= MAX_ANSWER_CHARS and "\n" not in whole and _is_bare(whole):
        return whole
    return _at_the_end(whole)


def boxes(text: str) -> str | None:
    """The last box; boxes joined by nothing but "and", "or" or a comma are one answer, as a list."""
    found: list[tuple[int, int, str]] = []
    opening = list(_BOX.finditer(text))[-MAX_PARTS:]
    for start in reversed(opening):
        end = _closing(text, start.end())
        if end is None:
            if not found:
                return ""  # a box that was cut off delivers nothing
            break
        if found and not _BETWEEN_BOXES.fullmatch(text[end + 1 : found[-1][0]][:60]):
            break
        found.append((start.start(), end, text[start.end() : end]))
    return ", ".join(reversed([inner for _, _, inner in found])) if found else None


def _closing(text: str, begin: int) -> int | None:
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0) if text[i - 1] != "\\" else 0
        if depth == 0:
            return i
    return None


def _after_anchor(rest: str) -> str | None:
    rest = rest.partition("</answer>")[0].strip()
    line = rest.partition("\n")[0]
    if line.strip() in ("$$", "\\["):  # a displayed formula
        line = re.split(r"\$\$|\\\]", rest[2:], maxsplit=1)[0]
    line = re.split(r"\.\s+(?=[A-Z$\\])|\.\s*$|\s+[Ii] hope\b", line, maxsplit=1)[0].strip()
    return line.strip("* ") or None


def _is_bare(text: str) -> bool:
    """Whether the text is nothing but an answer: no sentence around it."""
    node = read(text)
    return node is not None and not _has_broken(node)


def _has_broken(node: Node) -> bool:
    if isinstance(node, Leaf):
        return node.kind == "broken" or (node.kind == "word" and len(node.text.split()) > 3)
    return any(map(_has_broken, node.parts if isinstance(node, Many) else node.sides))


def _at_the_end(text: str) -> str | None:
    line = text.rstrip("* \n").rpartition("\n")[2].strip()
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", line)[-1].rstrip(".! *")
    formulas = list(_FORMULA.finditer(sentence))
    if formulas:
        parts = [formulas[-1]]
        for earlier in reversed(formulas[:-1]):
            if not _BETWEEN_BOXES.fullmatch(sentence[earlier.end() : parts[-1].start()][:60]):
                break
            parts.append(earlier)
        if _DENIED.search(sentence[: parts[-1].start()]):
            return None
        texts = [next(group for group in part.groups() if group) for part in reversed(parts)]
        texts[0] = texts[0].rpartition("=")[2] if len(texts) == 1 and texts[0].count("=") > 1 else texts[0]
        return ", ".join(texts)
    marks = list(_WEAK_ANCHOR.finditer(sentence))
    if marks:
        rest = sentence[marks[-1].end() :].strip()
        if rest and len(rest) <= MAX_ANSWER_CHARS and _is_bare(rest):
            return rest
    sentence = sentence[-MAX_ANSWER_CHARS:]
    numbers = list(_NUMBER.finditer(sentence))
    if (
        not numbers
        or _PART_OF_MORE.search(sentence[: numbers[-1].start()])
        or _GOES_ON.match(sentence, numbers[-1].end())
    ):
        return None
    if _MULTIPLIED.match(sentence, numbers[-1].end()):
        return None
    first = last = numbers[-1]
    for earlier in reversed(numbers[:-1]):
        between = sentence[earlier.end() : first.start()]
        if not (_JOINED.search(between) and len(between.split()) <= 2):
            break
        first = earlier
    if _DENIED.search(sentence[: first.start()]):
        return None
    return sentence[first.start() : last.end()]


# -- what an answer's text says -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One value. `kind`: word, number, formula or broken; `exact`, `places`: value and decimals of a number."""

    kind: str
    text: str
    exact: Fraction | None = None
    places: int | None = None
    unit: str = ""
    percent: bool = False


@dataclass(frozen=True)
class Many:
    """`kind`: list (any order), tuple, union (any order), matrix (of rows); `brackets`: those of a tuple."""

    kind: str
    parts: tuple[Node, ...]
    brackets: str = ""


@dataclass(frozen=True)
class Relation:
    """sides[0] signs[0] sides[1] signs[1] ..."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]


Node = Leaf | Many | Relation


def read(text: str) -> Node | None:
    """The structure of an answer's text; None where it is empty, too long, or has too many parts."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = plain(text)
    try:
        return _node(text, 0) if text else None
    except _Unreadable:
        return None


class _Unreadable(ValueError):
    pass


def plain(text: str) -> str:
    """The same in fewer ways of writing: no dollars, no sizes, no spaces but between words, "1,234" as 1234."""
    text = text.strip()
    text = re.sub(r"^\*\*(.*)\*\*$", r"\1", text).translate(_SIGNS)
    text = _MONEY.sub(lambda found: f"{found[1] or ''}{found[3]} {_CURRENCY[found[2]]}", text)
    text = re.sub(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))", "", text)
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    for _ in range(3):
        text = _TEXT.sub(lambda found: f" {found.group(1)} ", text)
    text = _SPACES.sub(" ", text).strip()
    text = re.sub(r"(?<!\d)\.$", "", text) if not text.endswith("..") else text
    text = re.sub(r"(?<=\d)\.$", "", text).strip()
    text = re.sub(r"_\{(\w)\}", r"_\1", text)
    return _THOUSANDS.sub(lambda found: found.group(1).replace(",", ""), text) if not _in_brackets(text) else text


def _in_brackets(text: str) -> bool:
    return text[:1] in "([" or text.startswith(("\\{", "{"))


def _node(text: str, depth: int) -> Node:
    text = text.strip()
    if not text or depth > 6:
        raise _Unreadable
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix.group(2)) if row.strip()]
        return _matrix([row.split("&") for row in rows], depth)
    if (choice := _CHOICE.fullmatch(text)) and (len(text) > 1 or text.isupper()):
        return Leaf("word", choice.group(1).upper() if len(text) > 1 else text)
    if text in ("\\emptyset", "\\varnothing", "∅", "\\{\\}", "{}"):
        return Many("list", ())
    pieces = _split(text, re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]])\s*U\s*(?=[(\[])"))
    if len(pieces) > 1:
        return Many("union", tuple(_node(piece, depth + 1) for piece in pieces))
    pieces = _split(text, _SEPARATOR)
    if len(pieces) > 1:
        return _many("list", pieces, depth)
    sides, signs = _cut(text, _RELATION)
    signs = [_SPELLED.get(sign, sign) for sign in signs]
    if signs == ["\\in"]:
        return _node(sides[1], depth + 1)
    if "\\in" in signs:
        raise _Unreadable
    if 1 <= len(signs) <= 4:
        return Relation(tuple(_node(side, depth + 1) for side in sides), tuple(signs))
    inner = _inside(text)
    if inner is not None:
        brackets, content = inner
        pieces = _split(content, re.compile(r"[,;]"))
        if len(pieces) > 1 and brackets != "{}":
            if brackets == "[]" and all((_inside(piece) or ("", ""))[0] == "[]" for piece in pieces):
                return _matrix([_split(_inside(piece)[1], re.compile(",")) for piece in pieces], depth)  # type: ignore[index]
            return _many("tuple", pieces, depth, brackets)
        if brackets == "{}":
            return _many("list", pieces, depth) if len(pieces) > 1 else _node(content, depth + 1)
        if brackets == "()":
            return _node(content, depth + 1)
    signed = _split(text, re.compile(r"\\pm(?![A-Za-z])"))
    if len(signed) == 2:
        head, tail = signed
        return Many("list", (_leaf(f"{head}+{tail}" if head.strip() else tail), _leaf(f"{head}-{tail}")))
    return _leaf(text)


def _many(kind: str, pieces: Sequence[str], depth: int, brackets: str = "") -> Many:
    if len(pieces) > MAX_PARTS:
        raise _Unreadable
    return Many(kind, tuple(_node(piece, depth + 1) for piece in pieces), brackets)


def _matrix(rows: Sequence[Sequence[str]], depth: int) -> Many:
    if len(rows) * max(map(len, rows), default=0) > MAX_PARTS:
        raise _Unreadable
    return Many("matrix", tuple(_many("tuple", row, depth + 1, "[]") for row in rows))


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    return _cut(text, separator)[0]


def _cut(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The pieces between the separators that stand in no brackets, and these."""
    depth, begin, at, pieces, separators = 0, 0, 0, [], []
    while at < len(text):
        if text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            depth -= 1
        elif depth == 0 and (found := separator.match(text, at)) and found.end() > at:
            pieces.append(text[begin:at])
            separators.append(found.group())
            begin = at = found.end()
            continue
        at += 1
    return [*pieces, text[begin:]], separators


def _inside(text: str) -> tuple[str, str] | None:
    r"""("()", "a, b") of "(a, b)"; \{ \} as "{}"; None where no pair of brackets holds all of the text."""
    for opening, closing in (("\\{", "\\}"), ("{", "}"), ("\\langle", "\\rangle")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            content = text[len(opening) : -len(closing)]
            return ("()" if opening == "\\langle" else "{}", content) if _balanced(content) else None
    if text[:1] not in "([" or text[-1:] not in ")]":
        return None
    content = text[1:-1]
    return (text[0] + text[-1], content) if _balanced(content) else None


def _balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += 1 if letter in "([{" else -1 if letter in ")]}" else 0
        if depth < 0:
            return False
    return depth == 0


# -- leaves -------------------------------------------------------------------------------------------------------


def _leaf(text: str) -> Leaf:
    text = text.strip()
    if not text:
        raise _Unreadable
    if words := _WORDS.fullmatch(text):
        names = words.group().replace("-", " ").replace("'", "").split()
        if len(text) > 1 and not (len(names) == 1 and names[0].lower() in _CONSTANTS | dict.fromkeys(_FUNCTIONS)):
            return Leaf("word", " ".join(text.split()))
    percent = False
    if text.endswith("%"):
        text, percent = text[:-1].rstrip(), True
    elif found := re.fullmatch(r"(.*\d\}?)\s*(?:percent|per cent|pct)", text):
        text, percent = found.group(1), True
    number = _literal(text)
    unit = ""
    if number is None:
        text, unit = _unit(text)
        number = _literal(text) if unit else None
    if number is not None:
        exact, places = number
        return Leaf("number", text, exact, places, unit, percent)
    formula = to_latex(text)
    return Leaf("formula" if formula is not None else "broken", formula or text, None, None, unit, percent)


def _literal(text: str) -> tuple[Fraction, int | None] | None:
    """A number as it is written: integer, decimal, fraction, mixed number; and how many decimals it has."""
    text = text.strip()
    if len(text) > 120:
        return None
    if _DECIMAL.fullmatch(text):
        value = Decimal(text)
        exponent = value.as_tuple().exponent
        if not isinstance(exponent, int) or abs(value.adjusted()) > 400:
            return None
        return Fraction(value), (-exponent if "." in text or "e" in text.lower() else None)
    for pattern in (_RATIO, _FRAC, _MIXED):
        if found := pattern.fullmatch(text):
            sign, *groups = found.groups()
            numbers = [int(group) for group in groups if group is not None]
            if numbers[-1] == 0 or (len(numbers) == 3 and numbers[0] == 0):
                return None
            value = Fraction(numbers[-2], numbers[-1]) + (numbers[0] if len(numbers) == 3 else 0)
            return (-value if sign == "-" else value), None
    return None


def _unit(text: str) -> tuple[str, str]:
    """(value, unit): words behind a number, as "5 cm" or "72 apples", and the sign of degrees."""
    if found := re.fullmatch(r"(.*\S)\s*\^\s*\{?\s*\\circ\s*\}?\s*([CF]?)", text):
        return found.group(1), "deg" + found.group(2)
    found = re.fullmatch(r"(.*[\d)}])(\s+)([A-Za-z][A-Za-z .]*(?:/\s*[A-Za-z]+)?(?:\s*\^\s*\{?[23]\}?)?)", text)
    if not found:
        return text, ""
    value, _, unit = found.groups()
    words = re.findall(r"[A-Za-z]+", unit)
    if (
        not words
        or len(words) > 4
        or any(word.lower() in _NO_UNIT | _FUNCTIONS or word in _CONSTANTS for word in words)
    ):
        return text, ""
    if any(len(word) == 1 and word not in _ONE_LETTER_UNITS for word in words):
        return text, ""
    return value, re.sub(r"[A-Za-z]+", lambda word: _same_unit(word.group()), re.sub(r"[ .]+", " ", unit.strip()))


def _same_unit(word: str) -> str:
    lower = word if len(word) <= 2 else word.lower()
    if len(lower) > 2 and lower.endswith("s") and not lower.endswith("ss"):
        lower = lower[:-1]
    return _UNITS.get(lower, lower)


_ALLOWED = _FUNCTIONS | words(
    """
    frac sqrt pi infty cdot times div binom theta alpha beta gamma delta lambda mu phi omega sigma epsilon rho tau
    """
)
_NO_PRODUCT = words(
    """
    so is it we in of to an at as by or if no the and for per not are was has had one two six ten all get mod gcd
    lcm max min det but yes cm mm
    """
)
_TAKES_BRACES = re.compile(r"\\sqrt *(?:\[[^\]]{0,40}\])? *"), re.compile(r"\^ *")
_ARGUMENT = re.compile(r"-?\d+|-?[A-Za-z]")
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]|\d+|[-+*/^_!|(){}\[\].:' ]")


def to_latex(text: str) -> str | None:
    """A formula as LaTeX of a small language: numbers, letters, operators, fractions, roots, powers, common functions.

    None for anything else. What comes out is bounded: no number has more than 60 digits, powers are nested at most
    three times, and brackets twelve times.
    """
    if len(text) > 400 or re.search(r"\d\s+[\d.]|\d_", text):
        return None
    text = _spelled(text)
    depth = powers = at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if not found or found.end() == at:
            return None
        token = found.group()
        if len(token) > 60 or (token[0] == "\\" and token[1:] not in _ALLOWED):
            return None
        depth += 1 if token in "({[" else -1 if token in ")}]" else 0
        powers += token in "^!"
        if not 0 <= depth <= 12:
            return None
        at = found.end()
    nested = re.search(r"\^[^+\-*/=]*\^[^+\-*/=]*\^[^+\-*/=]*\^", text)
    return text if depth == 0 and powers <= 40 and not nested and "!!!" not in text else None


@lru_cache(maxsize=1024)
def written(text: str) -> str:
    """A formula, or any text, with its formulas written in one way: fractions with a stroke, no signs that say nothing.

    It says how something is written, not what it is worth.
    """
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", plain(text))
    text = re.sub(r"\\div(?![A-Za-z])", "/", _spelled(text))
    text = text.replace(" ", "")
    for _ in range(4):  # innermost first
        text = re.sub(r"\^\{(\w+)\}", r"^\1", text)
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", text)
        text = re.sub(r"(?<![\w)}])\((\\?\w+)\)(?![\w(])", r"\1", text)
    text = re.sub(r"\{(\w+)\}", r"\1", text)
    return re.sub(r"(?<!\d)\*|\*(?!\d)", "", text).lstrip("+")


def _spelled(text: str) -> str:
    """Names as commands, one sign for each operation, roots and powers with braces, decimals as fractions."""
    text = text.replace("**", "^").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"(?<![A-Za-z\\])([A-Za-z]{2,})", _named, text)
    text = re.sub(r"\\(?:times|cdot)(?![A-Za-z])", "*", text)
    text = re.sub(r"\\frac *(\d) *(?=[\d{])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\}) *(\d)", r"\1{\2}", text)
    return re.sub(r"(?<![\d.])(\d*)\.(\d+)", _as_fraction, _braced(text))


def _named(found: re.Match[str]) -> str:
    """A word of letters: a function, a constant, or a product of letters."""
    word = found.group(1)
    lower = word.lower()
    if lower in _FUNCTIONS:
        return f"\\{lower} "
    for prefix, name in (("asin", "arcsin"), ("acos", "arccos"), ("atan", "arctan")):
        if lower == prefix:
            return f"\\{name} "
    if lower in _CONSTANTS:
        return f"{_CONSTANTS[lower]} "
    return word if len(word) <= 3 and lower not in _NO_PRODUCT else " ? "  # no token: an English word is no formula


def _braced(text: str) -> str:
    """sqrt(2) as \\sqrt{2}, x^10 as x^{10}, x^(n+1) as x^{n+1}."""
    for command in _TAKES_BRACES:
        opened: list[int] = []
        closing: dict[int, int] = {}
        for bracket in re.finditer(r"[()]", text):
            if bracket.group() == "(":
                opened.append(bracket.start())
            elif opened:
                closing[opened.pop()] = bracket.start()
        out, at = [], 0
        for found in command.finditer(text):
            if found.start() < at:
                continue
            out.append(text[at : found.start()] + found.group().replace(" ", ""))
            at = found.end()
            if at in closing:
                out.append("{" + text[at + 1 : closing[at]] + "}")
                at = closing[at] + 1
            elif argument := _ARGUMENT.match(text, at):
                out.append("{" + argument.group() + "}")
                at = argument.end()
        text = "".join(out) + text[at:]
    return text


def _as_fraction(found: re.Match[str]) -> str:
    whole, decimals = found[1], found[2].rstrip("0")
    if whole and not decimals:
        return whole
    return f"(\\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}})" if len(whole + decimals) <= 40 else "?"
