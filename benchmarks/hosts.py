"""A run on two machines, and what becomes of it when the link between them is cut or slow, or the other Ray dies.

    python benchmarks/hosts.py --out /tmp/hosts                                 # all cells, about half an hour
    python benchmarks/hosts.py --out /tmp/hosts --cells plain:broadcast cut-60:object_store

The machines are namespaces of this one (see namespaces.py; needs root). Machine a has the head of a Ray cluster, the
driver, the trainer and a generator; machine b, with its own /tmp, shared memory and processes, has another. Nothing but
this checkout is there for both, and a token of Ray. Ray is started again whenever it ends.

A cell is case:transport. Cases: `plain`, with a supervised stage before; `cut-S`, the link is down for S seconds;
`cut-forever`, until the run has ended; `slow-M`, M Mbit/s from the start on; `kill`, the raylet of machine b; `ranks`,
a trainer's rank on each, with a folder that both share for the run; `refused`, the same without that folder; `token`,
the driver has another token. Printed, and written to hosts.json: exit code, steps, restarts, the longest time without
a step, what became of the groups, how long after the act machine b served again and the run ended, and how busy this
machine was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from namespaces import ROOT, Cable, Machine, ray_start, refusal, wait_until

CELLS = [f"plain:{t}" for t in ("object_store", "broadcast")]
CELLS += [f"{case}:object_store" for case in ("cut-5", "cut-60", "cut-forever", "slow-10", "kill")]
CELLS += [f"{case}:broadcast" for case in ("cut-5", "cut-60", "slow-10")]
CELLS += [f"{case}:object_store" for case in ("ranks", "refused", "token")]
RANKS = ["train.num_ranks=2", "cluster.cpus_per_trainer=2"]
SHARED = "/tmp/shared"
A, B = "10.77.0.1", "10.77.0.2"
HEAD = f"{A}:6379"
START_S, END_S = 300.0, 900.0
TOKEN = "5a" * 32
TOKENS = {"refused": TOKEN, "token": "a5" * 32}
LEEWAY = [sys.executable, "-c", "from leeway.cli.main import main; main()"]
SETTINGS = [
    "rollout.engine.name=hf",
    "rollout.num_generators=2",
    "stages.async_rl.train.groups_per_step=16",
    "env.name=unhurried:Unhurried",
    f"cluster.address={HEAD}",
    "cluster.restart_backoff_s=2",
    "cluster.start_timeout_s=900",  # six processes start on the cores of one machine
    "monitor.console=plain",
    "replay.keep_groups=true",
    "staleness.max_policy_lag=2",
    "rollout.pull_every=1",
    "eval.at_start=false",
    "eval.at_end=false",
    "project=hosts",
]
# It lies on machine a only. Steps are to take about a second, and little of the processor.
UNHURRIED = """
import asyncio
from leeway import Environment, Trajectory

class Unhurried(Environment):
    async def rollout(self, task, policy):
        await asyncio.sleep(2)
        prompt = policy.encode(task.prompt)
        completions = await policy.generate(prompt)
        return [Trajectory.from_completion(prompt, c, reward=len(c.tokens) / 8) for c in completions]
