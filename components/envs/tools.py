"""Tools: what one is, how the policy's text calls it, and two real ones.

A call is a JSON object between tags. The policy may write any number of them, anywhere in its text:

    <tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ..importing import import_user_object
from .calculator import calculate
from .corpus import Corpus

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
MAX_CALLS = 32
"""In one turn."""
MAX_CALL_CHARS = 100_000
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class ToolError(ValueError):
    """A call that cannot be carried out; its message is shown to the policy."""


class Tool(Protocol):
    """`parameters` is a JSON schema of an object; `__call__` gets its properties as keyword arguments.

    A sync tool that may take more than a few milliseconds says so with an attribute `blocking = True`, and is then run
    in a thread.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def __call__(self, *args: Any, **arguments: Any) -> str | Awaitable[str]: ...


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it; `error` says why it is invalid."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def _one_text(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


class Calculator:
    blocking = True
    name = "calculator"
    description = "Calculates an arithmetic expression such as 3 * (4 + 5) ** 2."
    parameters = _one_text("expression")

    def __call__(self, *, expression: str) -> str:
        try:
            return str(calculate(expression))
        except ValueError as error:
            raise ToolError(str(error)) from None


class Search:
    """The paragraphs of a corpus that fit a query best."""

    blocking = True
    name = "search"
    description = "Finds passages by key words."
    parameters = _one_text("query")

    def __init__(self, corpus: Corpus, *, num_results: int = 3) -> None:
        self._corpus, self._num_results = corpus, num_results

    def __call__(self, *, query: str) -> str:
        found = self._corpus.best(query, self._num_results)
        return "\n".join(f"[{p.title}] {p.text}" for p in found) or "nothing found"


def build_tools(names: Sequence[str], *, corpus: str | None) -> dict[str, Tool]:
    """Tools by the name that a call uses. Raises ValueError in one line."""
    tools: dict[str, Tool] = {}
    for name in names:
        if name == "calculator":
            tool: Tool = Calculator()
        elif name == "search":
            if corpus is None:
                raise ValueError(
                    "env.options.corpus: got null, expected a folder or a .jsonl file, because of the tool search"
                )
            tool = Search(Corpus.load(corpus))
        else:
            tool = _user_tool(name)
        if tool.name in tools:
            raise ValueError(f"env.options.tools: two tools are called {tool.name!r}; rename one")
        tools[tool.name] = tool
    return tools


def _user_tool(name: str) -> Tool:
    expected = '"calculator", "search", or a class "pkg.mod:Class" with name, description, parameters and __call__'
    if ":" not in name:
        raise ValueError(f"env.options.tools: got {name!r}, expected {expected}")
    cls = import_user_object(name, key="env.options.tools", expected=expected)
    tool: Any = cls() if inspect.isclass(cls) else cls
    for attribute, kind in (("name", str), ("description", str), ("parameters", dict)):
        if not isinstance(getattr(tool, attribute, None), kind):
            place = inspect.getsourcefile(type(tool))
            raise ValueError(
                f"env.options.tools: {name!r} in {place} has no {attribute} ({kind.__name__}); expected {expected}"
            )
    if not callable(tool):
        raise ValueError(f"env.options.tools: {name!r} cannot be called; expected {expected}")
    return cast(Tool, tool)


def describe(tools: dict[str, Tool]) -> str:
    """The description of its tools that the policy is given: each as one line of JSON, then the call format."""
    return describe_schemas(
        [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools.values()]
    )


def describe_schemas(schemas: Sequence[dict[str, Any]]) -> str:
    """The same for tools that run elsewhere."""
    return (
        "You may call these tools:\n"
        + "\n".join(map(json.dumps, schemas))
        + '\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and end your turn. '
        "The results come between <tool_response> and </tool_response>. Your first turn without a call is your answer."
    )


def parse_calls(text: str) -> list[Call]:
    """The calls in a completion, in order, including wrong ones; an unclosed last tag is read to the end."""
    texts = [found.group(1) for found in _CALL.finditer(text)]
    calls = [_parse(one) for one in texts[:MAX_CALLS]]
    if len(texts) > MAX_CALLS:
        calls.append(Call("", {}, f"{len(texts)} calls in one turn; those after the first {MAX_CALLS} are left out"))
    return calls


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _parse(text: str) -> Call:
    if len(text) > MAX_CALL_CHARS:
        return Call("", {}, f"a call of {len(text)} characters; at most {MAX_CALL_CHARS} are read")
    try:
        item = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return Call("", {}, f"not JSON: {text.strip()[:80]}")
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return Call("", {}, 'expected {"name": ..., "arguments": {...}}')
    arguments = item.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(item["name"], {}, "arguments must be an object")
    return Call(item["name"], arguments)


def chosen(tools: dict[str, Tool], wanted: Sequence[str | dict[str, Any]] | None) -> dict[str, Tool]:
    """The tools that a task may use: those it names; a schema describes the tool of its name in its own words.

    None: all of them. Raises ValueError for a name that nobody built.
    """
    if wanted is None:
        return tools
    found: dict[str, Tool] = {}
    for item in wanted:
        schema: dict[str, Any] = {"name": item} if isinstance(item, str) else item
        name = schema["name"]
        if name not in tools:
            raise ValueError(f"tools of a task: got {name!r}, expected one of env.options.tools: {', '.join(tools)}")
        tool = tools[name]
        found[name] = _Described(
            name, schema.get("description", tool.description), schema.get("parameters", tool.parameters), tool
        )
    return found


@dataclass
class _Described:
    """A tool as a task describes it."""

    name: str
    description: str
    parameters: dict[str, Any]
    tool: Tool

    @property
    def blocking(self) -> bool:
        return getattr(self.tool, "blocking", False)

    def __call__(self, *args: Any, **arguments: Any) -> str | Awaitable[str]:
        return self.tool(*args, **arguments)


async def run_call(call: Call, tools: dict[str, Tool]) -> str:
    """The result of a call as text. Raises ToolError with a message for the policy."""
    if call.error is not None:
        raise ToolError(call.error)
    tool = tools.get(call.name)
    if tool is None:
        raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
    check_arguments(call.arguments, tool.parameters)
    if getattr(tool, "blocking", False):
        result: Any = await asyncio.to_thread(tool, **call.arguments)
    else:
        result = tool(**call.arguments)
    return str(await result if inspect.isawaitable(result) else result)


def check_arguments(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    """Check arguments against the part of JSON schema that tools use: types, enum, required, no unknown names."""
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in arguments:
            raise ToolError(f"argument {name!r} is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"there is no argument {name!r}; there are {', '.join(properties)}")
        kinds = properties[name].get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_is(value, kind) for kind in kinds):
            raise ToolError(f"argument {name!r} must be of type {' or '.join(kinds)}")
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            raise ToolError(f"argument {name!r} must be one of {properties[name]['enum']}")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object))
