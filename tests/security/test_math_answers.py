# ruff: noqa: E501  (a row of the table is a line)
"""`math_verify`: each value in many ways of writing, right and wrong; several answers at once; text that would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from leeway.envs.guarded import ScorerPool
from leeway.envs.math_compare import is_right
from leeway.envs.rewards import math_verify
from leeway.types import Message, Task

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
    "factorial": (["5!", "120"], ["5", "6!", "5!!", "24", "(5!)!", "-120"]),
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
    "binomial": (["\\binom{5}{2}", "10"], ["\\binom{5}{1}", "52", "5/2", "20", "\\binom{2}{5}"]),
    "pair": (["(0,1)", "(0, 1)", "\\left(0,1\\right)", "$(0,1)$"], ["(1,0)", "[0,1]", "(0,1]", "(0,2)", "0", "(0,1,2)", "\\{0,1\\}", "(0;2)", "01"]),
    "descending pair": (["(2,1)", "(2, 1)", "\\boxed{(2,1)}"], ["(5,3)", "(1,2)", "(2,2)", "\\emptyset", "2,1", "[2,1]"]),
    "triple": (["(1,2,3)", "(1, 2, 3)"], ["(1,3,2)", "(1,2)", "(1,2,3,4)", "123", "[1,2,3]"]),
    "closed interval": (["[0,1]", "[0, 1]", "\\left[0,1\\right]", "0 \\le x \\le 1", "x \\in [0,1]"], ["(0,1)", "[0,1)", "[1,0]", "[0,2]", "0 < x \\le 1", "x\\le 1"]),
    "half-open interval": (["(-2,3]", "(-2, 3]", "-2 < x \\le 3", "-2<x<=3"], ["[-2,3)", "(-2,3)", "[-2,3]", "(2,3]", "x \\le 3"]),
    "ray": (["(3,\\infty)", "(3, infinity)", "x > 3", "3 < x", "(3,+\\infty)", "(3, ∞)"], ["[3,\\infty)", "x < 3", "(-\\infty,3)", "x \\ge 3", "3", "(3,4)"]),
    "union": (["[0,1)\\cup(2,3]", "(2,3]\\cup[0,1)", "[0,1) U (2,3]", "[0,1)∪(2,3]"], ["[0,1)", "[0,1]\\cup(2,3]", "[0,1)\\cap(2,3]", "[0,3]", "[0,1)\\cup(2,4]"]),
    "roots": (["3,4", "4,3", "3, 4", "3 and 4", "3 or 4", "\\{3,4\\}", "x=3,4", "x = 3 or x = 4", "3\\text{ and }4"], ["3", "4", "3,5", "3,4,5", "34", "3,3", "(4,3)", "3.4", "-3,4", "x=3", "3,4,4"]),
    "set of three": (["\\{1,2,3\\}", "{1,2,3}", "3, 2, 1", "\\{3,1,2\\}"], ["\\{1,2\\}", "\\{1,2,3,4\\}", "(1,2,3)", "123", "\\{1,2,2\\}"]),
    "plus or minus": (["\\pm 2", "-2, 2", "2,-2", "±2", "\\{-2,2\\}"], ["2", "-2", "\\pm 3", "0", "2,2", "\\pm 2, 3"]),
    "conjugates": (["3\\pm\\sqrt{2}", "3+\\sqrt{2}, 3-\\sqrt{2}", "3-\\sqrt2 and 3+\\sqrt2"], ["3+\\sqrt{2}", "3\\pm\\sqrt{3}", "2\\pm\\sqrt{3}", "-3\\pm\\sqrt{2}"]),
    "empty set": (["\\emptyset", "\\varnothing", "∅", "\\{\\}"], ["0", "\\{0\\}", "1", "x"]),
    "matrix": (["\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}", "[[1,2],[3,4]]"], ["\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", "[1,2,3,4]", "\\begin{pmatrix}1&2\\end{pmatrix}", "-2"]),
    "column": (["\\begin{pmatrix} 1 \\\\ -2 \\end{pmatrix}", "\\begin{bmatrix}1\\\\-2\\end{bmatrix}"], ["\\begin{pmatrix} 1 & -2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1,2)"]),
    "assignment": (["x=5", "x = 5", "5", "$x=5$", "5 = x"], ["x=6", "6", "x+1=5", "2x=5", "7=5", "x=5,6", "x>5", "x \\ne 5"]),
    "two assignments": (["x=1, y=2", "y=2, x=1", "x=1,y=2", "(1,2)"], ["x=2, y=1", "2, 1", "(2,1)", "x=1", "x=1, y=3", "1"]),
    "line": (["y=2x+1", "y = 1+2x", "2x-y+1=0", "y-1=2x", "2y=4x+2", "-y = -2x-1"], ["y=2x-1", "y=x+1", "y=2x", "x=2y+1", "y>2x+1", "1"]),
    "circle": (["x^2+y^2=4", "y^2+x^2=4", "2x^2+2y^2=8", "4 = x^2+y^2"], ["x^2+y^2=2", "x^2-y^2=4", "x+y=4", "4", "x^2+y^2"]),
    "inequality": (["x<3", "3>x", "x \\lt 3", "(-\\infty,3)"], ["x>3", "x\\le 3", "x<4", "3", "x=3", "3<x", "(-\\infty,3]"]),
    "solution": (["x<3", "3>x"], ["x>3", "2x<3", "x<2", "3"]),
    "scaled inequality": (["2x<6", "-x>-3", "6>2x", "x-3<0"], ["2x>6", "-x<-3", "x<6", "2x\\le 6", "2x=6"]),
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
UNFINISHED: dict[str, list[str]] = {
    "factorial": ["5*4*3*2", "\\frac{6!}{6}", "100+20", "5!*1", "(5)(24)", "\\frac{240}{2}", "240/2", "\\sqrt{14400}", "|-120|", "2^3*15"],
    "binomial": ["\\frac{5!}{2!3!}", "4+3+2+1", "\\frac{5*4}{2}", "20/2", "\\log_{2} 1024", "2*5"],
    "integer": ["12*6", "70+2", "8*9", "144/2", "\\frac{144}{2}", "72+0", "72*1", "72/1", "6\\times12", "(8)(9)", "2\\cdot 36", "2^{3+3}+8", "\\sqrt{5184}"],
    "zero": ["1-1", "0*5", "0/7"],
    "decimal": ["1-0.5", "2*0.25", "\\frac{1+1}{4}", "1/4+1/4"],
    "fraction": ["1/2+1/4", "1-\\frac{1}{4}", "3*0.25", "3\\cdot\\frac14", "\\frac{1+2}{4}", "\\frac{3/2}{2}"],
    "mixed number": ["2+\\frac{1}{2}", "5*0.5"],
    "percentage": ["25%+25%", "0.25*2"],
    "money": ["9*2", "36/2", "$36/2"],
    "pair": ["(0,\\frac{2}{2})", "(1-1,1)", "(0,2-1)"],
    "triple": ["(1,2,\\frac{6}{2})", "(1,1+1,3)"],
    "matrix": ["\\begin{pmatrix}1&2\\\\3&\\frac{8}{2}\\end{pmatrix}"],
    "closed interval": ["[0,2-1]", "0\\le x\\le 2/2"],
    "roots": ["3, 2+2", "\\frac{7\\pm 1}{2}", "x=3, x=8/2"],
    "assignment": ["x=\\frac{10}{2}", "10/2", "x=2+3", "2x=10", "x-5=0"],
    "solution": ["2x<6", "-x>-3", "6>2x", "x-3<0", "x<6/2"],
    "length": ["10/2 cm", "2+3 cm"],
}  # fmt: skip
"""Of the same value, but not evaluated as the writings of that name in VALUES are."""
GOLDS_WITH_WORK: dict[str, list[str]] = {
    "12*7+3": ["87", "7*12+3", "90-3", "\\frac{174}{2}"],
    "\\frac{10}{2}": ["5", "10/2", "2+3"],
    "x=\\frac{10}{2}": ["5", "x=5", "x=10/2"],
    "(0,\\frac{2}{2})": ["(0,1)"],
    "5*4*3*2": ["120", "5!", "2*60"],
    "\\sqrt{9}": ["3", "\\sqrt{4+5}"],
    "3, 2+2": ["3,4", "4, 3"],
    "2x<6": ["x<3", "3>x", "-x>-3"],
    "2x=10": ["x=5", "4x=20"],
    "10/2 cm": ["5 cm", "5"],
}
FINISHED: dict[str, list[str]] = {
    "1024": ["2^{10}", "2^10", "4^5", "1024.0", "(-2)^{10}"],
    "1/1024": ["\\frac{1}{2^{10}}", "2^{-10}", "(1/2)^{10}", "\\left(\\frac{1}{2}\\right)^{10}", "1/2^{10}"],
    "32/243": ["\\frac{2^5}{3^5}", "(\\frac23)^5", "(2/3)^{5}"],
    "1500000": ["1.5*10^6", "1.5\\times 10^{6}", "1.5e6"],
    "0.00012": ["1.2\\cdot10^{-4}", "12*10^{-5}"],
    "0.3486784401": ["0.9^{10}"],
    "5": ["(5)", "-(-5)", "2+3=5", "5=2+3", "x=2+3=5"],
    "3.464102": ["2\\sqrt{3}", "\\sqrt{12}", "2*sqrt(3)"],
    "3\\sqrt{2}": ["\\sqrt{18}", "\\frac{6}{\\sqrt{2}}", "\\sqrt{9}\\sqrt{2}"],
    "1/6": ["6/36", "\\frac{6}{36}"],
    "50%": ["0.5", "1/2", "50"],
    "-8": ["(-2)^3", "-2^3"],
}
"""Forms of a value that are answers: one power, a power of ten times a number, a fraction, a root that stays one."""
REPEATED: list[tuple[str, str, list[str], list[str]]] = [
    ("What is $12\\times 7+3$?", "87", ["12*7+3", "12\\cdot7+3", "12*7+3=12*7+3", "3+12*7", "(12*7+3)^1", "x=12*7+3"], ["87", "87.0", "12*7+3 = 87", "87 = 12*7+3"]),
    ("What is 2^10?", "1024", ["2^{10}", "2^10", "2**10", "2^{+10}", "2^{010}", "02^{10}", "(-2)^{10}", "2.0^{10}", "2^{10}=2^{10}", "x=2^{10}"], ["1024", "4^5", "2^{10}=1024"]),
    ("Compute $5!$.", "120", ["5!"], ["120"]),
    ("Compute \\binom{5}{2}.", "10", ["\\binom{5}{2}", "\\binom52"], ["10"]),
    ("Write 6/36 in lowest terms.", "\\frac{1}{6}", ["6/36", "\\frac{6}{36}", "\\dfrac{6}{36}", "06/36", "-6/-36", "\\frac{-6}{-36}", "0 6/36", "\\tfrac6{36}", "6/36=6/36"], ["1/6", "\\frac16"]),
    ("Write 3/4 as a decimal.", "0.75", ["3/4", "\\frac{3}{4}"], ["0.75", ".75"]),
    ("Write 0.75 as a fraction.", "3/4", ["0.75"], ["3/4", "\\frac{3}{4}"]),
    ("Write 75% as a decimal.", "0.75", ["75%", "75\\%"], ["0.75"]),
    ("Expand (x-1)(x+1).", "x^2-1", ["(x-1)(x+1)", "(x-1)*(x+1)"], ["x^2-1", "x^{2} - 1", "-1+x^2"]),
    ("Factor $x^2-1$.", "(x-1)(x+1)", ["x^2-1", "x^{2} - 1"], ["(x-1)(x+1)", "(x+1)(x-1)"]),
    ("Simplify $\\sqrt{12}$.", "2\\sqrt{3}", ["\\sqrt{12}", "sqrt(12)", "√12"], ["2\\sqrt3", "2*sqrt(3)"]),
    ("What is $\\sin\\left(\\frac{\\pi}{3}\\right)$?", "\\frac{\\sqrt{3}}{2}", ["\\sin(\\frac{\\pi}{3})", "\\sin(\\pi/3)"], ["\\sqrt{3}/2", "sqrt(3)/2"]),
    ("Give pi to six decimals: $\\pi$", "3.141593", ["\\pi"], ["3.141593"]),
    ("Solve $2x<6$.", "x<3", ["2x<6"], ["x<3", "3>x", "(-\\infty,3)"]),
    ("Bring 2x-y+1=0 into the form y=mx+b.", "y=2x+1", ["2x-y+1=0"], ["y=2x+1", "y = 1+2x"]),
    ("Is 1/2 or 1/3 larger?", "1/2", [], ["1/2", "\\frac{1}{2}", "0.5"]),
    ("Of 72 apples, 10/2 are red and 18 are green. How many are there?", "72", [], ["72", "72 apples"]),
    ("Is x^2 + 1 or x^2 larger?", "x^2+1", [], ["x^2+1", "x^{2} + 1", "1+x^2"]),
    ("Which day is it, Monday or Tuesday?", "Monday", [], ["Monday", "monday"]),
]  # fmt: skip
"""(question, gold, answers that repeat the question, answers that do not)"""
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


@pytest.mark.attack(cases=2)
@pytest.mark.parametrize("name", UNFINISHED)
def test_what_leaves_work_to_do_is_no_answer(name: str, pool: ScorerPool) -> None:
    for number, gold in enumerate(VALUES[name][0]):
        for place, answer in enumerate(UNFINISHED[name]):
            assert not is_right(gold, wrapped(number + place, answer), pool.values), (gold, answer)


@pytest.mark.honest("mathematics")
@pytest.mark.parametrize(("gold", "answers"), GOLDS_WITH_WORK.items())
def test_a_gold_that_leaves_work_takes_each_answer(gold: str, answers: list[str], pool: ScorerPool) -> None:
    for answer in [*answers, gold]:
        assert is_right(gold, wrapped(0, answer), pool.values), answer


@pytest.mark.honest("mathematics", cases=3)
@pytest.mark.parametrize(("gold", "answers"), FINISHED.items())
def test_forms_in_which_a_number_is_given_are_answers(gold: str, answers: list[str], pool: ScorerPool) -> None:
    for number, answer in enumerate(answers):
        assert is_right(gold, wrapped(number, answer), pool.values), answer


@pytest.mark.attack
@pytest.mark.honest("mathematics")
@pytest.mark.parametrize(("question", "gold", "repeated", "own"), REPEATED)
def test_what_repeats_the_question_is_no_answer(
    question: str, gold: str, repeated: list[str], own: list[str], pool: ScorerPool
) -> None:
    for place, answer in enumerate(repeated):
        assert not is_right(gold, wrapped(place, answer), pool.values, question), answer
    for place, answer in enumerate([*own, gold]):
        assert is_right(gold, wrapped(place, answer), pool.values, question), answer


@pytest.mark.attack
def test_a_long_question_is_read_in_time(at_most: Callable[[float], AbstractContextManager[None]]) -> None:
    for part in ("^(", "\\sqrt[", "(", "\\frac{", "sqrt(", "1.", "a b ", "{x}"):
        with at_most(1.0):
            assert not is_right("3", "\\boxed{1/2+5/2}", lambda texts: [["3 0"] for _ in texts], part * 50_000)


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


@pytest.mark.attack
def test_the_reward_reads_the_question() -> None:
    prompts: list[str | list[Message]] = ["What is 2^10?", [{"role": "user", "content": "What is $2^{10}$?"}]]
    for prompt in prompts:
        task = Task(task_id="t", prompt=prompt, answer="1024")
        assert [math_verify(task, text) for text in ("\\boxed{2^{10}}", "\\boxed{1024}")] == [0.0, 1.0]
