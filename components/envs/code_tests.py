"""Reward for code: the program in a completion, run against the task's tests in a sandbox."""

from __future__ import annotations

import re
from typing import Any

from ..types import Task
from .sandbox import Limits, run_sandboxed, why_not

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_tests(
    task: Task,
    text: str,
    *,
    partial: bool = False,
    timeout_s: float = 5.0,
    cpu_s: int = 5,
    memory_mb: int = 512,
    processes: int = 4,
    disk_mb: int = 16,
) -> float:
    """1.0 when the last code block passes all tests of `task.info["tests"]` (with `partial`: the share it passes).

    Tests are statements ("assert add(1, 2) == 3"), each run after the program, or {"input": ..., "output": ...}: what
    the program reads and what it must print, apart from white space at line ends. Each test has the limits to itself.
    Python's standard library only. Raises RuntimeError where the system offers no sandbox.
    """
    tests = task.info.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError(f'env.reward: code_tests cannot score task {task.task_id}; its info has no list "tests"')
    program = last_block(text)
    if program is None:
        return 0.0
    limits = Limits(timeout_s=timeout_s, cpu_s=cpu_s, memory_mb=memory_mb, processes=processes, disk_mb=disk_mb)
    passed = 0
    for test in tests:
        if _passes(program, test, limits):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(tests)


code_tests.blocking = True  # type: ignore[attr-defined]
code_tests.why_not = why_not  # type: ignore[attr-defined]


def last_block(text: str) -> str | None:
    """The last ``` block of the text, with or without "python" behind it; None where there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def _passes(program: str, test: Any, limits: Limits) -> bool:
    if isinstance(test, str):
        return run_sandboxed(program, then=test, limits=limits).finished
    done = run_sandboxed(program, stdin=str(test["input"]), limits=limits)
    return done.finished and _lines(done.stdout) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
