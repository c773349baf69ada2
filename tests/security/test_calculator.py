"""Arithmetic that a model writes: no expression takes long, makes a large number, or is anything but arithmetic."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.envs import calculator
from leeway.envs.answers import answer_format, countdown
from leeway.envs.calculator import MAX_BITS, calculate
from leeway.envs.corpus import Corpus, Passage
from leeway.envs.judges import _SCORE
from leeway.envs.tools import MAX_CALLS, build_tools, parse_calls, run_call
from leeway.types import Task

AtMost = Callable[[float], AbstractContextManager[None]]

ATTACKS = {
    "round to ten to the ninth": "round(1,-10**9)",
    "round up to the ninth": "round(1,10**9)",
    "round a large number": "round(10**1000,-10**1000)",
    "round in a round": "round(round(7,-400000),-10**8)",
    "tower": "9**9**9**9**9",
    "tower in brackets": "((9**9)**9)**9**9",
    "negative tower": "2**-10**12",
    "power of one bit more": "2**4097",
    "minus one": "(-2)**99999999999",
    "products": "*".join(["(2**4000)"] * 20),
    "product": "(2**4000)*(2**4000)",
    "sum": "+".join(["2**4095"] * 20),
    "shift": "1<<10**9",
    "factorial": "factorial(10**9)",
    "text": "'a'*10**9",
    "list": "[1]*10**9",
    "format": "f'{1:>1000000000}'",
    "many digits": "9" * 10_000,
    "complex": "(-8)**0.5",
    "imaginary": "1j**10**9",
    "attribute": "(1).__class__.__mro__[1].__subclasses__()",
    "import": "__import__('os').system('true')",
    "generator": "max(x for x in range(10**9))",
    "lambda": "(lambda: 1)()",
    "walrus": "(x:=1)",
    "star": "max(*max)",
    "keyword": "round(1, ndigits=-10**9)",
    "brackets": "(" * 150 + "1" + ")" * 149,
    "all brackets": "({[" * 50 + "1" + "]})" * 50,
    "unclosed": "(" * 299,
    "unclosed pairs": "({" * 149,
    "minus signs": "-" * 299,
    "tilde": "~" * 200 + "1",
    "nested calls": "max(" * 70 + "1" + ")" * 70,
    "comparisons": "1<" * 140 + "1",
    "zero": "1/0",
    "overflow": "exp(10**4)",
    "root of a negative": "sqrt(-1)",
    "nothing": "",
    "null byte": "1\0",
    "other digits": "٣**٣٣٣٣٣",
    "wide digits": "９**９９９９９９",
    "surrogate": "\ud800",
}
HONEST = [
    ("3 * (4 + 5) ** 2 / sqrt(16)", 60.75),
    ("12*7", 84),
    ("round(3.14159, 2)", 3.14),
    ("round(1234, -2)", 1200),
    ("round(2.5)", 2),
    ("2**4000 % 7", 2**4000 % 7),
    ("2**-3", 0.125),
    ("1/3", 1 / 3),
    ("-2**2", -4),
    ("10//3 + 10%3", 4),
    ("max(3, min(9, 5), 4)", 5),
    ("floor(2.7) + ceil(2.1)", 5),
    ("abs(-7)", 7),
    ("log(100, 10)", 2.0),
    ("2*pi", 2 * 3.141592653589793),
    ("1e999", float("inf")),
    ("1" * 299, int("1" * 299)),
    ("exp(0) + cos(0)", 2.0),
    ("((((((((1+1)*2)*2)*2)*2)*2)*2)*2)", 256),
    ("1e3 + .5", 1000.5),
    ("123456789 * 987654321", 123456789 * 987654321),
    ("0**0", 1),
]


@pytest.mark.attack
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_at_once(name: str, at_most: AtMost) -> None:
    with at_most(0.2), pytest.raises(ValueError):
        calculate(ATTACKS[name])


@pytest.mark.honest
@pytest.mark.parametrize(("expression", "value"), HONEST)
def test_arithmetic_has_its_value(expression: str, value: float) -> None:
    assert calculate(expression) == pytest.approx(value, rel=1e-12)


HUGE = st.one_of(
    st.integers(0, 99),
    st.integers(0, 10**30),
    st.sampled_from(["10**9", "2**4095", "9**999", "1e308", "0.1", "10**1200", "-1", "0"]),
)
EXPRESSIONS = st.recursive(
    HUGE.map(str),
    lambda inner: st.one_of(
        st.builds("({}){}({})".format, inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner),
        st.builds("{}({}, {})".format, st.sampled_from(["round", "min", "max", "log"]), inner, inner),
        st.builds(
            "{}({})".format, st.sampled_from(["abs", "floor", "ceil", "sqrt", "exp", "sin", "round", "-"]), inner
        ),
    ),
    max_leaves=12,
)


@pytest.mark.attack
@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS)
def test_no_expression_takes_long_or_makes_a_large_number(expression: str) -> None:
    begun = time.process_time()
    try:
        value = calculate(expression)
    except ValueError:
        value = 0
    assert time.process_time() - begun < 0.5, expression
    assert not isinstance(value, int) or value.bit_length() <= MAX_BITS


@pytest.mark.attack
@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("0123456789+-*/%().,e _({[]})=:'x\n"), max_size=300))
def test_no_text_takes_long(text: str) -> None:
    begun = time.process_time()
    try:
        calculate(text)
    except ValueError:
        pass
    assert time.process_time() - begun < 0.5, text


def test_a_result_is_refused_before_it_is_computed() -> None:
    def never(*_: int) -> int:
        raise AssertionError("it was computed")

    for function, arguments in (
        (operator.pow, (10, 10**9)),
        (round, (1, -(10**9))),
        (operator.mul, (2**4000, 2**4000)),
    ):
        calculator._SIZES[never] = calculator._SIZES[function]
        with pytest.raises(ValueError, match="too large"):
            calculator._applied(never, *arguments)
    del calculator._SIZES[never]


@pytest.mark.attack
def test_the_loop_goes_on_while_a_tool_works(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The calculator and the search run in threads: a tool that takes long stops no other conversation."""
    (tmp_path / "a.txt").write_text("one lake")
    tools = build_tools(["calculator", "search"], corpus=str(tmp_path))
    assert all(tool.blocking for tool in tools.values())  # type: ignore[attr-defined]
    (call,) = parse_calls('<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>')
    assert asyncio.run(run_call(call, tools)) == "42"


