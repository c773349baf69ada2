"""What lag gains where generation times have a long tail: lognormal, sigma 1, capped at 8 times the mean.

    python benchmarks/long_tail.py               # warm-up, then two runs: about seven minutes on two cores

Each group waits for its own time, as with tools or judges, and the processor is free meanwhile. The limit is the
design's: T >= max(Wg/Ng, Wt/Nt, (Lmax + Tt + Ts) / (L + 1)), with Lmax the mean over batches of the longest wait in the
batch. The share of the gain that the limit allows: (T(0) - T(L)) / (T(0) - limit(L)). Exit code 1 below 90 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from quickstart_runs import finished_run, rows, step_seconds, summary, warmed_up

MEAN_S = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    parser.add_argument("--model", type=Path, help="weights to start from, instead of the quickstart's warm-up")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=48, help="groups per step")
    parser.add_argument("--lag", type=int, default=4)
    parser.add_argument("--window", type=int, default=1, help="reorder window of the run with lag")
    options = parser.parse_args()
    out = options.out.absolute()
    model = options.model or warmed_up(out, "long_tail")

    def run(name: str, lag: int, window: int) -> Path:
        return finished_run(
            out, "long_tail", name, model,
            f"stages.async_rl.train.groups_per_step={options.groups}", f"stages.async_rl.train.steps={options.steps}",
            f"staleness.max_policy_lag={lag}", f"staleness.reorder_window={window}", "staleness.in_flight=recompute",
            f"monitor.rollouts_per_step={options.groups * 8}",
            "env.name=slow_env:SlowSingleTurn", f"env.options={{delay_s: {MEAN_S}, sigma: 1.0, cap: 8.0}}",
        )  # fmt: skip

    sync = run("lockstep", 0, 1)
    lagging = run(f"lag-{options.lag}-window-{options.window}", options.lag, options.window)
    before_s, after_s = step_seconds(sync), step_seconds(lagging)
    longest_s = _longest_wait(lagging)
    train_s = _mean(lagging, "limit/train_s")
    stop_s = _mean(lagging, "collector/pause_s")
    serial_s = (longest_s + train_s + stop_s) / (options.lag + 1)
    limit_s = max(_mean(lagging, "limit/generate_s"), train_s, serial_s)
    share = (before_s - after_s) / (before_s - limit_s)
    print(f"lockstep {before_s:.3f} s a step; lag {options.lag}, window {options.window}: {after_s:.3f} s")
    print(f"limit at lag {options.lag}: {limit_s:.3f} s")
    print(f"longest wait of a batch {longest_s:.2f} s, training {train_s:.3f} s, stop {stop_s:.3f} s")
    print(f"lag observed {summary(lagging)['max_policy_lag_observed']}; {share:.1%} of the gain that the limit allows")
    return int(share < 0.9)


def _longest_wait(folder: Path) -> float:
    """Mean over steps of the longest wait among the groups of the batch."""
    longest = []
    for file in sorted(folder.glob("stages/async_rl/rollouts/*.jsonl")):
        longest.append(max(json.loads(line)["metrics"]["waited_s"] for line in file.open(encoding="utf-8")))
    return sum(longest) / len(longest)


def _mean(folder: Path, name: str) -> float:
    values = [row[name] for row in rows(folder) if name in row]
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
