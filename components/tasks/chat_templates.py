"""Chat templates under limits: a template comes with a model or a checkpoint, and may be hostile.

Jinja's sandbox keeps a template from Python's inside, not from looping for ever or filling memory. So each piece of
work that a template does is paid for, in characters, out of a budget that grows with the conversation:

    loop        each item            -> STEP and the text of the loop's body
    call        each                 -> STEP; a macro also the text of the template; a method of text, that text
    operators   + * % ~ [a:b] == in  -> what they read or write
    filters                          -> what they read and write
    output      {{ ... }}            -> what is written

Whatever would write more than it reads is paid for before it runs, or is not served (`center`, `format`, ...). A
template over its budget is refused like one that cannot be rendered: ValueError, in one line. Everything that is
rendered is, character by character, what transformers' `apply_chat_template` renders.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, sync_do_join
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..config.inputs import MAX_TEMPLATE

GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
"""What every template is given, beside the special tokens."""
BASE_BUDGET, BUDGET_PER_CHARACTER = 10_000_000, 100
"""What one rendering may spend, and what each character of the conversation adds. Known templates spend 10 to 30."""
STEP, ITEM = 50, 10
MAX_INTEGER_BITS = 4096

_FILTERS = {
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape"),
    *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique"),
    *("upper", "wordcount"),
}
_DEEP = {
    *("capitalize", "dictsort", "e", "escape", "forceescape", "groupby", "lower", "max", "min", "sort", "string"),
    *("title", "trim", "unique", "upper", "wordcount"),
    *("in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
}
"""Filters and tests that read what is in the items of their values; the others only go through the items."""
_AT_ONCE = {"count", "d", "default", "first", "last", "length", "boolean", "defined", "none", "undefined"}
"""Filters and tests that do not go through the items of a list."""
_WIDENS = {"center", "ljust", "rjust", "zfill", "expandtabs", "translate"}
"""Methods of text that write as much as their arguments say; the sandbox finds `format` itself."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")


_SIZED = (str, list, tuple, dict, set, range, MappingView)


class OverBudget(jinja2.TemplateError):
    """The template does more than a chat template needs."""


class _Budget(threading.local):
    """What the rendering in this thread may still spend, in characters."""

    left = 0

    def pay(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise OverBudget("it loops too long or writes too much; expected a template of linear work")

    def pay_for(self, value: Any) -> Any:
        """Pay for reading or writing all of a value; returns it. Of an iterator each item is paid for when it comes."""
        if isinstance(value, str):
            self.pay(len(value))
        elif isinstance(value, dict):
            self.pay(STEP * len(value))
            for key, item in value.items():
                self.pay_for(key)
                self.pay_for(item)
        elif isinstance(value, list | tuple):
            self.pay(STEP * len(value))
            for item in value:
                self.pay_for(item)
        elif isinstance(value, int):
            self.pay(value.bit_length() if value.bit_length() <= MAX_INTEGER_BITS else self.left + 1)
        else:
            return self.pay_for_items(value)
        return value

    def pay_for_items(self, value: Any) -> Any:
        """Pay for going through a value, not into its items; returns it."""
        if isinstance(value, _SIZED):
            self.pay(len(value) if isinstance(value, str) else ITEM * len(value))
        return _watched(value)


_budget = _Budget()


class ChatTemplate:
    """A template of a tokenizer, ready to render. Raises ValueError where it cannot be read or breaks its limits."""

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`kwargs`: further variables that it may read (`model.chat_template_kwargs`); one that it never reads, or that
        it is given anyway, is refused.
        """
        self.name = name
        self._variables = {**special_tokens, **(kwargs or {})}
        if len(source) > MAX_TEMPLATE:
            raise ValueError(f"{name}: got {len(source)} characters, expected at most {MAX_TEMPLATE}")
        self._template = self._bounded(0, lambda: _environment().from_string(source))
        read = self._bounded(0, lambda: _variables_of(source)) if kwargs else set()
        for key in kwargs or {}:
            if key in {*GIVEN, *special_tokens} or key not in read:
                raise ValueError(
                    f"model.chat_template_kwargs.{key}: got it for {name}, expected a variable that the template reads "
                    f"({', '.join(sorted(read - {*GIVEN, *special_tokens})) or 'it reads none'}); leave it out"
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as text. `tools`: JSON schemas of what the assistant may call."""
        written = sum(len(str(text)) for message in messages for text in message.values()) + len(str(tools))
        return self._bounded(
            written,
            lambda: self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            ),
        )

    def _bounded(self, num_characters: int, work: Callable[[], Any]) -> Any:
        _budget.left = BASE_BUDGET + BUDGET_PER_CHARACTER * num_characters
        try:
            return work()
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.name}: {error.message or type(error).__name__}") from None
        except (RecursionError, MemoryError):
            raise ValueError(f"{self.name}: it is nested too deeply; expected a template of linear work") from None
        except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError, SyntaxError) as error:
            raise ValueError(f"{self.name}: it fails: {type(error).__name__}: {error}") from None


def _variables_of(source: str) -> set[str]:
    """Those that it reads and does not set itself. Of the parsed template: none of it runs."""
    environment: Any = _environment()
    return meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()


