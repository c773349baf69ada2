"""What watching a run, or recording spans, costs it: the same short run without and with it, in turns (A B A B).

    python benchmarks/on_off.py spans                # log.spans=false / true
    python benchmarks/on_off.py watched              # nobody / `leeway watch` with five pages
    python benchmarks/on_off.py watched --pages 1 --steps 30 --rounds 2 --engine vllm

The quickstart's RL stage on the hf engine. Of each run: the median seconds of a step, and the processor time of all of
its processes for each step, both between step 5 and the last but one. A page is an event stream that is read as a
browser reads it, with all questions that the page asks for each change of the run; five browsers would take more of
this machine's processor for drawing than the run has, and on a person's own machine they draw there. Readers run at
the lowest priority; what they and the server take is printed, and is no part of the run's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import psutil
from quickstart_runs import HERE, warmed_up

FIRST_STEP = 5
PAGE_EVERY_S = 3.0
"""How often an open page asks for its curves again, at most."""
STAGE = "async_rl"
MARK = "LEEWAY_ON_OFF_RUN"
QUICK = (
    *("stages.sft=null", "model.init=null", "eval.at_start=false", "eval.at_end=false", "checkpoint.save_hf=never"),
    *("monitor.console=off", "stages.async_rl.optimizer.warmup_steps=0"),
)


@dataclass(frozen=True)
class Cost:
    step_s: float  # median
    cpu_s: float  # of a step
    beside_s: float  # of the readers and the server, in all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("spans", "watched"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2, help="runs without and with, each")
    parser.add_argument("--groups", type=int, default=96, help="groups per step; the quickstart has 96")
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--model", type=Path, help="weights to start from, instead of the quickstart's warm-up")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    options = parser.parse_args()
    out = options.out.absolute()
    model = options.model or warmed_up(out, "on_off")
    costs: dict[bool, list[Cost]] = {False: [], True: []}
    for number in range(options.rounds):
        for on in (False, True):
            name = f"{options.what}-{'on' if on else 'off'}-{number}-{os.getpid()}"
            spans = on if options.what == "spans" else True
            overrides = [
                *QUICK,
                *(f"model.path={model}", f"rollout.engine.name={options.engine}", f"log.spans={str(spans).lower()}"),
                f"stages.{STAGE}.train.steps={options.steps}",
                f"stages.{STAGE}.train.groups_per_step={options.groups}",
                *(f"output_dir={out}", "project=on_off", f"name={name}"),
            ]
            pages = options.pages if on and options.what == "watched" else 0
            cost = measured(out / "on_off" / name, overrides, steps=options.steps, pages=pages)
            costs[on].append(cost)
            print(f"{name}: median step {cost.step_s:.3f} s, processor {cost.cpu_s:.3f} s a step", flush=True)
            if pages:
                print(f"  beside it: server and pages {cost.beside_s:.1f} s of processor in all", flush=True)
    for what, value in (("median step", "step_s"), ("processor time of a step", "cpu_s")):
        off, on = ([getattr(c, value) for c in costs[which]] for which in (False, True))
        change = statistics.fmean(on) / statistics.fmean(off) - 1
        spread = max((max(own) - min(own)) / statistics.fmean(own) for own in (off, on))
        print(f"{what}: {change:+.1%} with it; equal runs differ by up to {spread:.1%}")
    return 0


def measured(folder: Path, overrides: list[str], *, steps: int, pages: int) -> Cost:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()"]
    marked = env | {MARK: folder.name}
    run = subprocess.Popen([*command, "run", "async_rl", "--config", "quickstart", *overrides], cwd=HERE, env=marked)
    beside = watching(folder, pages, [*command, "watch", "--wait", str(folder)], env) if pages else nullcontext([])
    with beside as others:
        first = last = None
        while run.poll() is None:
            time.sleep(0.05)
            step = last_step(folder)
            if first is None and step >= FIRST_STEP:
                first = step, cpu_seconds(of_run(folder.name))
            if last is None and step >= steps - 1:
                last = step, cpu_seconds(of_run(folder.name))
                beside_s = cpu_seconds(others)
        if run.returncode or first is None or last is None:
            raise SystemExit(f"{folder}: the run ended with {run.returncode}, before it could be measured")
    rows = [row for row in rows_of(folder) if first[0] < row["step"] <= last[0]]
    took = [row["step/total_s"] for row in rows if "step/total_s" in row]
    return Cost(statistics.median(took), (last[1] - first[1]) / (last[0] - first[0]), beside_s)


def rows_of(folder: Path) -> list[dict]:
    try:
        lines = (folder / f"stages/{STAGE}/metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def last_step(folder: Path) -> int:
    return max((row["step"] for row in rows_of(folder)), default=-1)


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


@contextmanager
def watching(folder: Path, pages: int, command: list[str], env: dict[str, str]) -> Iterator[list[psutil.Process]]:
    """A server and its readers, in processes of their own; gives both."""
    server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.search(r"http://\S+", server.stdout.readline())
    assert address is not None, "leeway watch did not start"
    readers = subprocess.Popen([sys.executable, __file__, "--read", address[0], str(pages)])
    try:
        yield [psutil.Process(server.pid), psutil.Process(readers.pid)]
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
