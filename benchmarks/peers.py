"""Leeway beside TRL and torchrl: the same model, tasks, batch, lengths, loss and threads, in turns (A B C A B C).

    python benchmarks/peers.py --workloads short --pairs 2              # seconds per step
    python benchmarks/peers.py --workloads short --learn --pairs 3      # seconds to a held-out accuracy
    python benchmarks/peers.py --workloads smollm2 --model FOLDER       # SmolLM2-135M-Instruct
    python benchmarks/peers.py --workloads long --systems trl:float32 hf4:bfloat16 --pairs 5
    python benchmarks/peers.py --device cuda --workloads chat thousand --systems trl_vllm bound2 --model FOLDER
    python benchmarks/peers.py --workloads short --systems trl bound2 --slices 15 --pairs 5    # all alive, by turns
    python benchmarks/peers.py --workloads long --systems hf hf+rollout.pull_every=3           # settings of ours
    python benchmarks/peers.py --show                                   # the table of all that was measured
    python benchmarks/peers.py --picture peers.png

| workload | answers of a step | |
|---|---|---|
| short | 64 x 8 of about 5 tokens | the quickstart's model after its warm-up, sums |
| long | 16 x 8 with a long tail up to 256 tokens | the same with random weights: lengths are geometric, cut |
| even | 16 x 8 of 180 to 200 tokens | the same: nothing ends an answer before; our loss alone knows of that |
| turns | 16 x 8 conversations of 3 turns, 0.5 s of environment after each | the same |
| smollm2 | 8 x 8 of up to 24 tokens | SmolLM2-135M-Instruct, sums in chat form |
| chat | 64 x 8 of up to 24 tokens | the same, for a GPU |
| thousand | 16 x 8 of 1,000 tokens | the same model, for a GPU: nothing ends an answer before |

| system | |
|---|---|
| trl | TRL's GRPOTrainer, transformers generates, all threads in turn |
| trl_vllm | the same, vLLM generates in its process (`vllm_mode=colocate`); on a GPU only |
| torchrl | torchrl's TransformersWrapper and GRPOLoss in a loop, all threads in turn |
| vllm | vLLM alone generates the answers of a step; nothing is trained |
| lockstep | ours, lag 0, vLLM; engine and trainer have all cores, and wait for each other |
| lockstep_hf | the same, the engine on transformers |
| bound1, bound2, bound4 | ours, vLLM, a lag of up to 1, 2, 4; each side has half of the cores |
| hf | ours, the engine on transformers, a lag of up to 2 |
| hf4 | the same, a lag of up to 4: as many groups under way, weights pulled every third version |

In bfloat16 TRL's and torchrl's weights and generation stay in float32, and passes of training are autocast; ours
compute all in bfloat16 but for attention and the output head, with the optimizer's weights in float32. "Beside TRL" is
beside its faster type. Each round has its own seed. Seconds and processor time are those of the steps after the first
fifth: medians over steps, then over rounds. Memory is the sum of what each process holds (shared pages divided),
sampled every three seconds. On one GPU (`--device cuda`) engine and trainer share it (`cluster.placement=together`).
Lockstep on a CPU has settings that `leeway tune --keep-lag` tries: in `long` and `even` an engine for each core, up to
four, in `turns` places for half of the conversations, and a batch in two parts (`train.stream_groups`). Every result is
kept in `OUT/peers.json`. A round takes a minute for each system; learning runs about two.

With `--slices` all systems are started before any is measured, and then have the machine for some seconds each, again
and again, while the processes of the others are stopped: a machine whose speed drifts drifts for all alike, and a start
is paid once. The rounds are then turns of one run, with one seed, and the table has them apart.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peer_parts
import psutil
from peer_processes import MARK, Memory, cpu_seconds, kill, of_run
from peer_workloads import DTYPES, WORKLOADS, model_of, overrides, task_files
from quickstart_runs import HERE

CORES_TO_START = 3
"""For each run that starts beside others."""
PEERS = ("trl", "trl_vllm", "torchrl", "vllm")
NEEDS_GPU = ("trl_vllm",)
ALONE = "vllm"  # no peer, but what an engine could do
SYSTEMS = (*PEERS, "lockstep", "lockstep_hf", "bound1", "bound2", "bound4", "hf", "hf4")
OF_A_TYPE = tuple(f":{dtype}" for dtype in DTYPES)
DEVICES = ("cpu", "cuda")
DEADLINE_S = 900
GPU_SHARE = 0.8
"""Of the GPU's memory, for all of vLLM where several runs share it; where one has it, vLLM takes half of that."""
CACHE_BYTES = 4 * 2**30
"""Of each vLLM where several share a GPU: what is free there cannot be measured while others start."""
RUNS = itertools.count()
WITHOUT_END = 100_000


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as after any error, no run is left behind
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = out / "peers.json"
    missed = 0
    if args.show or args.picture:
        pass  # only what was measured before
    elif args.slices:
        missed = measure_by_turns(args, out, results)
    else:
        for name in args.workloads:
            measure(name, args, out, results)
    rows = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    if args.picture:
        draw(rows, args.picture)
        print(f"picture: {args.picture}")
    else:
        print(table(rows))
    return int(missed > 0)


