"""What watching a run, or recording spans, costs it.

    python benchmarks/on_off.py spans                # two runs, log.spans=false and true, in turns (A B A B)
    python benchmarks/on_off.py watched              # one run, watched by five pages in every other block of steps
    python benchmarks/on_off.py watched --pages 1 --steps 200 --engine vllm
    python benchmarks/on_off.py cores                # fixed work on every core in place of the run, for less noise

The quickstart's RL stage on the hf engine. `spans`: of each run, the median seconds of a step, and the processor time
of all of its processes for each step, both between step 5 and the last but one. `watched`: equal runs differ by more
than watching could cost, so the server and its readers are stopped and continued (SIGSTOP, SIGCONT) within one run; of
two blocks that follow each other, one is watched, by lot. What was written meanwhile, they read when they go on. The
mean of the blocks' differences is printed with its standard error: of the seconds of a step, and, since these vary by
more than watching could cost, of what it could cost by: how long the run's threads were ready to run and waited for a
core (Linux counts it: /proc/PID/schedstat), and their processor time.

`cores`: the steps of a run that has ended are written again, at its pace, and watched as above, while a process on each
core multiplies matrices all the time. It shows what pages take from work that leaves no core idle. A run leaves some
idle, and should lose less.

A page is an event stream that is read as a browser reads it, with all questions that the page asks for each change of
the run; five browsers would take more of this machine's processor for drawing than the run has, and on a person's own
machine they draw there. Readers run at the lowest priority; what they and the server take is printed, and is no part
of the run's.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import psutil
from quickstart_runs import HERE, warmed_up

FIRST_STEP = 5
PAGE_EVERY_S = 3.0
"""How often an open page asks for its curves again, at most."""
SETTLE_S, BLOCK_S = 1.0, 4.0
STAGE = "async_rl"
LONGEST_LINE = 2**16
MARK = "LEEWAY_ON_OFF_RUN"
LEEWAY = (sys.executable, "-c", "from leeway.cli.main import main; main()")
QUICK = (
    *("stages.sft=null", "model.init=null", "eval.at_start=false", "eval.at_end=false", "checkpoint.save_hf=never"),
    *("monitor.console=off", "stages.async_rl.optimizer.warmup_steps=0"),
)


@dataclass(frozen=True)
class Counted:
    processor_s: float
    waited_s: float  # ready to run, on no core


@dataclass(frozen=True)
class Cost:
    step_s: float  # median
    cpu_s: float  # of a step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("spans", "watched", "cores"))
    parser.add_argument("--steps", type=int, help="of a run (default: 40; watched: 600; cores: 100)")
    parser.add_argument("--rounds", type=int, default=2, help="spans: runs without and with, each")
    parser.add_argument("--block", type=int, default=10, help="watched: steps until it may change")
    parser.add_argument("--groups", type=int, default=96, help="groups per step; the quickstart has 96")
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--model", type=Path, help="weights to start from, instead of the quickstart's warm-up")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    options = parser.parse_args()
    out = options.out.absolute()
    model = options.model or warmed_up(out, "on_off")
    quick = [*QUICK, f"model.path={model}", f"rollout.engine.name={options.engine}", f"output_dir={out}"]
    quick += ["project=on_off", f"stages.{STAGE}.train.groups_per_step={options.groups}"]
    if options.what == "watched":
        steps = options.steps or 600
        name = f"watched-{os.getpid()}"
        overrides = [*quick, f"stages.{STAGE}.train.steps={steps}", f"name={name}"]
        alternated(out / "on_off" / name, overrides, block=options.block, pages=options.pages)
        return 0
    if options.what == "cores":
        steps = options.steps or 100
        name = f"cores-{os.getpid()}"
        measured(out / "on_off" / name, [*quick, f"stages.{STAGE}.train.steps={steps}", f"name={name}"], steps=steps)
        beside_work(out / "on_off" / name, out / "on_off" / f"{name}-again", pages=options.pages)
        return 0
    steps = options.steps or 40
    costs: dict[bool, list[Cost]] = {False: [], True: []}
    for number in range(options.rounds):
        for on in (False, True):
            name = f"spans-{'on' if on else 'off'}-{number}-{os.getpid()}"
            overrides = [*quick, f"log.spans={str(on).lower()}", f"stages.{STAGE}.train.steps={steps}", f"name={name}"]
            cost = measured(out / "on_off" / name, overrides, steps=steps)
            costs[on].append(cost)
            print(f"{name}: median step {cost.step_s:.3f} s, processor {cost.cpu_s:.3f} s a step", flush=True)
    for what, value in (("median step", "step_s"), ("processor time of a step", "cpu_s")):
        off, on = ([getattr(c, value) for c in costs[which]] for which in (False, True))
        change = statistics.fmean(on) / statistics.fmean(off) - 1
        spread = max((max(own) - min(own)) / statistics.fmean(own) for own in (off, on))
        print(f"{what}: {change:+.1%} with it; equal runs differ by up to {spread:.1%}")
    return 0


def measured(folder: Path, overrides: list[str], *, steps: int) -> Cost:
    run = started(folder, overrides)
    first = last = None
    while run.poll() is None:
        time.sleep(0.05)
        step = last_step(folder)
        if first is None and step >= FIRST_STEP:
            first = step, cpu_seconds(of_run(folder.name))
        if last is None and step >= steps - 1:
            last = step, cpu_seconds(of_run(folder.name))
    if run.returncode or first is None or last is None:
        raise SystemExit(f"{folder}: the run ended with {run.returncode}, before it could be measured")
    steps_of = range(first[0] + 1, last[0] + 1)
    took = [row["step/total_s"] for row in rows_of(folder) if "step/total_s" in row and row["step"] in steps_of]
    return Cost(statistics.median(took), (last[1] - first[1]) / (last[0] - first[0]))


def alternated(folder: Path, overrides: list[str], *, block: int, pages: int) -> None:
    lot = random.Random(0)
    run = started(folder, overrides)
    changes: list[tuple[int, bool, Counted]] = []  # from the step after this one on, watched or not
    own: list[psutil.Process] = []
    with watching(folder, pages) as beside:
        due, waiting = FIRST_STEP, []
        while run.poll() is None:
            time.sleep(0.02)
            step = last_step(folder)
            if step < due:
                continue
            if not waiting:
                waiting = lot.sample([False, True], 2)
            on = waiting.pop()
            for process in beside:
                process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
            own = own or of_run(folder.name)
            changes.append((step, on, counted(own)))
            due = step + block
        took_beside = [cpu_seconds([process]) for process in beside]
        for process in beside:
            process.send_signal(signal.SIGCONT)
    took = {row["step"]: row["step/total_s"] for row in rows_of(folder) if "step/total_s" in row}
    if run.returncode or len(changes) < 5:
        raise SystemExit(f"{folder}: the run ended with {run.returncode}, before it could be measured")
    blocks: list[tuple[bool, dict[str, float]]] = []
    for (begin, on, before), (end, _, after) in itertools.pairwise(changes):
        steps = range(begin + 2, end + 1)  # without the one in which it changed
        each = {
            "seconds": statistics.fmean(took[step] for step in steps),
            "waited for a core": (after.waited_s - before.waited_s) / (end - begin),
            "processor": (after.processor_s - before.processor_s) / (end - begin),
        }
        blocks.append((on, each))
    pairs = [dict(pair) for pair in zip(blocks[::2], blocks[1::2], strict=False)]
    step_s = statistics.fmean(pair[False]["seconds"] for pair in pairs)
    print(f"{len(pairs)} pairs of {block} steps, watched by {pages} pages or not; a step takes {step_s:.3f} s")
    for what in ("seconds", "waited for a core", "processor"):
        without = statistics.fmean(pair[False][what] for pair in pairs)
        differences = [pair[True][what] - pair[False][what] for pair in pairs]
        error = statistics.stdev(differences) / len(pairs) ** 0.5
        more, error = (value / step_s for value in (statistics.fmean(differences), error))
        print(f"{what}: {without:.4f} s a step, watched {more:+.2%} of a step, standard error {error:.2%}")
    shares = " and ".join(f"{seconds:.1f}" for seconds in (sum(took_beside[:-1]), took_beside[-1]))
    print(f"server and pages took {shares} s of processor in {len(took)} steps, half of them watched")


def beside_work(recorded: Path, folder: Path, *, pages: int) -> None:
    """`folder`: where the run that is in `recorded` happens again."""
    lot = random.Random(0)
    shutil.copytree(recorded, folder, ignore=shutil.ignore_patterns("stages", "summary.json", "run.lock"))
    (folder / f"stages/{STAGE}").mkdir(parents=True)
    own = psutil.Process()
    holder = {"host": socket.gethostname(), "pid": own.pid, "started": own.create_time()}
    (folder / "run.lock").write_text(json.dumps(holder), encoding="utf-8")  # as a run that goes on has it
    counts = multiprocessing.Array("q", os.cpu_count() or 1, lock=False)
    workers = [multiprocessing.Process(target=multiply, args=(counts, i), daemon=True) for i in range(len(counts))]
    with watching(folder, pages) as beside:
        for worker in workers:
            worker.start()
        stages = (source / f"stages/{STAGE}" for source in (recorded, folder))
        writer = threading.Thread(target=write_again, args=(*stages,), daemon=True)
        writer.start()
        blocks: list[tuple[bool, float]] = []
        while writer.is_alive():
            for on in lot.sample([False, True], 2):
                for process in beside:
                    process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                time.sleep(SETTLE_S)
                began, before = time.monotonic(), sum(counts)
                time.sleep(BLOCK_S)
                blocks.append((on, (sum(counts) - before) / (time.monotonic() - began)))
        took_beside = [cpu_seconds([process]) for process in beside]
        for process in beside:
            process.send_signal(signal.SIGCONT)
        for worker in workers:  # beside them the server would take long to end
            worker.terminate()
    pairs = [dict(pair) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    if len(pairs) < 2:
        raise SystemExit(f"{recorded}: the run is over before two pairs of blocks are; give it more --steps")
    less = [1 - pair[True] / pair[False] for pair in pairs]
    error = statistics.stdev(less) / len(less) ** 0.5
    print(f"{len(pairs)} pairs of {BLOCK_S:.0f} s, watched by {pages} pages or not, {len(counts)} cores at work")
    print(f"watched, they did {statistics.fmean(less):.2%} less, standard error {error:.2%}")
    print(f"server and pages took {sum(took_beside[:-1]):.1f} and {took_beside[-1]:.1f} s of processor")


def multiply(counts: Any, index: int) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy as np

    matrix = np.full((96, 96), 1 / 96, dtype=np.float32)
    while True:
        matrix = matrix @ matrix
        counts[index] += 1


def write_again(recorded: Path, stage: Path) -> None:
    """Metrics and rollouts of each step after as long as the step took, and each step's share of the spans."""
    rows = [json.loads(line) for line in lines_of(recorded / "metrics.jsonl")]
    spans = {path.name: lines_of(path) for path in (recorded / "spans").iterdir()}
    (stage / "spans").mkdir()
    (stage / "rollouts").mkdir()
    for number, row in enumerate(rows):
        time.sleep(row.get("step/total_s", 0.0))
        for name, lines in spans.items():
            share = lines[len(lines) * number // len(rows) : len(lines) * (number + 1) // len(rows)]
            append(stage / "spans" / name, share)
        rollouts = f"rollouts/step-{row['step']:06d}.jsonl"
        if (recorded / rollouts).exists():
            shutil.copy(recorded / rollouts, stage / rollouts)
        append(stage / "metrics.jsonl", [json.dumps(row) + "\n"])


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def append(path: Path, lines: list[str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def started(folder: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    command = [*LEEWAY, "run", "async_rl", "--config", "quickstart", *overrides]
    return subprocess.Popen(command, cwd=HERE, env=environment() | {MARK: folder.name})


def environment() -> dict[str, str]:
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def rows_of(folder: Path) -> list[dict]:
    try:
        lines = (folder / f"stages/{STAGE}/metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def last_step(folder: Path) -> int:
    """Of the last whole line; reads no other one, for it is asked all the time."""
    try:
        with (folder / f"stages/{STAGE}/metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return -1
    return json.loads(lines[-1])["step"] if lines else -1


def of_run(name: str) -> list[psutil.Process]:
    """The driver and all that it has started, wherever their parents are: they inherit a variable."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == name:
                found.append(process)
        except psutil.Error:
            continue
    return found


def cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def counted(processes: list[psutil.Process]) -> Counted:
    """Of all threads that they have now."""
    run_ns = waited_ns = 0
    for process in processes:
        for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = thread.read_text(encoding="ascii").split()
            except OSError:  # it ended
                continue
            run_ns, waited_ns = run_ns + int(ran), waited_ns + int(waited)
    return Counted(run_ns / 1e9, waited_ns / 1e9)


@contextmanager
def watching(folder: Path, pages: int) -> Iterator[list[psutil.Process]]:
    """A server (whatever it has started too) and, last, the process of its readers."""
    command = [*LEEWAY, "watch", "--wait", str(folder)]
    server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.search(r"http://\S+", server.stdout.readline())
    assert address is not None, "leeway watch did not start"
    readers = subprocess.Popen([sys.executable, __file__, "--read", address[0], str(pages)])
    try:
        own = psutil.Process(server.pid)
        yield [own, *own.children(recursive=True), psutil.Process(readers.pid)]
    finally:
        for process in (readers, server):
            process.terminate()
            process.wait(60)


def read_pages(address: str, pages: int) -> None:
    os.nice(19)
    threads = [threading.Thread(target=read_page, args=(address,), daemon=True) for _ in range(pages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_page(address: str) -> None:
    """What app.js and charts.js do on the overview: the stream, and for each change names, curves and lags."""
    parts = urlsplit(address)
    first = http.client.HTTPConnection(parts.netloc)
    first.request("GET", f"/?{parts.query}")
    answer = first.getresponse()
    cookie = {"Cookie": (answer.headers["Set-Cookie"] or "").split(";")[0]}
    answer.read()
    for file in ("", "page/style.css", "page/app.js", "page/charts.js", "page/uPlot.iife.min.js", "api/words"):
        _got(parts.netloc, f"/{file}", cookie)
    stream = http.client.HTTPConnection(parts.netloc)
    stream.request("GET", "/api/events", headers=cookie)
    events, asked, seen = stream.getresponse(), 0.0, None
    while line := events.readline():
        if not line.startswith(b"data: "):
            continue
        (run,) = json.loads(line[6:])
        stage = run["stages"][-1] if run["stages"] else None
        if stage is None or (run["run"], stage["revision"]) == seen or time.monotonic() - asked < PAGE_EVERY_S:
            continue
        asked, seen = time.monotonic(), (run["run"], stage["revision"])
        at = {"run": run["run"], "stage": stage["name"]}
        names = json.loads(_got(parts.netloc, f"/api/names?{urlencode(at)}", cookie))
        wanted = [("name", name) for name in names if name.startswith(("train/", "step/", "collector/", "eval/"))][:60]
        _got(parts.netloc, f"/api/series?{urlencode([*at.items(), *wanted, ('points', 500)])}", cookie)
        _got(parts.netloc, f"/api/lags?{urlencode(at)}", cookie)


def _got(address: str, path: str, cookie: dict[str, str]) -> bytes:
    connection = http.client.HTTPConnection(address)  # the server ends one that was idle for some seconds
    connection.request("GET", path, headers=cookie)
    found = connection.getresponse().read()
    connection.close()
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read_pages(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
