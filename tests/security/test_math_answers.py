# ruff: noqa: E501  (a row of the table is a line)
"""`math_verify`: each value in many ways of writing, right and wrong; several answers at once; text that would run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leeway.envs.guarded import ScorerPool
from leeway.envs.math_compare import is_right

# name -> (ways of writing the same, other values that are near or look alike)
VALUES: dict[str, tuple[list[str], list[str]]] = {
    "integer": (["72", "72.0", "$72$", "\\boxed{72}", "+72", "72."], ["27", "71", "-72", "7", "2", "720", "172", "7.2", "0.72", "72x", "72!", "7 2"]),
    "zero": (["0", "0.0", "-0", "$0$"], ["1", "", "x", "\\emptyset", "00001", "\\infty", "0.1"]),
    "negative": (["-12", "−12", "$-12$", "-12.0", "\\text{-12}"], ["12", "- 1 2", "-1.2", "-21", "(-1)2", "12-"]),
    "thousands": (["1,234", "1234", "1{,}234", "1\\,234", "$1,234$"], ["1.234", "1,235", "1,23", "234", "1, 234", "12,34", "(1,234)"]),
    "million": (["1000000", "1,000,000", "10^6", "10^{6}", "1e6", "1\\times 10^6"], ["100000", "10^7", "10^{5}", "6", "10", "1 million times 2"]),
    "decimal": (["0.5", ".5", "1/2", "\\frac{1}{2}", "\\frac12", "\\dfrac{1}{2}", "0.50", "2^{-1}", "\\frac{2}{4}"], ["5", "0.05", "1/3", "2", "2/1", "0.5x", "-0.5", "\\frac{1}{-2}", "0.4999"]),
    "fraction": (["3/4", "\\frac{3}{4}", "6/8", "0.75", "\\tfrac{3}{4}", "\\frac34", "75%"], ["4/3", "3/5", "34", "-\\frac{3}{4}", "0.57", "\\frac{3}{4}x", "3/4/2", "0.7501"]),
    "third": (["1/3", "\\frac{1}{3}", "\\frac{2}{6}", "0.333333", "3^{-1}"], ["0.33", "0.3", "0.333", "0.334", "0.3333349", "3", "1/4"]),
    "negative fraction": (["-7/3", "-\\frac{7}{3}", "\\frac{-7}{3}", "-2\\frac{1}{3}", "\\frac{7}{-3}"], ["7/3", "-3/7", "-\\frac{7}{4}", "2\\frac{1}{3}", "-2.3"]),
    "mixed number": (["2\\frac{1}{2}", "2 1/2", "5/2", "2.5", "\\frac{5}{2}"], ["2/1/2", "21/2", "1", "2 1/3", "\\frac{21}{2}", "3/2"]),
    "small": (["0.000000001", "10^{-9}", "1e-9", "1\\cdot 10^{-9}"], ["0", "2e-9", "10^{-8}", "10^{-10}", "10^9", "-10^{-9}"]),
    "large": (["2^{100}", "1267650600228229401496703205376", "4^{50}", "2^100"], ["2^{100}+1", "2^{99}", "2^{10}0", "1267650600228229401496703205377", "100^2"]),
    "factorial": (["5!", "120", "5*4*3*2", "\\frac{6!}{6}"], ["5", "6!", "5!!", "24", "(5!)!", "-120"]),
    "percentage": (["50%", "50\\%", "50 percent", "50\\text{ percent}"], ["5%", "500%", "0.05", "0.5%", "51%", "2", "5"]),
    "money": (["$18.00", "\\$18", "18 dollars", "$18"], ["$19", "1.8", "$180", "\\$0.18", "18 cents"]),
    "root": (["sqrt(2)", "\\sqrt{2}", "\\sqrt2", "√2", "2^{1/2}", "2^{0.5}", "1.414214", "\\frac{2}{\\sqrt{2}}"], ["\\sqrt{3}", "2", "\\sqrt[3]{2}", "1.41", "-\\sqrt{2}", "2\\sqrt{2}", "sqrt(2", "1.414"]),
    "root product": (["2\\sqrt{3}", "2*sqrt(3)", "\\sqrt{12}", "2 \\cdot \\sqrt{3}", "\\sqrt{4}\\sqrt{3}"], ["3\\sqrt{2}", "\\sqrt{6}", "\\sqrt{23}", "2+\\sqrt{3}", "2\\sqrt[3]{3}"]),
    "cube root": (["\\sqrt[3]{5}", "5^{1/3}", "5^(1/3)", "5^{\\frac{1}{3}}"], ["\\sqrt{5}", "3\\sqrt{5}", "5^3", "\\sqrt[5]{3}", "5/3"]),
    "root fraction": (["\\frac{\\sqrt{3}}{2}", "sqrt(3)/2", "\\frac{\\sqrt3}{2}", "\\frac{3}{2\\sqrt{3}}", "\\sin(\\frac{\\pi}{3})"], ["\\frac{\\sqrt{2}}{2}", "\\frac{3}{2}", "\\sqrt{\\frac{3}{2}}", "\\frac{2}{\\sqrt{3}}", "\\frac{\\sqrt{3}}{3}"]),
    "pi": (["pi", "\\pi", "π", "$\\pi$", "3.141593", "\\frac{2\\pi}{2}"], ["3.14", "22/7", "2\\pi", "e", "p", "3", "-\\pi", "\\pi^2"]),
    "pi product": (["9\\pi", "9pi", "9*pi", "3^2\\pi", "9 \\pi"], ["9", "\\pi", "6\\pi", "9\\pi^2", "\\pi^9", "28.27", "9+\\pi"]),
    "e": (["e^2", "e^{2}", "\\exp(2)", "exp(2)", "e*e"], ["2e", "e", "2^e", "e^{3}", "E^3", "7.389"]),
    "logarithm": (["\\ln 2", "ln(2)", "\\ln(2)", "\\frac{\\ln 4}{2}"], ["\\ln 3", "\\log_{2} 2", "2", "-\\ln 2", "\\ln(2x)", "\\log 2"]),
    "complex": (["2+3i", "3i+2", "2 + 3i", "(2+3i)"], ["2-3i", "3+2i", "2+3", "5i", "2+3", "-2+3i"]),
    "letter": (["x", "$x$", "\\boxed{x}"], ["y", "X", "2x", "x^2", "-x", "xx"]),
    "sum": (["x+1", "1+x", "\\boxed{x+1}", "$x + 1$", "(x+1)", "\\frac{2x+2}{2}"], ["x-1", "x+2", "y+1", "1", "x", "x1", "X+1", "x+1=0"]),
    "multiple": (["2x", "2*x", "2\\cdot x", "x+x", "2 x"], ["2", "x", "x^2", "3x", "2y", "2+x", "-2x", "2X"]),
    "unknown times": (["5t", "5*t", "t*5"], ["5", "5s", "t", "5m", "5t^2", "5 + t"]),
    "polynomial": (["x^2-1", "(x-1)(x+1)", "x**2 - 1", "-1+x^{2}", "x\\cdot x - 1"], ["x^2+1", "x-1", "(x-1)^2", "x^{21}", "1-x^2", "x^2-1=0", "x^3-1"]),
    "power": (["x^{10}", "x^10", "(x^5)^2", "x^4*x^6"], ["x^1 0", "10x", "x^{11}", "x^{100}", "x^5", "10"]),
    "inverse": (["\\frac{1}{x+1}", "1/(x+1)", "(x+1)^{-1}"], ["1/x+1", "x+1", "\\frac{1}{x-1}", "\\frac{x}{x+1}", "-\\frac{1}{x+1}"]),
    "trigonometric": (["\\sin(2x)", "sin(2x)", "2\\sin(x)\\cos(x)", "\\sin{2x}"], ["\\cos(2x)", "2\\sin(x)", "\\sin(x)", "\\sin(2y)", "\\sin^2(x)"]),
    "absolute": (["|x|", "\\sqrt{x^2}", "\\left|x\\right|", "\\lvert x \\rvert"], ["x", "-x", "|x+1|", "-|x|", "x^2"]),
    "binomial": (["\\binom{5}{2}", "10", "\\frac{5!}{2!3!}"], ["\\binom{5}{1}", "52", "5/2", "20", "\\binom{2}{5}"]),
    "pair": (["(0,1)", "(0, 1)", "\\left(0,1\\right)", "$(0,1)$", "(0,\\frac{2}{2})"], ["(1,0)", "[0,1]", "(0,1]", "(0,2)", "0", "(0,1,2)", "\\{0,1\\}", "(0;2)", "01"]),
    "descending pair": (["(2,1)", "(2, 1)", "\\boxed{(2,1)}"], ["(5,3)", "(1,2)", "(2,2)", "\\emptyset", "2,1", "[2,1]"]),
    "triple": (["(1,2,3)", "(1, 2, 3)", "(1,2,\\frac{6}{2})"], ["(1,3,2)", "(1,2)", "(1,2,3,4)", "123", "[1,2,3]"]),
    "closed interval": (["[0,1]", "[0, 1]", "\\left[0,1\\right]", "0 \\le x \\le 1", "x \\in [0,1]"], ["(0,1)", "[0,1)", "[1,0]", "[0,2]", "0 < x \\le 1", "x\\le 1"]),
    "half-open interval": (["(-2,3]", "(-2, 3]", "-2 < x \\le 3", "-2<x<=3"], ["[-2,3)", "(-2,3)", "[-2,3]", "(2,3]", "x \\le 3"]),
    "ray": (["(3,\\infty)", "(3, infinity)", "x > 3", "3 < x", "(3,+\\infty)", "(3, ∞)"], ["[3,\\infty)", "x < 3", "(-\\infty,3)", "x \\ge 3", "3", "(3,4)"]),
    "union": (["[0,1)\\cup(2,3]", "(2,3]\\cup[0,1)", "[0,1) U (2,3]", "[0,1)∪(2,3]"], ["[0,1)", "[0,1]\\cup(2,3]", "[0,1)\\cap(2,3]", "[0,3]", "[0,1)\\cup(2,4]"]),
    "roots": (["3,4", "4,3", "3, 4", "3 and 4", "3 or 4", "\\{3,4\\}", "x=3,4", "x = 3 or x = 4", "3\\text{ and }4"], ["3", "4", "3,5", "3,4,5", "34", "3,3", "(4,3)", "3.4", "-3,4", "x=3", "3,4,4"]),
    "set of three": (["\\{1,2,3\\}", "{1,2,3}", "3, 2, 1", "\\{3,1,2\\}"], ["\\{1,2\\}", "\\{1,2,3,4\\}", "(1,2,3)", "123", "\\{1,2,2\\}"]),
    "plus or minus": (["\\pm 2", "-2, 2", "2,-2", "±2", "\\{-2,2\\}"], ["2", "-2", "\\pm 3", "0", "2,2", "\\pm 2, 3"]),
    "conjugates": (["3\\pm\\sqrt{2}", "3+\\sqrt{2}, 3-\\sqrt{2}", "3-\\sqrt2 and 3+\\sqrt2"], ["3+\\sqrt{2}", "3\\pm\\sqrt{3}", "2\\pm\\sqrt{3}", "-3\\pm\\sqrt{2}"]),
    "empty set": (["\\emptyset", "\\varnothing", "∅", "\\{\\}"], ["0", "\\{0\\}", "1", "x"]),
    "matrix": (["\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}", "[[1,2],[3,4]]", "\\begin{pmatrix}1&2\\\\3&\\frac{8}{2}\\end{pmatrix}"], ["\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", "[1,2,3,4]", "\\begin{pmatrix}1&2\\end{pmatrix}", "-2"]),
    "column": (["\\begin{pmatrix} 1 \\\\ -2 \\end{pmatrix}", "\\begin{bmatrix}1\\\\-2\\end{bmatrix}"], ["\\begin{pmatrix} 1 & -2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1,2)"]),
    "assignment": (["x=5", "x = 5", "5", "$x=5$", "5 = x", "x=\\frac{10}{2}"], ["x=6", "6", "x+1=5", "2x=5", "7=5", "x=5,6", "x>5", "x \\ne 5"]),
    "two assignments": (["x=1, y=2", "y=2, x=1", "x=1,y=2", "(1,2)"], ["x=2, y=1", "2, 1", "(2,1)", "x=1", "x=1, y=3", "1"]),
    "line": (["y=2x+1", "y = 1+2x", "2x-y+1=0", "y-1=2x", "2y=4x+2", "-y = -2x-1"], ["y=2x-1", "y=x+1", "y=2x", "x=2y+1", "y>2x+1", "1"]),
    "circle": (["x^2+y^2=4", "y^2+x^2=4", "2x^2+2y^2=8", "4 = x^2+y^2"], ["x^2+y^2=2", "x^2-y^2=4", "x+y=4", "4", "x^2+y^2"]),
    "inequality": (["x<3", "3>x", "x \\lt 3", "(-\\infty,3)"], ["x>3", "x\\le 3", "x<4", "3", "x=3", "3<x", "(-\\infty,3]"]),
    "scaled inequality": (["2x<6", "x<3", "-x>-3", "6>2x", "x-3<0"], ["2x>6", "-x<-3", "x<6", "2x\\le 6", "2x=6"]),
    "different": (["x\\ne 2", "x \\neq 2", "2 \\ne x", "x != 2"], ["x=2", "2", "x<2", "x\\ne 3"]),
    "length": (["5 cm", "5\\text{ cm}", "5\\,\\mathrm{cm}", "5 centimeters"], ["5 m", "5 mm", "6 cm", "5 cm^2", "50 cm", "5 thousand cm"]),
    "speed": (["60 km/h", "60\\text{ km/h}", "60 kilometers/hour"], ["60 m/s", "6 km/h", "60 km", "61"]),
    "people": (["12 students", "12\\text{ students}", "12 student"], ["13 students", "12 teachers", "students", "1 2"]),
    "angle": (["45^\\circ", "45°", "45^{\\circ}", "45 degrees"], ["54^\\circ", "4.5", "\\frac{\\pi}{5}", "45 minutes"]),
    "choice": (["A", "(A)", "\\text{A}", "\\textbf{(A)}", "A.", "A)", "option A"], ["B", "(B)", "AB", "A or B", "A, B", "any", "a b", "D", "An apple"]),
    "last choice": (["E", "(E)", "\\text{(E)}", "$\\text{E}$"], ["e", "D", "A, B, C, D, E", "E or D", "2.718282"]),
    "truth": (["True", "true", "\\text{True}", "TRUE"], ["False", "Not true", "T", "true or false", "1", "Untrue"]),
    "no": (["No", "no", "\\text{No}", "no."], ["Yes", "yes or no", "not", "none", "N"]),
    "word": (["Monday", "monday", "\\text{Monday}"], ["Tuesday", "Monday or Tuesday", "Mon", "day", "Mondays", "not Monday"]),
    "two words": (["no solution", "No solution", "\\text{no solution}"], ["solution", "one solution", "no", "no solution or 3"]),
    "name": (["Evelyn", "\\text{Evelyn}", "evelyn"], ["Eve", "Evelyn and Bob", "Bob"]),
    "ratio": (["3:4", "3 : 4", "$3:4$"], ["4:3", "3:5", "34", "3,4"]),
    "base": (["1011_2", "1011_{2}", "$1011_2$"], ["1011", "11", "1011_3", "1010_2", "10112"]),
    "function": (["f(x)=2x", "f(x) = 2x", "f(x)=x+x"], ["f(x)=3x", "g(x)=2x", "f(x)=2", "f(y)=2x", "2"]),
    "subscripts": (["x_1+x_2", "x_2+x_1", "x_{1} + x_{2}"], ["x_1", "x_1-x_2", "2x", "x_1+x_3", "12"]),
    "greek": (["\\frac{\\theta}{2}", "theta/2", "0.5\\theta"], ["\\theta", "2\\theta", "\\frac{\\alpha}{2}", "1/2"]),
    "infinity": (["\\infty", "infinity", "∞", "+\\infty"], ["-\\infty", "0", "10^{100}", "x", "1"]),
    "repeating": (["0.\\overline{3}"], ["0.3", "3", "0.\\overline{6}"]),
    "sum sign": (["\\sum_{k=1}^{n} k"], ["n", "k", "\\sum_{k=1}^{m} k"]),
}  # fmt: skip
DELIVERED = [
    "{}",
    "\\boxed{{{}}}",
    "We find that it holds for 8 of 9.\nThe answer is {}",
    "First, 3+4=7.\n\n#### {}",
    "Let $a=3$. Then $b = 11$ and so $\\boxed{{{}}}$.",
    "<answer>{}</answer>",
]
"""Ways to hand in an answer; those in which the writing itself says what belongs to it."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ScorerPool]:
    pool = ScorerPool(num_workers=1)
    yield pool
    pool.close()


def wrapped(number: int, writing: str) -> str:
    if "\\boxed" in writing:
        return writing
    return DELIVERED[number % len(DELIVERED)].format(writing)


def test_there_are_a_thousand_pairs_and_more() -> None:
    right = sum(len(right) ** 2 for right, _ in VALUES.values())
    wrong = sum(len(right) * len(wrong) for right, wrong in VALUES.values())
    assert right > 1000
    assert wrong > 1400


@pytest.mark.honest("mathematics", cases=2)
@pytest.mark.parametrize("name", VALUES)
def test_the_same_value_pays_in_each_writing(name: str, pool: ScorerPool) -> None:
    right, _ = VALUES[name]
    for number, gold in enumerate(right):
        for place, answer in enumerate(right):
            text = wrapped(number + place, answer)
            assert is_right(gold, text, pool.values), (gold, text)


@pytest.mark.attack
@pytest.mark.parametrize("name", VALUES)
def test_another_value_pays_in_no_writing(name: str, pool: ScorerPool) -> None:
    right, wrong = VALUES[name]
    for number, gold in enumerate(right):
        for place, answer in enumerate(wrong):
            text = wrapped(number + place, answer)
            assert not is_right(gold, text, pool.values), (gold, text)
