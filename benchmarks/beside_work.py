"""A run with one core's worth of other work beside it: its steps while that works, and while it rests, in turns.

    python benchmarks/beside_work.py --model WARM                             # the quickstart's RL stage, on vLLM
    python benchmarks/beside_work.py --model WARM rollout.engine=null rollout.engine.name=hf     # any overrides

The other work is busy loops of normal priority on no cores of their own, each in a session of its own as if somebody
else had started it, which work for `--window` seconds and rest as long. A step counts where it lies wholly.
`other_cores`: how many the loops really got, about one where a run wants both of two cores. Speed per core left is
steps a second over the cores that they left. One JSON line: medians of both, their ratio per core left, and the
longest step over the median of its kind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
OTHER_WORK = "while True: pass"
DEADLINE_S = 1200

Window = tuple[float, float, float | None]
"""From when to when, in seconds since the epoch, and the cores that the other work took, None while it rested."""


def main() -> None:
    args = parse()
    folder = args.out.absolute() / "beside_work" / f"{args.config}-{os.getpid()}"
    windows = run_beside(args, folder)
    of_stage = folder / "stages" / "async_rl" / "metrics.jsonl"
    metrics = of_stage if of_stage.exists() else folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    ends = [(row["time"], row["step/total_s"]) for row in rows if "step/total_s" in row]
    steps = [(end, end - seconds, seconds) for end, seconds in ends[args.skip :]]
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"config": args.config, "overrides": args.overrides} | summed_up(steps, windows, cores=cores)))


def run_beside(args: argparse.Namespace, folder: Path) -> list[Window]:
    """Start the run, and the other work in turns until it has ended."""
    model = [] if args.model is None else [f"model.path={args.model.absolute()}"]
    fresh = ["stages.sft=null", "model.init=null"] if args.config == "quickstart" and model else []
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()", "run", "async_rl"]
    command += ["--config", args.config, *model, *fresh, f"output_dir={folder.parent.parent}", "project=beside_work"]
    command += [f"name={folder.name}", "eval.at_start=false", "eval.at_end=false", "monitor.console=off"]
    command += ["checkpoint.save_hf=never", "checkpoint.save_state=never", f"train.steps={args.steps}", *args.overrides]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])}
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    windows: list[Window] = []
    with open(log, "w", encoding="utf-8") as said:
        run = subprocess.Popen(command, cwd=HERE, env=env, stdout=said, stderr=subprocess.STDOUT)
        begun, busy = time.monotonic(), False
        while run.poll() is None:
            if time.monotonic() - begun > DEADLINE_S:
                run.terminate()
                raise SystemExit(f"not finished after {DEADLINE_S} s; see {log}")
            started = time.time()
            loop = [sys.executable, "-c", OTHER_WORK]
            others = [subprocess.Popen(loop, start_new_session=True) for _ in range(args.loops * busy)]
            try:
                run.wait(args.window)
            except subprocess.TimeoutExpired:
                pass
            finally:
                ended, spent = time.time(), 0.0
                for other in others:
                    times = psutil.Process(other.pid).cpu_times()
                    spent += times.user + times.system
                    other.kill()
                    other.wait()
            windows.append((started, ended, spent / (ended - started) if busy else None))
            busy = not busy
    if run.returncode not in (0, 1):  # 1: learned nothing, which is not what is asked here
        raise SystemExit(f"the run ended with {run.returncode}; see {log}")
    return windows


def summed_up(steps: Sequence[tuple[float, float, float]], windows: Sequence[Window], *, cores: int) -> dict[str, Any]:
    """`steps`: (end, begin, seconds) of each. Those that lie in no one window count nowhere."""
    kinds: dict[bool, list[float]] = {False: [], True: []}
    for end, begin, seconds in steps:
        for start, stop, took in windows:
            if start <= begin and end <= stop:
                kinds[took is not None].append(seconds)
    if not all(kinds.values()):
        raise SystemExit(
            f"--window: no step lies wholly within one in which the other work {'works' if kinds[False] else 'rests'}; "
            "expected several: raise --window or --steps"
        )
    quiet, beside = (statistics.median(kinds[busy]) for busy in (False, True))
    other = statistics.median(took for *_, took in windows if took is not None)
    return {
        "steps": [len(kinds[False]), len(kinds[True])],
        "quiet_s": round(quiet, 3),
        "beside_s": round(beside, 3),
        "other_cores": round(other, 2),
        "speed_per_core_left": round(quiet * cores / (beside * (cores - other)), 2),
        "longest_over_median": [round(max(kinds[busy]) / m, 1) for busy, m in ((False, quiet), (True, beside))],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the config, key=value")
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--model", type=Path, help="folder of a model, in the place of what the config starts from")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--skip", type=int, default=5, help="steps at the start that do not count")
    parser.add_argument("--window", type=float, default=12.0, help="seconds that the other work works, and rests")
    parser.add_argument("--loops", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