"""


class TwoMachines:
    """A Ray cluster on both; `log`: what Ray says."""

    def __init__(self, folder: Path, cpus: int) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.a = Machine("host-a", A, folder=folder / "a", shared=self.shared)
        self.b = Machine("host-b", B, folder=folder / "b", shared=self.shared, cores=[1])
        self.cable = Cable(self.a, self.b)
        self._log = (folder / "ray.log").open("w+b")
        options = ["--head", "--port=6379", "--include-dashboard=false"]
        self._starts = [(self.a, options), (self.b, [f"--address={HEAD}"])]
        self._cpus = cpus

    def up(self) -> None:
        """Start Ray on one after the other; where it gives up, on a busy machine, it is started again."""
        file = Path(self._log.name)
        for number, (machine, options) in enumerate(self._starts, start=1):
            ray_start(machine, *options, cpus=self._cpus, log=self._log, token=TOKEN, again=True)
            try:
                wait_until(
                    lambda n=number: file.read_bytes().count(b"Ray runtime started") >= n, within_s=START_S, what="Ray"
                )
            except TimeoutError as error:
                said = file.read_text(errors="replace")[-1500:]
                raise RuntimeError(f"{machine.name}: {error}; it said: {said}") from None

    def close(self) -> None:
        for part in (self.a, self.b, self.cable):
            part.close()
        self._log.close()


@contextlib.contextmanager
def two_machines(cpus: int = 2) -> Iterator[TwoMachines]:
    """With room for a trainer and a generator on machine a: a lost generator waits for machine b."""
    folder = Path(tempfile.mkdtemp(prefix="leeway-hosts-"))
    try:
        machines = TwoMachines(folder, cpus)
        try:
            machines.up()
            yield machines
        finally:
            machines.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Run:
    """`leeway run` on machine a, under way."""

    def __init__(
        self,
        machines: TwoMachines,
        name: str,
        *settings: str,
        steps: int,
        token: str = TOKEN,
        shared: bool = False,
    ) -> None:
        home = machines.a.folder
        (home / "unhurried.py").write_text(UNHURRIED)
        self.folder = (machines.shared if shared else home / "runs") / "hosts" / name
        self.stage = self.folder / "stages" / "async_rl"
        self._output = home / f"{name}.txt"
        command = [*LEEWAY, "run", "async_rl", "--config", "quickstart", f"name={name}", *SETTINGS, *settings]
        command += [f"stages.async_rl.train.steps={steps}", f"output_dir={SHARED if shared else '/tmp/runs'}"]
        with self._output.open("wb") as log:
            own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:/tmp", "RAY_AUTH_TOKEN": token}
            self.process = machines.a.start(command, log=log, env=own)

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def steps(self) -> list[float]:
        """When each was done."""
        file = self.stage / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row["time"] for row in rows if "train/grad_norm" in row]

    def hosts(self) -> dict[str, str]:
        """Of the generators that serve."""
        with contextlib.suppress(OSError, ValueError):
            parts = json.loads((self.folder / "parts.json").read_text())["parts"]
            return {p["role"]: p["host"] for p in parts if p["role"].startswith("gen") and p["state"] == "serves"}
        return {}

    def wait_for(self, holds: Any, what: str, *, within_s: float = END_S) -> float:
        def now() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before {what}:\n{self.output()[-3000:]}")
            return holds()

        return wait_until(now, within_s=within_s, what=what)

    def ends(self) -> int:
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return -1


def what_became_of_groups(stage: Path) -> dict[str, int]:
    """`lost`: admitted before one that was trained on, and not trained on (the window is 1: they come in order)."""
    with contextlib.closing(sqlite3.connect(stage / "groups" / "index.sqlite")) as index:
        ids = [row for (row,) in index.execute("SELECT group_id FROM groups WHERE state = 'trained'")]
    return {"trained": len(ids), "twice": len(ids) - len({*ids}), "lost": max(ids) + 1 - len({*ids})}


def cell(machines: TwoMachines, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    case, transport = name.split(":")
    act, _, amount = case.partition("-")
    if act == "slow":
        machines.cable.slow(float(amount))
    settings = [f"param_server.transport={transport}", *overrides]
    if act in ("refused", "token"):
        run = Run(
            machines,
            case,
            *settings,
            "stages.sft=null",
            *(RANKS if act == "refused" else ()),
            steps=4,
            token=TOKENS[act],
        )
        code = run.ends()
        return {"code": code, "said": run.output().strip().splitlines()[-1:]}
    steps = 40 if case == "cut-5" else 60 if case == "cut-forever" else 150 if act in ("kill", "cut") else 8
    settings += ["stages.sft.train.steps=5"] if act == "plain" else ["stages.sft=null"]
    settings += RANKS if act == "ranks" else []
    run = Run(machines, f"{case}-{transport}", *settings, steps=steps, shared=act == "ranks")
    back_s = None
    try:
        run.wait_for(lambda: B in run.hosts().values() and len(run.steps()) >= 3, "three steps, with both machines")
        began = time.time()
        if act == "cut":
            machines.cable.cut()
            if amount != "forever":
                time.sleep(float(amount))
                machines.cable.mend()
        elif act == "kill":
            assert machines.b.kill("src/ray/raylet/raylet")
        if case in ("cut-60", "kill"):
            run.wait_for(lambda: "serves again" in run.output() and B in run.hosts().values(), "machine b serves again")
            back_s = round(time.time() - began, 1)
        load = os.getloadavg()[1]
        code = run.ends()
        ended_s = round(time.time() - began, 1)
    finally:
        machines.cable.mend()
        if act == "slow":
            machines.cable.slow(10_000)
    times = [t for t in run.steps() if t >= began]
    if code == -1:
        said = run.output().strip().splitlines()[-5:]
        return {"error": f"it did not end within {END_S:g} s after {len(run.steps())} steps", "said": said}
    summary = json.loads((run.folder / "summary.json").read_text())
    stage = summary["stages"].get("async_rl", {})
    left = [p for p in machines.b.processes() if "Actor" in " ".join(p.cmdline())]
    return {
        "code": code,
        "cause": summary["cause"],
        "steps": stage.get("steps"),
        "max_policy_lag": stage.get("max_policy_lag_observed"),
        "restarts": stage.get("restarts"),
        "longest_gap_s": round(max((b - a for a, b in zip([began, *times], times, strict=False)), default=0.0), 1),
        "groups": what_became_of_groups(run.stage),
        "back_after_s": back_s,
        "ended_after_s": ended_s,
        "load": round(load, 1),
        "left_on_b": len(left),
        "hosts": {role: process["node"] for role, process in stage.get("processes", {}).items()},
        "said": [line for line in run.output().splitlines() if "warning" in line or "serves again" in line],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--overrides", nargs="+", default=[], help="for all runs, key=value")
    args = parser.parse_args()
    if (why := refusal()) is not None:
        raise SystemExit(f"hosts: {why}")
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in args.cells:
        try:
            with two_machines(3 if name.startswith(("ranks", "refused")) else 2) as machines:
                try:
                    results[name] = cell(machines, name, args.overrides)
                finally:
                    kept = args.out / name.replace(":", "-")
                    for runs in (machines.a.folder / "runs", machines.shared):
                        if runs.is_dir():
                            shutil.copytree(runs, kept, dirs_exist_ok=True)
                    for log in (*machines.a.folder.glob("*.txt"), machines.a.folder.parent / "ray.log"):
                        shutil.copy(log, kept)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        print(name, json.dumps(results[name]), flush=True)
        (args.out / "hosts.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
