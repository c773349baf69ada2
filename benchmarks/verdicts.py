"""How many verdicts a second does `code_tests` give, and does a busy machine change any?

    python benchmarks/verdicts.py            # short programs, two at a time; then slow ones beside 8 busy processes
    python benchmarks/verdicts.py --busy 16 --slow 20 --cpu-s 1.3

A verdict is one program held to one test. Printed for each form of test: verdicts a second by the clock, and processor
milliseconds for each, of Leeway and of the jail together, which other work on the machine does not change. Then the
share of right verdicts for programs that need `--cpu-s` seconds of a processor each (limit: 5), alone and beside busy
processes. Exit code 1 where any verdict was wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from leeway.envs.code_tests import code_tests
from leeway.envs.jail import PLAIN, why_not
from leeway.types import Task

FORMS: dict[str, tuple[str, Any]] = {
    "statements": ("def add(a, b):\n    return a + b", "assert add(1, 2) == 3"),
    "fn_name": ("def add(a, b):\n    return a + b", {"fn_name": "add", "input": [1, 2], "output": 3}),
    "stdin/stdout": ("a, b = map(int, input().split())\nprint(a + b)", {"input": "1 2\n", "output": "3\n"}),
}
SLOW = """
import time
def f(seconds):
    begun = time.process_time()
    while time.process_time() - begun < seconds: pass
    return 'done'
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verdicts", type=int, default=400, help="of each form of test")
    parser.add_argument("--threads", type=int, default=2, help="verdicts at a time")
    parser.add_argument("--slow", type=int, default=10, help="slow programs, alone and beside busy processes")
    parser.add_argument("--cpu-s", type=float, default=1.3, help="seconds of a processor that a slow program needs")
    parser.add_argument("--busy", type=int, default=8, help="busy processes beside the slow programs")
    args = parser.parse_args()
    if missing := why_not():
        print(missing)
        return 2
    wrong = 0
    print("| test | verdicts | a second | processor ms each | right |\n|---|---|---|---|---|")
    for form, (program, test) in FORMS.items():
        right, seconds, cpu_s = measure(lambda p=program, t=test: pay(p, t), args.verdicts, args.threads)
        wrong += args.verdicts - right
        print(f"| {form} | {args.verdicts} | {args.verdicts / seconds:.0f} | {cpu_s / args.verdicts * 1e3:.1f} | "
              f"{right / args.verdicts:.0%} |", flush=True)  # fmt: skip
    test = f"assert f({args.cpu_s}) == 'done'"
    for number in (0, args.busy):
        with busy(number):
            right, seconds, _ = measure(lambda: pay(SLOW, test), args.slow, args.threads)
        wrong += args.slow - right
        print(f"{args.slow} right programs of {args.cpu_s:g} processor seconds beside {number} busy processes: "
              f"{right} right, {seconds:.1f} s", flush=True)  # fmt: skip
    PLAIN.close()
    return int(wrong > 0)


def pay(program: str, test: Any) -> float:
    return code_tests(Task(task_id="t", prompt="p", info={"tests": [test]}), f"```python\n{program}\n```")


def measure(verdict: Callable[[], float], number: int, threads: int) -> tuple[int, float, float]:
    """(right ones, wall seconds, processor seconds of this process and of the jail)."""
    begun, used_s = time.monotonic(), processor_s()
    with ThreadPoolExecutor(threads) as pool:
        right = sum(pool.map(lambda _: verdict() == 1.0, range(number)))
    return right, time.monotonic() - begun, processor_s() - used_s


def processor_s() -> float:
    """Of this process, of the jail's own, and of the jobs that it has seen end."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    with open(f"/proc/{PLAIN.pid()}/stat") as file:
        jail = file.read().rpartition(")")[2].split()[11:15]
    return own.ru_utime + own.ru_stime + sum(map(int, jail)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def busy(number: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    sys.exit(main())
