"""What in-flight weight updates do to the tokens: trainer against engine, each token under its own version's weights.

    python benchmarks/in_flight.py               # two runs of 36 steps, a minute or two each on two cores
    python benchmarks/in_flight.py --turns       # the same with conversations of four turns

Long answers of a fresh model live through several versions. Every token of every third step is scored again by the
trainer under exactly the weights that sampled it (train.audit_every). With `recompute` the two must agree to 1e-4; with
`keep`
the KV cache of running requests is that of older weights, and the gap is the price of keeping it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from quickstart_runs import finished_run, series, summary

from leeway.versions import NO_VERSION

SETTINGS = (
    "stages.async_rl.train.groups_per_step=2",
    "algorithm.group_size=4",
    "stages.async_rl.optimizer.lr=1e-3",
    "stages.async_rl.optimizer.warmup_steps=0",
    "staleness.max_policy_lag=8",
    "train.audit_every=3",
    "env.reward=long_answers:digits",
    "rollout.max_response_tokens=400",
    "rollout.max_model_len=448",
    "model.init.options.max_position_embeddings=448",
    "monitor.rollouts_per_step=32",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--turns", action="store_true", help="conversations of four turns instead of one long answer")
    options = parser.parse_args()
    print(f"{'in_flight':12}{'tokens':>9}{'gap max':>10}{'gap mean':>10}{'lag':>5}  trajectories by versions in them")
    worst = 0.0
    for mode in ("recompute", "keep"):
        folder = finished_run(
            options.out.absolute(), "in_flight_turns" if options.turns else "in_flight", mode, None, *SETTINGS,
            *(("env.name=long_answers:Talk",) if options.turns else ()),
            f"staleness.in_flight={mode}", f"stages.async_rl.train.steps={options.steps}",
        )  # fmt: skip
        tokens = series(folder, "train/audit_tokens")
        gap = max([*series(folder, "train/audit_gap/max"), *series(folder, "train/logprob_gap/max")])
        means = series(folder, "train/audit_gap/mean")
        mean = sum(m * n for m, n in zip(means, tokens, strict=True)) / sum(tokens)
        versions: Counter[int] = Counter()
        for file in sorted(folder.glob("stages/async_rl/rollouts/*.jsonl")):
            found = (set(json.loads(line)["policy_versions"]) - {NO_VERSION} for line in file.open(encoding="utf-8"))
            versions.update(map(len, found))
        counts = ", ".join(f"{n}: {count}" for n, count in sorted(versions.items()))
        lag = summary(folder)["max_policy_lag_observed"]
        print(f"{mode:12}{int(sum(tokens)):9}{gap:10.2g}{mean:10.2g}{lag:5}  {counts}")
        if mode == "recompute":
            worst = gap
            if max(versions) < 3:
                print("no trajectory lived through three versions: nothing was shown")
                return 1
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
