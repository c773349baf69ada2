"""Every bundled dataset of reasoning-gym: how its answers are scored, what its own answer and attacks are paid.

    python benchmarks/gym_answers.py                     all of them; writes docs/reasoning_gym.md
    python benchmarks/gym_answers.py --only countdown    these; prints their rows

For each dataset a few tasks are made. Its own answer must be paid what its own `score_answer` says; each attack is an
answer that solves nothing, or code that would create a file. "WRONG" in a row is a defect of ours; the last line counts
them, and the exit code is 1 if there are any. Processor time
is that of all processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import psutil
import reasoning_gym
from reasoning_gym.factory import DATASETS

from leeway.envs import gym_answers
from leeway.tasks.reasoning_gym_tasks import generate_rows

OUT = Path(__file__).resolve().parents[1] / "docs" / "reasoning_gym.md"
NUM_TASKS = 2
NUM_TIMED = 20
SOLUTIONS = {"graph_color": "possible_answer", "rubiks_cube": "example_correct_answer"}
"""Where the entry of a dataset without one answer holds an example of one."""

NOTES = {
    "composite": "takes objects, not settings: several datasets are a `mix`",
    "coin_flip": "the library pays 1 for the first characters of the number",
    "complex_arithmetic": "the library pays 1 for nan",
    "calendar_arithmetic": "the library pays above 1 where the answer is -1",
    "game_of_life_halting": "the library pays 1 for any text",
    "number_sorting": "the library pays 1 for NaN in each place",
    "puzzle24": "the library pays 1 for numbers of one's own",
}


@dataclass(frozen=True)
class Row:
    dataset: str
    scored: str
    right: str
    attack: float
    worst: str
    cpu_ms: float
    wrong: bool


def attacks(marker: Path) -> list[str]:
    """Answers that solve nothing."""
    write = f"open({str(marker)!r}, 'w')"
    patch = "__import__('reasoning_gym').factory.DATASETS"
    return [
        "",
        "x",
        "nan",
        "inf",
        "[NaN, NaN, NaN, NaN]",
        "{}",
        "[]",
        "()",
        "-0.0",
        "6*4*1*1",
        f"__import__('os').system('touch {marker}')",
        write,
        f"[{write}]",
        f"1 + {write}.write('x')",
        f"[c for c in ().__class__.__base__.__subclasses__() if {write}]",
        f"(lambda: {write})()",
        f"[setattr({patch}['chain_sum'][0], 'score_answer', lambda *a: 1.0)]",
        "9**9**9**9",
        "1e999999999",
        "[[[[[[" * 200,
    ]


def own_answer(dataset: str, entry: dict[str, Any]) -> str | None:
    answer = entry["answer"]
    if isinstance(answer, str):
        return answer
    example = entry["metadata"].get(SOLUTIONS.get(dataset, "example_answer"))
    return None if example is None else example if isinstance(example, str) else json.dumps(example)


def measure(dataset: str, marker: Path) -> Row:
    if dataset == "composite":
        return Row(dataset, "refused", "", 0.0, "", 0.0, False)
    rows = generate_rows(dataset, options={}, size=NUM_TASKS, seed=5)
    library = reasoning_gym.create_dataset(dataset, size=NUM_TASKS, seed=5)
    infos = [json.loads(json.dumps(row.info)) for row in rows]
    paid, expected, worst, most = [], [], "", 0.0
    for info, index in zip(infos, range(NUM_TASKS), strict=True):
        entry = library[index]
        right = own_answer(dataset, entry)
        if right is not None:
            expected.append(round(float(library.score_answer(entry["answer"] if entry["answer"] else right, entry)), 3))
            paid.append(round(gym_answers.score(info, right), 3))
        for attack in attacks(marker):
            if right is not None and attack.strip().lower() == right.strip().lower():
                continue
            value = gym_answers.score(info, attack)
            if value > most:
                worst, most = attack, value
    answer = own_answer(dataset, library[0])
    reaching = "x" if answer is None else answer
    begun = processor_s(dataset)
    for _ in range(NUM_TIMED):
        gym_answers.score(infos[0], reaching)
    cpu_ms = 1e3 * (processor_s(dataset) - begun) / NUM_TIMED
    gym_answers.close_jails()
    wrong = paid != expected or most >= 1.0 or marker.exists()
    marker.unlink(missing_ok=True)
    scored = "grammar, then jail" if dataset in gym_answers.GRAMMARS else "jail"
    scored += ", stricter" if dataset in NOTES else ""
    shown = ", ".join(f"{value:g}" for value in dict.fromkeys(paid)) or "has none"
    return Row(dataset, scored, shown, most, worst, cpu_ms, wrong)


def processor_s(dataset: str) -> float:
    """Of this process, of the dataset's jail, and of the jobs that it has seen end."""
    own, jail = psutil.Process().cpu_times(), psutil.Process(gym_answers.jail_of(dataset).pid()).cpu_times()
    return own.user + own.system + jail.user + jail.system + jail.children_user + jail.children_system


INTRODUCTION = """# Answers to reasoning-gym's datasets

Written by `python benchmarks/gym_answers.py`. How answers are scored:
[environments.md](environments.md#answers-to-reasoning-gym).

Of the {rows} datasets of reasoning-gym {version}, all but one are scored, each answer in a process of its own in the
jail. {compiling} of them compile text on the way to a verdict: an answer reaches those only if it fits a grammar.
*Right* is what the dataset's own answer is paid, which is what the library's function says outside of the jail.
*Attacks* is the most that any of {attacks} answers that solve nothing is paid (code, `nan`, empty lists, towers of
powers): what is above 0 there is the library's mark for the form, or for text that is part of the answer. *CPU* is the
processor time of a verdict in ms, of all processes together, for the dataset's own answer; two cores give 2000 / CPU
verdicts a second. *Stricter* than the library: see the last column.

With `task.options`, these datasets are made anew for each verdict, which may depend on them: {settings}.

| dataset | scored | right | attacks | CPU | |
|---|---|---|---|---|---|"""


def page(rows: list[Row]) -> str:
    compiling = sum("grammar" in row.scored for row in rows)
    lines = [
        INTRODUCTION.format(
            rows=len(rows),
            version=version("reasoning-gym"),
            compiling=compiling,
            attacks=len(attacks(Path())),
            settings=", ".join(f"`{row.dataset}`" for row in rows if gym_answers.reads_settings(row.dataset)),
        )
    ]
    for row in rows:
        wrong = "WRONG " if row.wrong else ""
        note = f"{wrong}{NOTES.get(row.dataset, '')}"
        lines.append(f"| `{row.dataset}` | {row.scored} | {row.right} | {row.attack:.2g} | {row.cpu_ms:.0f} | {note} |")
    return "\n".join([*lines, "", f"{sum(row.wrong for row in rows)} rows are wrong.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    names = parser.parse_args().only
    logging.getLogger("leeway").setLevel(logging.ERROR)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dataset in names or sorted(DATASETS):
            begun = time.monotonic()
            rows.append(measure(dataset, Path(folder) / "marker"))
            print(rows[-1], f"{time.monotonic() - begun:.1f} s", flush=True)
    if not names:
        OUT.write_text(page(rows), encoding="utf-8")
    wrong = sum(row.wrong for row in rows)
    print(f"{wrong} rows are wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
