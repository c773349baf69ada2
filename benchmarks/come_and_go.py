"""Explorers that come, go, are killed and are stopped while one train job goes on: what it costs, and what is lost.

    python benchmarks/come_and_go.py --out /tmp/explorers

Three explorers join one after the other, two of them with tasks of their own. One leaves (Ctrl-C), one is killed with
all of its processes, one is stopped (SIGSTOP) for longer than `explorer.silent_s` and goes on. Then as many steps of
async_rl, undisturbed. Said at the end: the trainer's steps, the lag, what became of every group, accuracies.
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


def accuracy(out: Path, name: str, model: Path, settings: list[str]) -> float:
    evaluate = Job(out, f"evaluate-{name}", "evaluate", "--config", "quickstart", f"output_dir={out}/runs",
                   f"name=evaluate-{name}", f"model.path={model}", "model.init=null", *settings)  # fmt: skip
    if evaluate.end(600):
        raise SystemExit(f"evaluation failed: {evaluate.log}")
    summary = json.loads((out / "runs/leeway" / f"evaluate-{name}" / "summary.json").read_text())
    return next(iter(summary["eval"].values()))["exact_match"]


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
        *common, "stages.sft=null", f"model.path={model}", "model.init=null", "name=jobs",
        f"explorer.silent_s={SILENT_S}",
        f"stages.async_rl.train.steps={args.steps}", f"stages.async_rl.train.groups_per_step={args.groups}",
    ]  # fmt: skip
    run = out / "runs/leeway/jobs"
    train = Job(out, "train", "train", *settings)
    a = Job(out, "a", "explore", *settings, "explorer.name=a")
    until_it_delivers(run, "a", train)
    b = Job(out, "b", "explore", *settings, "explorer.name=b", "seed=1", *OWN_TASKS)
    until_it_delivers(run, "b", train)
    c = Job(out, "c", "explore", *settings, "explorer.name=c", "seed=2", *OWN_TASKS)
    until_it_delivers(run, "c", train)
    b.process.send_signal(signal.SIGINT)
    print(f"b left with exit code {b.end(120)}, at step {len(trained_steps(run))}", flush=True)
    c.signal_all(signal.SIGKILL)
    print(f"c was killed at step {len(trained_steps(run))}", flush=True)
    c = Job(out, "c", "explore", *settings, "explorer.name=c", "seed=2", *OWN_TASKS)
    until_it_delivers(run, "c", train)
    a.signal_all(signal.SIGSTOP)
    print(f"a was stopped at step {len(trained_steps(run))}", flush=True)
    time.sleep(STOPPED_S)
    a.signal_all(signal.SIGCONT)
    print(f"a goes on at step {len(trained_steps(run))}", flush=True)
    until_it_delivers(run, "a", train)
    codes = {job.name: job.end(900) for job in (train, a, c)}
    print(f"exit codes {codes}")
    steps = [row["step/total_s"] for row in trained_steps(run)]
    lag = max(row.get("train/policy_lag/max", 0) for row in rows_of(run))
    print(f"{len(steps)} steps; seconds a step: median {sorted(steps)[len(steps) // 2]:.2f}, longest {max(steps):.2f}")
    print(f"largest lag {lag:g}; dropped as stale {max(r.get('replay/dropped_stale', 0) for r in rows_of(run)):g}")
    for name, value in what_became_of_groups(run / "meeting/groups/index.sqlite").items():
        print(f"{name}: {value}")
    alone = Job(
        out, "alone", "async_rl", *[s for s in settings if not s.startswith(("name=", "explorer."))], "name=alone"
    )
    if alone.end(900):
        raise SystemExit(f"the undisturbed run failed: {alone.log}")
    for name in ("jobs", "alone"):
        weights = next((out / f"runs/leeway/{name}").glob("**/checkpoints/step-*/hf"))
        print(f"held-out accuracy, {name}: {accuracy(out, name, weights, engine):.3f}", flush=True)
    print(f"before: {accuracy(out, 'warm', model, engine):.3f}")


if __name__ == "__main__":
    main()