class _Bounded(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which work is paid for. `text_size`: characters that stand in the template itself."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.text_size = 0
        served = {name: _paid(function, name) for name, function in self.filters.items() if name in _FILTERS}
        own = {
            "tojson": _to_json, "join": _join, "replace": _replace, "indent": _indent,
            "_counted": _counted, "_written": _budget.pay_for, "_joined": _joined, "_sliced": _sliced,
        }  # fmt: skip
        self.filters = served | own
        self.tests = {name: _paid(function, name) for name, function in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        self.text_size = sum(len(text.data) for text in tree.find_all(nodes.TemplateData))
        return _Priced(self.text_size).visit(tree)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str | list | tuple):
            _budget.pay(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
        elif operator == "%" and isinstance(left, str):
            if _WIDE.search(left):
                raise OverBudget("a format of more than 999 characters")
            _budget.pay_for([left, right])
        elif operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            for times, value in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | list | tuple):
                    _budget.pay(max(0, times) * max(1, len(value)))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise OverBudget(f"an integer of more than {MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.pay(STEP * (1 + len(args) + len(kwargs)))
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, Macro | BlockReference):
            _budget.pay(__self.text_size)
        elif isinstance(__obj, LoopContext):
            args = (_counted(args[0], STEP + __self.text_size), *args[1:]) if args else args
        elif isinstance(owner, str):
            _pay_for_method(owner, __obj.__name__, args)
        elif isinstance(owner, int | float | bytes):
            raise OverBudget(f"the method {__obj.__name__} of a number")
        return _budget.pay_for_items(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> None:
        if super().wrap_str_format(value) is not None:
            raise OverBudget("the method format of text")


class _Priced(NodeTransformer):
    """Puts the filters that take payment into a parsed template."""

    def __init__(self, text_size: int) -> None:
        self._text_size = text_size

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        size = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.iter = _filtered(node.iter, "_counted", nodes.Const(STEP + size))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        plain = (nodes.TemplateData, nodes.Const)
        node.nodes = [n if isinstance(n, plain) else _filtered(n, "_written") for n in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _read(node.expr)
        for operand in node.ops:
            operand.expr = _read(operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return _filtered(node.node, "_sliced", *ends)


def _filtered(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _read(node: Any) -> Any:
    return node if isinstance(node, nodes.Const) else _filtered(node, "_written")


def _counted(items: Any, price: int) -> Any:
    """`items` of a loop, each paid for before it is reached."""
    if isinstance(items, _SIZED):
        _budget.pay(price * len(items))
        return items
    return items if isinstance(items, Undefined) else _counted_one_by_one(items, price)


def _counted_one_by_one(items: Any, price: int) -> Iterator[Any]:
    for item in items:
        _budget.pay(price)
        yield item


def _paid(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter or test of jinja's that pays for what it reads and writes. It writes no more than it reads."""
    pay_for = _budget.pay_for if name in _DEEP else _budget.pay_for_items
    if name in _AT_ONCE:
        pay_for = _watched

    @functools.wraps(function)  # with jinja's marks: which functions want the context
    def paid(*args: Any, **kwargs: Any) -> Any:
        _budget.pay(STEP)
        result = function(*map(pay_for, args), **kwargs)
        return _budget.pay_for_items(result)

    return paid


def _watched(value: Any) -> Any:
    return _counted_one_by_one(value, STEP) if isinstance(value, Iterator) else value


def _joined(parts: list[Any]) -> str:
    return "".join(map(str, _budget.pay_for(parts)))


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    result = value[start:stop:step]
    _budget.pay(len(result))
    return result


@pass_eval_context
def _join(eval_ctx: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = list(_counted(value, STEP))
    _budget.pay_for(items)
    _budget.pay(len(str(d)) * len(items))
    return sync_do_join(eval_ctx, items, d, attribute)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(_budget.pay_for(s)), str(old), str(new)
    _budget.pay((text.count(old) + 1) * (STEP + len(new)))
    return text.replace(old, new, -1 if count is None else count)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(_budget.pay_for(s))
    _budget.pay((text.count("\n") + 2) * (STEP + (len(width) if isinstance(width, str) else max(0, width))))
    return do_indent(text, width, first, blank)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _budget.pay_for(x)
    depth = len(indent) if isinstance(indent, str) else indent or 0
    if depth > 16:
        raise OverBudget("tojson: an indent of more than 16")
    written = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _budget.pay_for(written)


def _pay_for_method(text: str, method: str, arguments: tuple[Any, ...]) -> None:
    if method in _WIDENS:
        raise OverBudget(f"the method {method} of text")
    _budget.pay(len(text))
    if method == "join" and arguments and isinstance(arguments[0], list | tuple):
        _budget.pay(len(text) * len(arguments[0]))
    elif method == "replace" and len(arguments) > 1:
        _budget.pay((text.count(str(arguments[0])) + 1) * (STEP + len(str(arguments[1]))))
    elif method in ("split", "rsplit", "splitlines"):
        _budget.pay(STEP)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    if len(format) > 100 or _WIDE.search(format):
        raise OverBudget("strftime_now: a format of more than 100 characters")
    return datetime.now().strftime(format)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for others; here its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_called"), [], [], body).set_lineno(line)

    def _called(self, caller: Macro) -> str:
        _budget.pay(self.environment.text_size)  # type: ignore[attr-defined]
        return caller()


def _environment() -> _Bounded:
    return _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
