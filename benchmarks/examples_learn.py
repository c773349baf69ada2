"""The example environments learn: each of examples/ trains from the quickstart's warm-up, as a user starts it.

    python benchmarks/examples_learn.py            # one warm-up, then three runs of 150 steps: ten minutes on two cores

A single-turn scorer, a game in which only the last turn pays, and an agent behind the `openai` client. Shown is the
accuracy (of the scorer, which pays in part, the reward) on held-out tasks, greedy, in the environment itself, before
and after, and the mean reward of the first and the last ten steps. Ends with 1 if one of the three did not get better.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from quickstart_runs import HERE, series, summary, warmed_up

EXAMPLES = {
    "scorer": ("env.reward=my_scorer:short_and_right",),
    "game": ("env.name=guess_number:GuessNumber",),
    "agent": ("env.name=openai_agent:Careful", "stages.async_rl.train.groups_per_step=16"),
}
"""What each is started with. The agent's client takes milliseconds for each request: a third of the groups a step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", choices=list(EXAMPLES))
    options = parser.parse_args()
    out = options.out.absolute()
    model = warmed_up(out, "examples_learn")
    print(f"{'example':10}{'held out before':>16}{'after':>8}{'reward first 10':>17}{'last 10':>9}{'wall s':>8}")
    worse = 0
    for name, overrides in EXAMPLES.items():
        if options.only not in (None, name):
            continue
        folder = out / "examples_learn" / name
        if not (folder / "summary.json").exists():
            start_in_examples(
                f"output_dir={out}", "project=examples_learn", f"name={name}", "stages.sft=null", "model.init=null",
                f"model.path={model}", f"stages.async_rl.train.steps={options.steps}", "monitor.console=off",
                "checkpoint.save_hf=never", *overrides,
            )  # fmt: skip
        rewards, done = series(folder, "train/reward/mean"), summary(folder)
        measure = "reward" if name == "scorer" else "exact_match"
        before, after = (done["eval"][when][measure] for when in ("before", "after"))
        first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
        print(f"{name:10}{before:16.3f}{after:8.3f}{first:17.3f}{last:9.3f}{done['wall_s']:8.0f}", flush=True)
        worse |= after <= before or last <= first
    return int(worse)


def start_in_examples(*overrides: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()", "run", "async_rl"]
    folder = HERE.parent / "examples"
    subprocess.run([*command, "--config", "quickstart", *overrides], cwd=folder, env=env, check=True)


if __name__ == "__main__":
    sys.exit(main())
