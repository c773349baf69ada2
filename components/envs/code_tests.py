"""Reward for code: the program in a completion, tested by a process that it cannot reach."""

from __future__ import annotations

import re
from typing import Any

from ..types import Task
from .jail import PLAIN, Limits, why_not

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_tests(
    task: Task,
    text: str,
    *,
    partial: bool = False,
    cpu_s: int = 5,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    threads: int = 16,
    disk_mb: int = 16,
) -> float:
    """1.0 when the last code block passes all tests of `task.info["tests"]` (with `partial`: the share it passes).

    A test is statements ("assert add(1, 2) == 3"); or {"fn_name": ..., "input": [arguments], "output": ...}; or
    {"input": ..., "output": ...}: what the program reads and what it must print, apart from white space at line ends.
    Each runs with the program anew and has the limits to itself. Python's standard library only. Raises ValueError for
    tests that no program could pass, RuntimeError where the system offers no jail.
    """
    tests = task.info.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError(f'env.reward: code_tests cannot score task {task.task_id}; its info has no list "tests"')
    program = last_block(text)
    if program is None:
        return 0.0
    limits = Limits(cpu_s=cpu_s, timeout_s=timeout_s, memory_mb=memory_mb, threads=threads, disk_mb=disk_mb)
    passed = 0
    for number, test in enumerate(tests):
        try:
            is_passed = _passes(program, test, limits)
        except _BadTest as error:
            raise ValueError(
                f"env.reward: code_tests cannot score task {task.task_id}: tests[{number}]: {error}"
            ) from None
        if is_passed:
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


class _BadTest(Exception):
    pass


def _passes(program: str, test: Any, limits: Limits) -> bool:
    if isinstance(test, dict) and set(test) == {"input", "output"}:
        # The right output is here, the program there: it needs no judge, whatever the program does to its interpreter.
        done = PLAIN.run_script(program, stdin=str(test["input"]), limits=limits)
        return done.finished and _lines(done.stdout) == _lines(str(test["output"]))
    if isinstance(test, dict):
        if set(test) != {"fn_name", "input", "output"} or not isinstance(test["input"], list):
            raise _BadTest(
                f'got the keys {sorted(test)}, expected {{"input": text, "output": text}} or '
                '{"fn_name": name, "input": [arguments], "output": value}'
            )
    elif not isinstance(test, str):
        raise _BadTest(f"got a {type(test).__name__}, expected statements or a dict")
    verdict = PLAIN.judge(program, test, limits=limits)
    if verdict.is_bad_test:
        raise _BadTest(verdict.reason)
    return verdict.passed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