CALLS = {
    "many": '<tool_call>{"name": "calculator"}</tool_call>' * 20_000,
    "nested": "<tool_call>" + "[" * 200_000,
    "nested objects": "<tool_call>" + '{"a":' * 10_000 + "</tool_call>",
    "long number": "<tool_call>" + "9" * 90_000 + "</tool_call>",
    "long number inside": '<tool_call>{"name": "x", "arguments": {"a": ' + "9" * 90_000 + "}}</tool_call>",
    "unclosed": "<tool_call>" * 50_000,
    "not a number": '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>',
}


@pytest.mark.attack
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_any_size_are_read_quickly(name: str, at_most: AtMost) -> None:
    with at_most(2.0):
        calls = parse_calls(CALLS[name])
    assert 0 < len(calls) <= MAX_CALLS + 1


@pytest.mark.attack
def test_a_long_query_visits_few_words(at_most: AtMost) -> None:
    corpus = Corpus([Passage("", f"word{i % 97} lake") for i in range(2000)])
    with at_most(2.0):
        corpus.best(" ".join(f"word{i}" for i in range(200_000)), 3)


FORMS = {
    "answers": "<think>" + "</think><answer>" * 20_000 + "x",
    "closings": "<think></think><answer>" + "</answer>" * 20_000 + "x",
    "spaces": "<think></think>" + " " * 100_000 + "x",
    "spaces at the end": "<think></think><answer></answer>" + " " * 100_000 + "x",
}


@pytest.mark.attack
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_checked_in_linear_time(name: str, at_most: AtMost) -> None:
    with at_most(1.0):
        assert answer_format(Task(task_id="t", prompt="", answer="", info={}), FORMS[name]) == 0.0


@pytest.mark.attack
def test_a_users_form_ends_in_time(at_most: AtMost) -> None:
    with at_most(6.0):
        assert (
            answer_format(Task(task_id="t", prompt="", answer="", info={}), "a" * 40 + "!", pattern=r"(a|aa)+b") == 0.0
        )


@pytest.mark.honest
@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>b</answer>",
        " <think></think>\n\n<answer></answer>\n",
        "<think></think>x</think> <answer>y</answer>",
    ],
)
def test_a_right_form_pays(text: str) -> None:
    assert answer_format(Task(task_id="t", prompt="", answer="", info={}), text) == 1.0


@pytest.mark.attack
def test_a_judges_spaces_are_read_in_linear_time(at_most: AtMost) -> None:
    with at_most(1.0):
        assert _SCORE.findall("SCORE:" + " " * 200_000 + "x") == []
    assert _SCORE.findall("SCORE: ** 7.5 **") == ["7.5"]


@pytest.mark.attack
def test_a_tasks_target_is_not_computed(at_most: AtMost) -> None:
    task = Task(task_id="t", prompt="", answer="", info={"numbers": [1], "target": "1e999999999"})
    with at_most(0.5), pytest.raises(ValueError, match="target"):
        countdown(task, "1")


@pytest.mark.honest
@pytest.mark.parametrize(
    "text",
    ["3 * (4 + 4)", "I try\n<answer>(4 + 4) * 3 = 24</answer>", "2*12?\n(4+4)*3"],
)
def test_a_right_countdown_pays(text: str) -> None:
    assert countdown(Task(task_id="t", prompt="", answer="24", info={"numbers": [3, 4, 4]}), text) == 1.0
