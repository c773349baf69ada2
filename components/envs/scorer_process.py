"""The script of a scoring process: JSON lines in, one number per line out.

Started by `guarded.py` as a file, not as a module of the package, so that it imports nothing but the checker it runs
(the package's shared types would load torch). Scoring that parses a model's text into mathematics can take any time and
memory; here it can be killed.
"""

from __future__ import annotations

import inspect
import json
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MAX_CPU_S = 60
"""CPU seconds for one answer after which the kernel ends this process (should its parent be gone)."""

MAX_MEMORY_BYTES = 4 * 2**30


def score_math(answer: str, text: str) -> float:
    """1.0 when math-verify finds an expression in `text` that equals `answer`; 0.0 when not or when it cannot parse."""
    from math_verify import parse, verify

    gold = _parse_answer(answer)
    found = parse(text, parsing_timeout=2)
    return float(bool(gold) and bool(found) and verify(gold, found, timeout_seconds=2))


@lru_cache(maxsize=256)
def _parse_answer(answer: str) -> Any:
    from math_verify import parse

    # Answers in a file often are bare LaTeX, which math-verify reads only between dollars.
    bare_latex = "\\" in answer and "$" not in answer and "\\boxed" not in answer
    return parse(f"${answer}$" if bare_latex else answer, parsing_timeout=2)


def score_entry(info: dict[str, Any], text: str) -> float:
    """What the reasoning-gym dataset named in `info` pays for `text` as the answer to `info["entry"]`."""
    entry = info["entry"]
    if info["as_tuples"]:
        entry = {key: value if isinstance(value, str) else _tuples(value) for key, value in entry.items()}
    answer = entry["answer"]
    if isinstance(answer, str) and text.strip() == answer.strip():
        text = answer  # datasets compare to the letter, and some answers end with a line's end
    scorer = _scorer(info["source_dataset"], json.dumps(info["options"], sort_keys=True))
    try:
        return float(scorer.score_answer(text, entry))
    except (
        Exception
    ):  # some datasets raise on text that is not of the form they expect (prime_factorization on "nonsense")
        return 0.0


@lru_cache(maxsize=64)
def parses_text(dataset: str, options: str) -> bool:
    """Whether a reasoning-gym dataset hands the model's text to an expression parser, which may take for ever."""
    source = inspect.getsource(inspect.getmodule(type(_scorer(dataset, options))))  # type: ignore[arg-type]
    return re.search(r"parse_expr|sympify|\beval\(|\bexec\(", source) is not None


@lru_cache(maxsize=64)
def _scorer(dataset: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, size=1, seed=0, **json.loads(options))


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


SCORERS = {"math_verify": ("math_verify", score_math), "reasoning_gym": ("reasoning_gym", score_entry)}


def main(kind: str) -> None:
    package, scorer = SCORERS[kind]
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole terminal group; the parent closes our stdin instead
    __import__(package)
    answers, sys.stdout = sys.stdout, sys.stderr  # a checker that prints must not write into our answers
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF's default action ends us even inside a C loop
        try:
            reward = scorer(*json.loads(line))
        except Exception:  # whatever a parser makes of a model's text: an answer that cannot be checked earns nothing
            reward = 0.0
        print(json.dumps(reward), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
