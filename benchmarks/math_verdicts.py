"""Verdicts a second of `math_verify` and of `reasoning_gym`, from as many threads as there are processors, twice.

    python benchmarks/math_verdicts.py --seconds 5

Each answer is new, so that nothing is remembered. Processor time is that of this process and of all that score.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import psutil

from leeway.envs.rewards import math_verify, reasoning_gym
from leeway.tasks.reasoning_gym_tasks import generate_rows
from leeway.types import Task

Case = tuple[Callable[[Task, str], float], Task, str, float]


def formulas() -> Iterator[Case]:
    for number in range(10**9):
        gold = Task(task_id="t", prompt="", answer=f"{number}x+\\frac{{1}}{{2}}", info={})
        yield math_verify, gold, f"So it is \\boxed{{0.5 + {number} x}}.", 1.0


def numbers() -> Iterator[Case]:
    for number in range(10**9):
        yield (
            math_verify,
            Task(task_id="t", prompt="", answer=str(number), info={}),
            f"7 + 2 is not it.\n#### {number}",
            1.0,
        )


def gym(dataset: str) -> Iterator[Case]:
    rows = generate_rows(dataset, options={}, size=20, seed=1)
    for number in range(10**9):
        row = rows[number % len(rows)]
        yield reasoning_gym, Task(task_id="t", prompt="", answer=row.answer, info=row.info), row.answer, 1.0


KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "math_verify, numbers": numbers,
    "math_verify, formulas": formulas,
    "reasoning_gym, chain_sum": lambda: gym("chain_sum"),
    "reasoning_gym, countdown": lambda: gym("countdown"),
    "reasoning_gym, spiral_matrix": lambda: gym("spiral_matrix"),
}


def cpu_seconds() -> float:
    """Of this process and all below it, ended ones included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
        if process.pid != os.getpid():
            total += times.children_user + times.children_system
    return total


def measure(kind: str, seconds: float) -> None:
    cases = KINDS[kind]()

    def verdict(case: Case) -> bool:
        reward, task, text, expected = case
        return reward(task, text) == expected

    num_threads = 2 * (os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads) as threads:
        assert all(threads.map(verdict, (next(cases) for _ in range(2 * num_threads)))), "a right answer was not paid"
        cpu, begun, done = cpu_seconds(), time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            right = list(threads.map(verdict, [next(cases) for _ in range(20)]))
            assert all(right), "a right answer was not paid"
            done += len(right)
        wall = time.monotonic() - begun
    each = (cpu_seconds() - cpu) / done
    print(f"{kind}: {done / wall:.0f} verdicts/s, {1e3 * each:.1f} ms of processor time each", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    for kind in KINDS:
        measure(kind, arguments.seconds)
