"""Tool calls that a policy may write: none runs anything but a tool, fills the context or keeps the loop busy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from leeway.config.environments import ToolUseOptions
from leeway.envs.tool_use import ToolUse
from leeway.envs.tools import MAX_CALLS, Calculator, ToolError, parse_calls, run_call
from leeway.types import Completion, Task

Limit = Callable[[float], AbstractContextManager[None]]
TOOLS: Any = {"calculator": Calculator()}


def call(name: Any = "calculator", arguments: Any = None) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


HOSTILE = {
    "not JSON": "<tool_call>{name: calculator}</tool_call>",
    "a list": "<tool_call>[1]</tool_call>",
    "deep": "<tool_call>" + "[" * 100_000 + "</tool_call>",
    "deep objects": "<tool_call>" + '{"a":' * 100_000 + "</tool_call>",
    "a long number": '<tool_call>{"name": "calculator", "arguments": {"expression": ' + "9" * 5000 + "}}</tool_call>",
    "nan": '<tool_call>{"name": "calculator", "arguments": {"expression": NaN}}</tool_call>',
    "infinity": '<tool_call>{"name": "calculator", "arguments": {"expression": -Infinity}}</tool_call>',
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "a name that is none": call(7, {}),
    "a method": call("__class__", {}),
    "an attribute": call("calculator.__call__", {}),
    "a path": call("../calculator", {}),
    "arguments that are a list": call("calculator", [1]),
    "arguments that are text": call("calculator", "1+1"),
    "no argument": call("calculator", {}),
    "an unknown argument": call("calculator", {"expression": "1", "self": "x"}),
    "a hidden argument": call("calculator", {"expression": "1", "__class__": "x"}),
    "the wrong type": call("calculator", {"expression": 1}),
    "truth": call("calculator", {"expression": True}),
    "null": call("calculator", {"expression": None}),
    "an object": call("calculator", {"expression": {"$ne": 1}}),
    "code": call("calculator", {"expression": "__import__('os').system('true')"}),
    "an attribute in code": call("calculator", {"expression": "().__class__"}),
    "a format": call("calculator", {"expression": "'{0.__class__}'.format(1)"}),
    "a large power": call("calculator", {"expression": "9**9**9**9"}),
    "a negative number of digits": call("calculator", {"expression": "round(1,-10**9)"}),
    "nothing": call("calculator", {"expression": ""}),
    "a null character": call("calculator", {"expression": "1\x00"}),
    "never closed": '<tool_call>{"name": "calculator", "arguments": {"expression": "1+',
    "a tag in a tag": "<tool_call><tool_call></tool_call></tool_call>",
}


@pytest.mark.attack
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_call_is_answered_with_an_error(text: str, at_most: Limit) -> None:
    with at_most(1.0):
        (first, *_) = parse_calls(text)
        with pytest.raises(ToolError) as error:
            asyncio.run(run_call(first, TOOLS))
    assert len(str(error.value)) < 400


@pytest.mark.honest
@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 * 7", "84"), ("3 * (4 + 5) ** 2", "243"), ("sqrt(16)", "4.0"), ("-7 // 2", "-4"), ("10 % 3", "1"),
     ("abs(-3)", "3"), ("max(1, 2)", "2"), ("2 ** 10", "1024"), ("1 / 4", "0.25"), ("round(2.567, 1)", "2.6")],
)  # fmt: skip
def test_an_honest_call_is_run(expression: str, value: str) -> None:
    (found,) = parse_calls("Let me see. " + call("calculator", {"expression": expression}))
    assert asyncio.run(run_call(found, TOOLS)) == value


def turn(text: str) -> Any:
    """What the environment says to this turn, and how it was counted."""
    env = ToolUse(ToolUseOptions())

    async def play() -> Any:
        await env.reset(Task(task_id="t", prompt="p", answer="84"))
        return await env.step(
            Completion(tokens=[1], logprobs=[0.0], policy_versions=[0], finish_reason="stop", text=text)
        )

    return asyncio.run(play())


@pytest.mark.attack
def test_thousands_of_calls_in_a_turn_neither_run_nor_fill_the_context(at_most: Limit) -> None:
    with at_most(2.0):
        (message,), reward, done, info = turn(call("calculator", {"expression": "2 ** 1000"}) * 5_000)
    assert (reward, done) == (0.0, False)
    assert (info["env/tool_calls"], info["env/failed_calls"]) == (MAX_CALLS + 1, 1)
    assert len(message["content"]) < (MAX_CALLS + 1) * 2100
    assert "those after the first 32 are left out" in message["content"]


@pytest.mark.attack
def test_an_answer_beside_a_call_is_not_scored() -> None:
    _, reward, done, info = turn("84" + call("calculator", {"expression": "1"}))
    assert (reward, done, info["exact_match"]) == (0.0, False, 0.0)


@pytest.mark.honest
def test_the_answer_after_the_calls_is() -> None:
    _, reward, done, info = turn("84")
    assert (reward, done, info["exact_match"]) == (1.0, True, 1.0)
