"""What the process of a job does, once it has no rights left. Loaded as a file by `jail_process.py`.

Each returns the exit code of its process. Nothing here is out of reach of the program that it runs.
"""

from __future__ import annotations

import ast
import atexit
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable

import jail_judge
import jail_wire as wire  # by `jail_process.py`, as a file

MAX_INPUT_BYTES = 2**28


def call(data: int, link: int) -> int:
    """Call a function of an imported module: [name, arguments] -> ["value", value] or ["raised", what]."""
    name, arguments = wire.loads(wire.receive(data, MAX_INPUT_BYTES))
    try:
        answer = wire.dumps(["value", find(name)(*arguments)])
    except Exception as error:
        answer = wire.dumps(["raised", jail_judge.describe(error)])
    wire.send(data, answer)
    return 0


def find(name: str) -> Callable[..., object]:
    """The function of "module:function"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def program(data: int, link: int) -> int:
    """Run source as a script: [source, stdin] -> what it raised, or nothing; its exit code is that of a script."""
    source, stdin = wire.loads(wire.receive(data, MAX_INPUT_BYTES))
    with open("stdin", "w+b") as file:  # a real file: programs read `open(0)` and os.read(0) too
        file.write(stdin.encode(errors="surrogateescape"))
        file.flush()
        os.remove("stdin")
        os.dup2(file.fileno(), 0)
    os.lseek(0, 0, os.SEEK_SET)
    take_streams()
    try:
        code = run_script(source)
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a script: wait for its threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        wire.send(data, jail_judge.describe(error).encode(errors="replace"))
        return 1
    return code


def judged(data: int, link: int) -> int:
    """The program of a pair, see `jail_judge`."""
    take_streams()
    return jail_judge.answer(data, link)


def run_script(source: str) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(source, "program", "exec", dont_inherit=True), vars(module))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        raise
    return 0


def warm_up() -> None:
    """What the interpreter makes when it is first needed (the classes of `ast`: 2 ms), made before the forks."""
    for _ in range(20):  # often enough that the bytecode is specialised
        tree = ast.parse("def check(candidate):\n    assert candidate([1], 'a') == {2: None}, 'x'\ncheck(f)")
        jail_judge.names_of(tree)
        exec(compile(tree, "test", "exec", dont_inherit=True), {"f": lambda *_: {2: None}})
        value = [None, True, 1, 2.5, "a", b"a", (1,), {1}, {"a": [1]}]
        jail_judge.same(wire.loads(wire.dumps(value)), value)


def take_streams() -> None:
    """The three streams, as a script has them, without what this interpreter had read or was to write."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv[:] = ["program"]


KINDS: dict[str, Callable[[int, int], int]] = {
    "call": call,
    "program": program,
    "judge": jail_judge.judge,
    "judged": judged,
}
