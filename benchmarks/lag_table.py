"""Does the bound hold, and is it used? Real runs over lag bounds, reorder windows, updates per batch and speeds.

    python benchmarks/lag_table.py               # warm-up, then runs of 40 steps: about six minutes on two cores

`slow` adds a lognormal wait to each group's generation (nobody uses the processor meanwhile), which makes generation
the slower side; without it, training is. Exit code 1 where a token was trained on beyond its bound, or anything was
dropped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quickstart_runs import finished_run, series, summary, warmed_up

SLOW = ("env.name=slow_env:SlowSingleTurn", "env.options={delay_s: 0.6, sigma: 0.7}")
CASES: tuple[tuple[int, int, int, bool], ...] = (  # L, W, updates per batch, slow
    (0, 1, 1, False),
    (1, 1, 1, False),
    (1, 1, 1, True),
    (2, 8, 1, False),
    (8, 8, 1, True),
    (8, 33, 1, False),
    (8, 33, 1, True),
    (4, 8, 2, False),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    parser.add_argument("--model", type=Path, help="weights to start from, instead of the quickstart's warm-up")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    out = options.out.absolute()
    model = options.model or warmed_up(out, "lag_table")
    print(f"{'L':>3}{'W':>4}{'u':>3}  {'groups':8}{'lag mean':>9}{'max':>5}{'dropped':>9}{'length bias':>13}"
          f"{'distance':>10}{'served gap':>12}{'s/step':>8}")  # fmt: skip
    broken = False
    for lag, window, updates, slow in CASES:
        folder = finished_run(
            out, "lag_table", f"L{lag}-W{window}-u{updates}-{'slow' if slow else 'fast'}", model,
            "stages.async_rl.train.groups_per_step=32", f"stages.async_rl.train.steps={options.steps}",
            f"staleness.max_policy_lag={lag}", f"staleness.reorder_window={window}",
            f"train.updates_per_batch={updates}", "staleness.in_flight=recompute", "rollout.pull_every=1",
            *(SLOW if slow else ()),
        )  # fmt: skip
        found = summary(folder)
        lags = series(folder, "train/policy_lag/mean")
        biases, distances = (series(folder, f"replay/length_bias/{name}") for name in ("mean_tokens", "distance"))
        print(
            f"{lag:3}{window:4}{updates:3}  {'slow' if slow else 'fast':8}{sum(lags) / len(lags):9.2f}"
            f"{found['max_policy_lag_observed']:5}{found['dropped_stale']:9}{biases[-1]:13.4f}{distances[-1]:10.4f}"
            f"{found['served_gap_max']:12.2g}{found['rl_s'] / found['steps']:8.2f}",
            flush=True,
        )
        broken = broken or found["max_policy_lag_observed"] > lag or found["dropped_stale"] > 0
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