def measure(name: str, args: argparse.Namespace, out: Path, results: Path) -> None:
    """One run after the other, each alone."""
    for number in range(args.pairs):
        for system, dtype in in_turns(args.systems, args.dtypes):
            run = prepared(name, system, dtype, args, out, seed=number)
            keep(results, run.row | {"learn": args.learn} | watched(run))


def measure_by_turns(args: argparse.Namespace, out: Path, results: Path) -> int:
    """All runs at once, each alone for `--slices` seconds at a time. How many ended before they were measured."""
    named = in_turns(args.systems, args.dtypes)
    runs = [
        prepared(name, system, dtype, args, out, seed=0, alive=len(named) * len(args.workloads))
        for name in args.workloads
        for system, dtype in named
    ]
    alive: list[Alive] = []
    try:
        at_once = max(1, len(os.sched_getaffinity(0)) // CORES_TO_START)
        for first in range(0, len(runs), at_once):
            for run in runs[first : first + at_once]:
                alive.append(Alive(run))
            until_ready(alive[first:])
        print(f"{sum(not one.ended for one in alive)} of {len(alive)} are ready", flush=True)
        for _ in range(args.pairs):
            for one in alive:
                if (found := one.has_the_machine(args.slices)) is not None:
                    keep(results, one.run.row | {"learn": False, "slices": args.slices} | found)
    finally:
        for one in alive:
            one.end()
    return sum(one.ended for one in alive)


def keep(results: Path, row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    kept = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    results.write_text(json.dumps([*kept, row], indent=1), encoding="utf-8")


def in_turns(systems: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """The runs of a round, (system, type): `SYSTEM` in each of the types, `SYSTEM:TYPE` in that one."""
    runs = []
    for named in systems:
        system, _, own = named.rpartition(":") if named.endswith(OF_A_TYPE) else (named, "", "")
        runs += [(system, dtype) for dtype in ([own] if own else dtypes)]
    return runs


# ---------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Run:
    """A run that has not been started. `lines`: the file in which it says what each step took."""

    row: dict[str, Any]  # what of it goes into its results
    label: str
    command: list[str]
    env: dict[str, str]
    lines: Path
    log: Path
    steps: int
    target: float

    @property
    def first_step(self) -> int:
        """The last one that is not measured."""
        return max(2, self.steps // 5)


def prepared(
    name: str, system: str, dtype: str, args: argparse.Namespace, out: Path, *, seed: int, alive: int | None = None
) -> Run:
    """`alive`: so many runs at once; without it, one. A SYSTEM+KEY=VALUE of ours has that setting as well."""
    workload = WORKLOADS[name]
    if args.steps:
        workload = replace(workload, steps=args.steps, learn_steps=args.steps)
    if args.learn and not workload.target:
        learn = ", ".join(name for name, w in WORKLOADS.items() if w.target)
        raise SystemExit(f"--learn: got {name}; expected a workload with a target: {learn}")
    model = model_of(workload, out, given=args.model, warm=args.warm)
    files = task_files(workload, name, model, out)
    folder, device, threads = out / "runs", args.device, args.threads
    steps = workload.learn_steps if args.learn else workload.steps
    every = max(1, steps // 8) if args.learn else 0
    told = steps if alive is None else WITHOUT_END
    cache_bytes = CACHE_BYTES if device == "cuda" and alive else None
    label = label_of(name, system, dtype, learn=args.learn, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, MARK: label, "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    share = GPU_SHARE / max(2, alive or 1)
    if system in PEERS:
        spec = {
            **{"model": str(model), "groups": workload.groups, "group_size": workload.group_size, "lr": workload.lr},
            **{"max_tokens": workload.max_tokens, "turns": workload.turns, "environment_s": workload.environment_s},
            **{"min_tokens": workload.min_tokens},
            **{"steps": told, "threads": threads, "seed": seed, "eval_every": every, "reward": workload.reward},
            **{"tasks": files["tasks"], "heldout": files["heldout"], "reply": peer_parts.REPLY, "dtype": dtype},
            **{"device": device, "model_length": workload.model_length, "gpu_share": share},
            **{"cache_bytes": cache_bytes},
        }
        spec_file, lines = folder / f"{label}.json", folder / f"{label}.jsonl"
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        env |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(HERE / "peer_loops.py"), system, str(spec_file), str(lines)]
    else:
        own = {"steps": told, "every": every, "threads": threads, "dtype": dtype, "device": device}
        system_alone, *settings = system.split("+")
        options = overrides(system_alone, workload, model, files, folder, label, gpu_share=share, **own)
        if cache_bytes and "hf" not in system_alone:
            options += [f"rollout.engine.kv_cache_memory_bytes={cache_bytes}"]
        options += [f"seed={seed}", *settings]
        config = "smollm2_135m" if workload.model == "given" else "quickstart"
        command = [sys.executable, "-c", "from leeway.cli.main import main; main()"]
        command += ["run", "async_rl", "--config", config, *options]
        lines = folder / "peers" / label / "stages/async_rl/metrics.jsonl"
        env["OMP_NUM_THREADS"] = "1"
    row = {"workload": name, "system": system, "dtype": dtype, "device": device}
    return Run(row, label, command, env, lines, folder / f"{label}.log", steps, workload.target)


def label_of(name: str, system: str, dtype: str, *, learn: bool, seed: int) -> str:
    """A name for our runs too, which may not be long: of settings what they set, without the section."""
    alone, *settings = system.split("+")
    what = [alone, *(setting.rpartition(".")[2].replace("=", "-")[:24] for setting in settings)]
    return "-".join([name, *what[:3], dtype, *(["learn"] if learn else []), str(seed), f"{os.getpid()}.{next(RUNS)}"])


def watched(run: Run) -> dict[str, Any]:
    """Run it, and measure it from outside, as every system is: processor time, memory, and what it wrote of itself."""
    begun = time.monotonic()
    process = started(run)
    memory = Memory(run.label)
    written = Written(run.lines)
    first = last = None
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if time.monotonic() - begun > DEADLINE_S:
                raise SystemExit(f"{run.label}: not finished after {DEADLINE_S} s; see {run.log}")
            step = written.step()
            if first is None and step >= run.first_step:
                first = step, cpu_seconds(run.label), time.monotonic()
            if last is None and step >= run.steps - 1:
                last = step, cpu_seconds(run.label), time.monotonic()
    finally:
        memory.stop()
        kill(run.label)
    if process.returncode not in (0, 1) or first is None or last is None or last[0] <= first[0]:
        raise SystemExit(f"{run.label}: ended with {process.returncode} before it could be measured; see {run.log}")
    rows = [row for row in rows_of(run.lines) if row["step"] > first[0]]
    found = took(rows) | {"cpu_s": (last[1] - first[1]) / (last[0] - first[0]), "peak_gib": memory.peak / 2**30}
    return found | curve(run, found["step_s"])


def started(run: Run) -> subprocess.Popen[bytes]:
    with open(run.log, "w", encoding="utf-8") as said:
        return subprocess.Popen(run.command, cwd=HERE, env=run.env, stdout=said, stderr=subprocess.STDOUT)


def took(rows: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [s for row in rows if (s := seconds_of(row)) is not None]
    tokens = [t for row in rows if (t := row.get("tokens", row.get("train/response_tokens/total"))) is not None]
    mean = {"mean_s": statistics.fmean(seconds), "tokens": statistics.fmean(tokens)}
    return {"step_s": statistics.median(seconds), **mean, "steps": len(seconds)}


def curve(run: Run, step_s: float) -> dict[str, Any]:
    points = sorted({row["step"]: a for row in rows_of(run.lines) if (a := accuracy_of(row)) is not None}.items())
    if not points:
        return {}
    reached = crossing(points, run.target)
    seconds = None if reached is None else reached * step_s
    return {"curve": points, "target": run.target, "seconds_to_target": seconds}


class Alive:
    """A run that is started, and has the machine for some seconds at a time; its processes are stopped between."""

    def __init__(self, run: Run) -> None:
        self.run, self.ended = run, False
        self._begun, self._process = time.monotonic(), started(run)
        self._memory, self._written = Memory(run.label), Written(run.lines)

    def is_ready(self) -> bool:
        """Whether it has come to steps that can be measured; it is stopped then. Also where it has ended."""
        if not self._is_alive():
            return True
        if time.monotonic() - self._begun > DEADLINE_S:
            self._gone(f"not ready after {DEADLINE_S} s")
        elif self._written.step() < self.run.first_step:
            return False
        else:
            self._signal(signal.SIGSTOP)
        return True

    def has_the_machine(self, seconds: float) -> dict[str, Any] | None:
        """What its steps took. None where it has ended."""
        if self.ended:
            return None
        begun, cpu, seen = time.monotonic(), cpu_seconds(self.run.label), [self._written.step()]
        goes_on_at = time.time()
        self._signal(signal.SIGCONT)
        while time.monotonic() - begun < seconds or (
            # the first two may have begun in an earlier turn, and environments waited in others' time
            seen[-1] < seen[0] + 3 and time.monotonic() - begun < 10 * seconds
        ):
            time.sleep(0.05)
            if not self._is_alive():
                return None
            seen.append(self._written.step())
        self._signal(signal.SIGSTOP)
        last = self._written.step()
        cpu = cpu_seconds(self.run.label) - cpu
        if last < seen[0] + 3:
            self._gone(f"no three steps in {10 * seconds} s")
            return None
        rows = [row for row in rows_of(self.run.lines) if seen[0] + 2 < row["step"] <= last]
        found = took([row for row in rows if began_after(row, goes_on_at)] or rows[-1:])
        return found | {"cpu_s": cpu / (last - seen[0]), "peak_gib": self._memory.peak / 2**30}

    def end(self) -> None:
        self._memory.stop()
        kill(self.run.label)

    def _is_alive(self) -> bool:
        if not self.ended and self._process.poll() is not None:
            self._gone(f"ended with {self._process.returncode}")
        return not self.ended

    def _gone(self, why: str) -> None:
        self.ended = True
        print(f"{self.run.label}: {why}; see {self.run.log}", file=sys.stderr, flush=True)
        self.end()

    def _signal(self, number: signal.Signals) -> None:
        """To all of its processes, and to those that they started meanwhile."""
        self._memory.is_stopped = number == signal.SIGSTOP
        told: set[int] = set()
        while new := [process for process in of_run(self.run.label) if process.pid not in told]:
            for process in new:
                told.add(process.pid)
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)


def until_ready(started: list[Alive]) -> None:
    waited_for = list(started)
    while waited_for := [one for one in waited_for if not one.is_ready()]:
        time.sleep(0.05)


def began_after(row: dict[str, Any], moment: float) -> bool:
    """Whether that step did, as far as its row says when it was written: a step of ours may be on record after others
    have begun, and the one in which a turn ended may be the third of the next.
    """
    seconds = seconds_of(row)
    return seconds is None or "time" not in row or row["time"] - seconds >= moment


def seconds_of(row: dict[str, Any]) -> float | None:
    if "seconds" in row:
        return row["seconds"]
    return row["step/total_s"] - row.get("step/evaluate_s", 0.0) if "step/total_s" in row else None


def accuracy_of(row: dict[str, Any]) -> float | None:
    return row.get("accuracy", row.get("eval/held_out/exact_match"))


def crossing(points: list[tuple[int, float]], target: float) -> float | None:
    """Steps until the accuracy is first at the target, between two evaluations by a straight line."""
    before: tuple[int, float] | None = None
    for step, value in points:
        if value >= target:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
        before = step, value
    return None


def rows_of(lines: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in lines.read_text(encoding="utf-8").split("\n")[:-1]]
    except OSError:
        return []


class Written:
    """What a run writes of itself, each line read once: who measures shares the cores with what is measured."""

    def __init__(self, lines: Path) -> None:
        self._lines = lines
        self._read = self._step = 0

    def step(self) -> int:
        """The last step so far."""
        with contextlib.suppress(OSError), open(self._lines, "rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._step = max([self._step, *(json.loads(line)["step"] for line in whole.splitlines())])
        return self._step


# ------------------------------------------------------------------------------------------------------- results


def summed_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each workload, device, type and system, alone or in turns: medians over its rounds."""
    found = []
    named = [*SYSTEMS, *dict.fromkeys(r["system"] for r in rows if r["system"] not in SYSTEMS)]
    for name, device, turns, dtype, system in itertools.product(WORKLOADS, DEVICES, (False, True), DTYPES, named):
        run = name, device, turns, dtype, system
        of = lambda r: (r["workload"], r.get("device", "cpu"), "slices" in r, dtype_of(r), r["system"])  # noqa: E731
        own = [r for r in rows if of(r) == run]
        timed = [r for r in own if not r["learn"]]
        if not timed:
            continue
        row = {k: statistics.median(r[k] for r in timed) for k in ("step_s", "cpu_s", "tokens", "peak_gib")}
        spread = [r["step_s"] for r in timed]
        found.append(
            {"workload": name + (" on a GPU" if device == "cuda" else "") + (", in turns" if turns else "")}
            | {"system": system if dtype == DTYPES[0] else f"{system} {dtype}", "dtype": dtype}
            | {"rounds": len(timed), "low": min(spread), "high": max(spread)}
            | row
            | {"learned": [r for r in own if r["learn"]]}
        )
    return found


def dtype_of(row: dict[str, Any]) -> str:
    return row.get("dtype", DTYPES[0])


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| workload | system | rounds | s a step (least to most) | beside TRL | processor s a step | answer tokens/s "
        "| s to the accuracy | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = summed_up(rows)
    trl: dict[str, float] = {}  # in the type in which it is faster
    for r in found:
        if r["system"].split()[0] in ("trl", "trl_vllm"):
            trl[r["workload"]] = min(r["step_s"], trl.get(r["workload"], math.inf))
    for r in found:
        reached = to_accuracy(r["learned"], r["step_s"]) if r["learned"] else ""
        beside = f"{trl[r['workload']] / r['step_s']:.2f} x" if r["workload"] in trl else ""
        step = f"{r['step_s']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        lines.append(
            f"| {r['workload']} | {r['system']} | {r['rounds']} | {step} | {beside} "
            f"| {r['cpu_s']:.2f} | {r['tokens'] / r['step_s']:,.0f} | {reached} | {r['peak_gib']:.1f} |"
        )
    return "\n".join(lines)


def to_accuracy(runs: list[dict[str, Any]], step_s: float) -> str:
    """Seconds of the run in the middle, and the steps of all; those that never came there are last."""
    target, runs = runs[0]["target"], [{**r, "curve": [tuple(point) for point in r["curve"]]} for r in runs]
    runs.sort(key=lambda r: crossing(r["curve"], target) or math.inf)
    steps = [crossing(r["curve"], target) for r in runs]
    middle = (len(runs) - 1) // 2
    seeds = f", {len(runs)} seeds: {', '.join('never' if s is None else f'{s:.0f}' for s in steps)}"
    if (found := steps[middle]) is None:
        last, accuracy = runs[middle]["curve"][-1]
        return f"not {target:.2f} in {last} steps ({accuracy:.2f}{seeds if len(runs) > 1 else ''})"
    return f"{found * step_s:.0f} to {target:.2f} ({found:.0f} steps{seeds if len(runs) > 1 else ''})"


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = summed_up(rows)
    names = list(dict.fromkeys(r["workload"] for r in found))
    figure, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        own = [r for r in found if r["workload"] == name]
        colours = ["#888888" if r["system"].split()[0] in PEERS else "#1f77b4" for r in own]
        bars = axis.barh([r["system"] for r in own], [r["step_s"] for r in own], color=colours)
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(name)
        axis.set_xlabel("seconds a step")
        axis.margins(x=0.4)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    known = f"{', '.join(SYSTEMS)}; SYSTEM:TYPE runs in that type alone, SYSTEM+KEY=VALUE of ours with that setting"
    parser.add_argument("--systems", nargs="+", default=None, metavar="SYSTEM", help=known)
    parser.add_argument("--pairs", type=int, default=1, help="rounds over all systems")
    every = "start all, then let each have the machine for so many seconds, --pairs times"
    parser.add_argument("--slices", type=float, metavar="SECONDS", help=every)
    parser.add_argument("--learn", action="store_true", help="longer runs, with evaluations")
    parser.add_argument("--steps", type=int, help="instead of the workload's own number")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what all systems compute on")
    types = "in which trainers and our engines compute, of systems that name none"
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[DTYPES[0]], help=types)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each system (all cores)")
    parser.add_argument("--model", type=Path, help="workload smollm2: folder of SmolLM2-135M-Instruct")
    parser.add_argument("--warm", type=Path, help="the quickstart's warmed-up model (default: made by its sft stage)")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="results and runs (default: runs/peers)")
    parser.add_argument("--show", action="store_true", help="only print what was measured")
    parser.add_argument("--picture", type=Path, help="only draw what was measured")
    args = parser.parse_args()
    can_run = [system for system in SYSTEMS if args.device == "cuda" or system not in NEEDS_GPU]
    args.systems = args.systems or [system for system in can_run if system != ALONE]
    if args.slices and args.learn:
        parser.error("--slices: got --learn as well, expected one of them: the time of an evaluation is in no step")
    for system, _ in in_turns(args.systems, args.dtypes):
        alone, *settings = system.split("+")
        if alone not in SYSTEMS or (settings and alone in PEERS):
            parser.error(f"--systems: got {system}, expected one of {known}")
        if alone not in can_run:
            parser.error(f"--systems: got {system}, which needs a GPU; add --device cuda, or leave it out")
    if "turns" in args.workloads and any(system == ALONE for system, _ in in_turns(args.systems, args.dtypes)):
        parser.error(f"--systems: got {ALONE} for turns, expected a system with environments; leave one of them out")
    return args


if __name__ == "__main__":
    sys.exit(main())
