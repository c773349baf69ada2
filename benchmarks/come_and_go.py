"""Explorers that come, go, are killed and are stopped while one train job goes on: what it costs, and what is lost.

    python benchmarks/come_and_go.py --out /tmp/explorers

Three explorers join one after the other, two of them with tasks of their own. One leaves (Ctrl-C), one is killed with
all of its processes, one is stopped (SIGSTOP) for longer than `explorer.silent_s` and goes on. Then as many steps with
the same three explorers, undisturbed, by as many seeds as wanted. Said at the end: the trainer's steps, the lag, what
became of every group, held-out accuracies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

SILENT_S = 10.0
STOPPED_S = 30.0
OWN_TASKS = ["explorer.tasks=own", "task.options.min_digits=1", "eval.at_start=false"]


class Job:
    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "leeway.cli.main", "run", *arguments]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def tree(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal_all(self, number: signal.Signals) -> None:
        for process in self.tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def end(self, within_s: float) -> int:
        return self.process.wait(within_s)


def rows_of(run: Path) -> list[dict[str, Any]]:
    file = next(iter(run.glob("stages/*/metrics.jsonl")), run / "metrics.jsonl")
    if not file.exists():
        return []
    rows = []
    for line in file.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # still being written
            continue
    return rows


def trained_steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run) if "step/total_s" in row]


def until_it_delivers(run: Path, name: str, train: Job, num_more: int = 20, deadline_s: float = 300.0) -> None:
    index = run / "meeting/groups/index.sqlite"

    def count() -> int:
        if not index.exists():
            return 0
        with contextlib.closing(sqlite3.connect(index)) as connection:
            query = "SELECT COUNT(*) FROM groups WHERE explorer = ?"
            return connection.execute(query, (name,)).fetchone()[0]

    first, until = count(), time.monotonic() + deadline_s
    while count() < first + num_more:
        if train.process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{name} delivered nothing: {train.log}")
        time.sleep(0.5)
    print(f"{name} delivers, at step {len(trained_steps(run))}", flush=True)


def accuracy(out: Path, name: str, model: Path, settings: list[str]) -> str:
    evaluate = Job(out, f"evaluate-{name}", "evaluate", "--config", "quickstart", f"output_dir={out}/runs",
                   f"name=evaluate-{name}", f"model.path={model}", "model.init=null", *settings)  # fmt: skip
    if evaluate.end(600):
        raise SystemExit(f"evaluation failed: {evaluate.log}")
    summary = json.loads((out / "runs/leeway" / f"evaluate-{name}" / "summary.json").read_text())
    measured = next(iter(summary["eval"].values()))
    return f"{measured['exact_match']:.3f} ({measured['exact_match_low']:.3f} to {measured['exact_match_high']:.3f})"


def what_became_of_groups(index: Path) -> dict[str, Any]:
    rows = sqlite3.connect(index).execute("SELECT group_id, source, draw, state, explorer FROM groups").fetchall()
    trained = [row for row in rows if row[3] == "trained"]
    draws = Counter((source, draw) for _, source, draw, _, _ in trained if source)
    return {
        "trained": len(trained),
        "trained twice (by group)": sum(n > 1 for n in Counter(row[0] for row in trained).values()),
        "trained twice (by an explorer's own task)": sum(n > 1 for n in draws.values()),
        "by explorer": dict(Counter(row[4] for row in trained)),
        "of an explorer's own tasks": sum(draws.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--undisturbed", type=int, default=1, help="runs, each with a seed of its own")
    parser.add_argument("--engine", default="hf")
    args = parser.parse_args()
    out: Path = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    engine = [f"rollout.engine.name={args.engine}"]
    common = ["--config", "quickstart", f"output_dir={out}/runs", *engine]
    warm = out / "runs/leeway/warm/stages/sft/checkpoints"
    if not warm.exists() and Job(out, "warm", "sft", *common[:3], "name=warm").end(900):
        raise SystemExit(f"the warm-up failed: {out}/warm.log")
    model = next(warm.glob("step-*/hf"))
    settings = [
        *common, "stages.sft=null", f"model.path={model}", "model.init=null", f"explorer.silent_s={SILENT_S}",
        f"stages.async_rl.train.steps={args.steps}", f"stages.async_rl.train.groups_per_step={args.groups}",
    ]  # fmt: skip
    disturbed(out, settings)
    said(out / "runs/leeway/disturbed")
    names = [f"undisturbed-{seed}" for seed in range(args.undisturbed)]
    for seed, name in enumerate(names):
        undisturbed(out, name, [*settings, f"seed={100 * seed}"], seed=100 * seed)
        said(out / "runs/leeway" / name)
    print(f"held-out accuracy before: {accuracy(out, 'warm', model, engine)}")
    for name in ("disturbed", *names):
        weights = next((out / f"runs/leeway/{name}").glob("**/checkpoints/step-*/hf"))
        print(f"held-out accuracy, {name}: {accuracy(out, name, weights, engine)}", flush=True)


def explorer(out: Path, run: str, name: str, settings: list[str], *, seed: int) -> Job:
    """`a` works on the trainer's tasks, the others on their own."""
    own = [] if name == "a" else [f"seed={seed}", *OWN_TASKS]
    return Job(out, f"{run}-{name}", "explore", *settings, f"name={run}", f"explorer.name={name}", *own)


def disturbed(out: Path, settings: list[str]) -> None:
    run = out / "runs/leeway/disturbed"
    train = Job(out, "disturbed-train", "train", *settings, "name=disturbed")
    a = explorer(out, "disturbed", "a", settings, seed=0)
    until_it_delivers(run, "a", train)
    b = explorer(out, "disturbed", "b", settings, seed=1)
    until_it_delivers(run, "b", train)
    c = explorer(out, "disturbed", "c", settings, seed=2)
    until_it_delivers(run, "c", train)
    b.process.send_signal(signal.SIGINT)
    print(f"b left with exit code {b.end(120)}, at step {len(trained_steps(run))}", flush=True)
    c.signal_all(signal.SIGKILL)
    print(f"c was killed at step {len(trained_steps(run))}", flush=True)
    c = explorer(out, "disturbed", "c", settings, seed=2)
    until_it_delivers(run, "c", train)
    a.signal_all(signal.SIGSTOP)
    print(f"a was stopped at step {len(trained_steps(run))}", flush=True)
    time.sleep(STOPPED_S)
    a.signal_all(signal.SIGCONT)
    print(f"a goes on at step {len(trained_steps(run))}", flush=True)
    until_it_delivers(run, "a", train)
    print(f"exit codes { {job.name: job.end(900) for job in (train, a, c)} }", flush=True)


def undisturbed(out: Path, name: str, settings: list[str], *, seed: int) -> None:
    train = Job(out, f"{name}-train", "train", *settings, f"name={name}")
    explorers = [explorer(out, name, e, settings, seed=seed + i) for i, e in enumerate("abc")]
    print(f"exit codes { {job.name: job.end(900) for job in (train, *explorers)} }", flush=True)


def said(run: Path) -> None:
    steps = [row["step/total_s"] for row in trained_steps(run)]
    lag = max(row.get("train/policy_lag/max", 0) for row in rows_of(run))
    print(f"{run.name}: {len(steps)} steps; median {sorted(steps)[len(steps) // 2]:.2f} s, longest {max(steps):.2f} s")
    print(f"largest lag {lag:g}; dropped as stale {max(r.get('replay/dropped_stale', 0) for r in rows_of(run)):g}")
    for what, value in what_became_of_groups(run / "meeting/groups/index.sqlite").items():
        print(f"{what}: {value}", flush=True)


if __name__ == "__main__":
    main()
