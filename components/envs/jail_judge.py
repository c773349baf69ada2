"""Tests of a program, in two processes: the judge runs the test, the program answers calls. Only data crosses.

    judge: `assert add([1], 2) == 3` -- call add, [1], 2 --> program: the source was run here; calls its function
           compares here             <------- 3 ---------

In the test, the names that the program defines stand for remote objects (`Remote`). The judge never sends what a test
expects, and whatever the program does to itself changes no comparison. Each process is jailed, the judge as well: tests
are code that came with the data. Loaded as a file by `jail_process.py`.
"""

from __future__ import annotations

import ast
import builtins
import collections
import decimal
import fractions
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jail_wire as wire  # by `jail_process.py`, as a file

MAX_REPLY_BYTES = 2**23
MAX_SOURCE_BYTES = 2**28
MAX_STEPS = 10**6
"""Of one test: messages, the items of iterators among them."""

OWN_MODULES = {name: name for name in sys.stdlib_module_names if not name.startswith("_")}
OWN_MODULES |= {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot", "sp": "scipy", "nx": "networkx"}
OWN_MODULES |= {name: name for name in ("numpy", "pandas", "scipy", "sympy", "networkx", "sklearn", "torch", "pytest")}
"""Used as `math.isclose(...)` in a test, these are the judge's own, whatever the program calls by that name."""
# fmt: off
OPERATORS = [
    "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "mod",
    "rmod", "pow", "rpow", "and", "rand", "or", "ror",
]
# fmt: on
OWN_NAMES = {
    **{name: getattr(collections, name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")},
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "isclose": math.isclose,
}
"""Names that tests use as if the program had to import them."""

VERDICTS = {"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "difference", "symmetric_difference"}
"""Methods of strings and sets by which a test would ask an object of the program's own whether it is right."""
UNCROSSED = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)
"""Raised by a program, they would end a loop of the test early, and with it what that was to check."""


class Unsupported(Exception):
    """A test does what only the program could judge. Whoever catches it, the test has failed."""


class Link:
    """The judge's end: asks, and answers the program's calls of functions that the test gave it."""

    def __init__(self, fd: int, *, nan: bool) -> None:
        self._fd = fd
        self._nan = nan
        self._functions: list[Callable[..., Any]] = []
        self._steps = 0
        self.was_used = False
        self.broken = ""

    def ask(self, *question: Any, arguments: list[Any] | None = None) -> Any:
        try:
            return self._ask(question, arguments)
        except (Unsupported, ConnectionError, ValueError, OSError, MemoryError) as error:
            if not getattr(error, "is_programs", False):
                self.broken = self.broken or f"{type(error).__name__}: {error}"
            raise

    def refuse(self, what: str) -> NoReturn:
        self.broken = self.broken or f"{what}; only data can be compared"
        raise Unsupported(self.broken)

    def _ask(self, question: tuple[Any, ...], arguments: list[Any] | None) -> Any:
        if self.broken:
            raise Unsupported(self.broken)
        wire.send(self._fd, wire.dumps(list(question), self._write_other))
        while True:
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise ValueError(f"more than {MAX_STEPS} messages")
            kind, *rest = wire.loads(wire.receive(self._fd, MAX_REPLY_BYTES), self._read_other, nan=self._nan)
            if kind == "call":
                number, values, named = rest
                wire.send(self._fd, self._call_own(number, values, named))
            elif kind == "value":
                value, changed = rest
                if value is None:  # who changes what it was given says so, as in Python, by returning nothing
                    for place, content in changed.items():
                        _update((arguments or [])[place], content)
                return value
            elif kind == "raised":
                names, text = rest
                raise _raised(names, text)
            elif kind == "stop" and question[0] == "next":
                raise StopIteration
            else:
                raise ValueError("the program broke the protocol")

    def _call_own(self, number: int, values: list[Any], named: dict[str, Any]) -> bytes:
        try:
            return wire.dumps(["value", self._functions[number](*values, **named)], self._write_other)
        except Exception as error:
            return wire.dumps(["raised", type(error).__name__, str(error)[:1000]])

    def _write_other(self, value: Any) -> Any:
        if type(value) is Remote:
            return value._number
        if getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return f"builtin {value.__name__}"
        if callable(value) and not isinstance(value, type):
            self._functions.append(value)
            return f"function {len(self._functions) - 1}"
        raise ValueError(f"an argument of the test is a {type(value).__name__}: no data")

    def _read_other(self, content: Any) -> Remote:
        if type(content) is not int:
            raise ValueError("no data")
        return Remote(self, content)


class Remote:
    """An object of the program. It can be called, its attributes and items read: never asked whether it is equal."""

    __slots__ = ("_link", "_number")
    _link: Link
    _number: int
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._link.was_used = True
        return self._ask("call", list(arguments), named, arguments=list(arguments))

    def __getattr__(self, name: str) -> Any:
        if name in VERDICTS or name.startswith("__"):
            self._link.refuse(f"the test uses .{name} of an object of the program's own")
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set item", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delete item", key)

    def __iter__(self) -> Iterator[Any]:
        return self._ask("iterate")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return self._ask("length")

    def __bool__(self) -> bool:
        return self._ask("truth")

    def __str__(self) -> str:
        return self._ask("text")

    __repr__ = __str__

    def _ask(self, what: str, *more: Any, arguments: list[Any] | None = None) -> Any:
        return self._link.ask(what, self, *more, arguments=arguments)

    def __eq__(self, other: object) -> bool:
        return other is not None and self._refuse()

    def __ne__(self, other: object) -> bool:
        return other is None or self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        self._link.refuse("the test compares or calculates with an object of the program's own")


for _operator in OPERATORS:
    setattr(Remote, f"__{_operator}__", Remote._refuse)


def judge(data: int, link_fd: int) -> int:
    """[program, test] -> [passed, reason, refused]; refused: the test is of no use, whatever the program."""
    program, test = wire.loads(wire.receive(data, MAX_SOURCE_BYTES))
    # NaN is not more, not less than anything: where a test does not speak of it, `not abs(f(1) - 3) > 1e-6` is no test.
    link = Link(link_fd, nan=isinstance(test, dict) or "nan" in test.lower())
    try:
        run_test(link, program, test)
        reason = link.broken or ("" if link.was_used else "the test did not call the program")
        verdict = [not reason, reason, False]
    except BadTest as error:
        verdict = [False, str(error), True]
    except BaseException as error:  # a test may raise anything, SystemExit too
        verdict = [False, link.broken or describe(error), False]
    wire.send(data, wire.dumps(verdict))
    return 0


class BadTest(Exception):
    pass


def run_test(link: Link, program: str, test: Any) -> None:
    if isinstance(test, dict):
        name = test["fn_name"]
        defined = link.ask("run", program, [name, "Solution"])
        if name not in defined and "Solution" not in defined:
            raise NameError(f"the program defines no {name}")
        function = defined[name] if name in defined else getattr(defined["Solution"](), name)
        found = function(*test["input"])
        assert same(found, test["output"]), f"{name} returned something else"
        return
    try:
        tree = ast.parse(test)
        code = compile(tree, "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTest(f"the test is no Python: {describe(error)}") from None
    wanted, own = names_of(tree)
    defined = {name: value for name, value in link.ask("run", program, sorted(wanted)).items() if name in wanted}
    link.was_used = any(type(value) is not Remote for value in defined.values())  # a test may read a constant
    module = types.ModuleType("test")
    sys.modules["test"] = module
    vars(module).update({**defined, **own})
    exec(code, vars(module))


def names_of(tree: ast.Module) -> tuple[set[str], dict[str, Any]]:
    """The names that a test may take from the program, and those that it is given by the judge. Raises BadTest."""
    nodes = list(ast.walk(tree))
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    loaded = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    names = {node.id for node in loaded} - set(dir(builtins))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    bound |= {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    not_bases = {node.id for node in loaded if id(node) not in bases}
    own: dict[str, Any] = {name: OWN_NAMES[name] for name in names & set(OWN_NAMES) - bound}
    for name in names & set(OWN_MODULES) - not_bases - bound:
        try:
            own[name] = importlib.import_module(OWN_MODULES[name])
        except ImportError:
            raise BadTest(f"the test uses {name}, but there is only Python's standard library") from None
    wanted = names - set(own)
    if not wanted - bound:
        raise BadTest("the test uses no name that the program could define")
    return wanted, own


def same(found: Any, expected: Any) -> bool:
    """Equal data of the same types. Numbers are equal by value (True is none), tuples to lists: JSON has no tuples."""
    if type(found) is Remote:
        return False
    numbers, sequences = (int, float, complex), (list, tuple)
    if type(expected) in sequences:
        return (
            type(found) in sequences
            and len(found) == len(expected)
            and all(same(a, b) for a, b in zip(found, expected, strict=True))
        )
    if type(expected) is dict:
        return (
            type(found) is dict
            and len(found) == len(expected)
            and all(key in found and same(found[key], expected[key]) for key in expected)
        )
    if type(expected) in numbers:
        return type(found) in numbers and (found == expected or (found != found and expected != expected))
    return type(found) is type(expected) and found == expected


def _update(old: Any, content: Any) -> None:
    """A list, dict or set that the program changed in place changes in the test."""
    if type(old) is not type(content):
        raise ValueError("the program broke the protocol")
    if type(old) is list:
        old[:] = content
    else:
        old.clear()
        old.update(content)


def _raised(names: list[str], text: str) -> BaseException:
    """The program's exception as the nearest of Python's own; `names` of its classes, nearest first."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, UNCROSSED):
            try:
                error = kind(text)
            except TypeError:  # one that takes more arguments
                continue
            error.is_programs = True  # type: ignore[attr-defined]
            return error
    return RuntimeError(f"{names[:1]}: {text}")


def describe(error: BaseException) -> str:
    """What was raised, in one line."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:1000]


# The program's side: out of nobody's reach but the program's.


def answer(data: int, link_fd: int) -> int:
    """Run the source that the judge sends, then answer its questions until it is gone."""
    objects: dict[int, Any] = {}
    kept: dict[int, int] = {}

    def write_other(value: Any) -> int:
        number = kept.setdefault(id(value), len(objects))
        objects[number] = value  # keeps it alive, so that its id is its own
        return number

    def read_other(content: Any) -> Any:
        if type(content) is int:
            return objects[content]
        kind, _, name = content.partition(" ")
        return getattr(builtins, name) if kind == "builtin" else remote_function(int(name))

    def remote_function(number: int) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            wire.send(link_fd, wire.dumps(["call", number, list(arguments), named], write_other))
            kind, *rest = wire.loads(wire.receive(link_fd, MAX_SOURCE_BYTES), read_other)
            if kind == "value":
                return rest[0]
            kind = getattr(builtins, rest[0], Exception)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)(rest[1])

        return call

    while True:
        try:
            question = wire.loads(wire.receive(link_fd, MAX_SOURCE_BYTES), read_other)
        except ConnectionError:
            return 0
        changed: dict[int, Any] = {}
        try:
            if question[0] == "call":
                value, changed = _call(question[1], question[2], question[3], write_other)
            else:
                value = ACTIONS[question[0]](*question[1:])
            reply = wire.dumps(["value", value, changed], write_other)
        except BaseException as error:
            if question[0] == "next" and isinstance(error, StopIteration):
                reply = wire.dumps(["stop"])
            else:
                reply = wire.dumps(["raised", [kind.__name__ for kind in type(error).__mro__], str(error)[:1000]])
        wire.send(link_fd, reply)


def _run(source: str, names: list[str]) -> dict[str, Any]:
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses and pickle look a class's module up
    exec(compile(source, "program", "exec", dont_inherit=True), vars(module))
    return {name: vars(module)[name] for name in names if name in vars(module)}


def _call(function: Any, arguments: list[Any], named: dict[str, Any], other: wire.Other) -> tuple[Any, dict[int, Any]]:
    mutable = {i: wire.dumps(a, other) for i, a in enumerate(arguments) if type(a) in (list, dict, set)}
    value = function(*arguments, **named)
    return value, {i: arguments[i] for i, before in mutable.items() if wire.dumps(arguments[i], other) != before}


ACTIONS: dict[str, Callable[..., Any]] = {
    "run": _run,
    "get": getattr,
    "set": setattr,
    "item": lambda value, key: value[key],
    "set item": lambda value, key, item: value.__setitem__(key, item),
    "delete item": lambda value, key: value.__delitem__(key),
    "iterate": lambda value: _Iterator(value),
    "next": next,
    "length": len,
    "truth": bool,
    "text": str,
}


class _Iterator:
    """So that an iterator crosses as an object, whatever data its class is a kind of."""

    def __init__(self, value: Any) -> None:
        self._items = iter(value)

    def __next__(self) -> Any:
        return next(self._items)

    def __iter__(self) -> _Iterator:
        return self
