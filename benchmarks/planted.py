"""Five runs with a planted bottleneck each: what the sentence of `leeway watch` says at steps 10 and 20.

    python benchmarks/planted.py [--only window] [--out runs]      # five runs of half a minute, hf engine

What is planted waits without computing (`planted_parts.py`). Exit code 1 unless every sentence names its bottleneck.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from quickstart_runs import leeway, rows

from leeway.monitor.waits import LAST_STEPS, who_waits
from leeway.watch.folder import RunFolder

STEPS = 20
LOOKS = (10, 20)
COMMON = (
    *("rollout.engine.name=hf", "env.name=planted_parts:Parity", "stages.sft=null", "eval.at_start=false"),
    *("eval.at_end=false", "checkpoint.save_hf=never", "monitor.console=off", "algorithm.group_size=4"),
    *(f"stages.async_rl.train.steps={STEPS}", "stages.async_rl.train.groups_per_step=8"),
    "rollout.max_response_tokens=4",
)


@dataclass(frozen=True)
class Plant:
    """`holders`: what the sentence may name; `settings`: of which one must be the advice."""

    overrides: tuple[str, ...]
    holders: frozenset[str]
    settings: frozenset[str]


def plant(*overrides: str, holders: set[str], settings: set[str]) -> Plant:
    return Plant(overrides, frozenset(holders), frozenset(settings))


PLANTS = {
    "environment": plant(
        "env.options={delay_s: 2.0}", holders={"environment"}, settings={"staleness.max_policy_lag"}
    ),
    "engine": plant(
        "rollout.engine.name=planted_parts:SlowEngine", holders={"generate"}, settings={"rollout.num_generators"}
    ),
    "trainer": plant(
        "algorithm.loss.name=planted_parts:SlowLoss", holders={"trainer"}, settings={"train.num_ranks"}
    ),
    "window": plant(
        *("env.options={delay_s: 1.0, sigma: 1.2}", "staleness.max_policy_lag=4", "staleness.reorder_window=1"),
        holders={"window"},
        settings={"staleness.reorder_window"},
    ),
    "publishing": plant(
        "param_server.transport=planted_parts:SlowTransport",
        holders={"publishing", "publish", "weights"},
        settings={"param_server.publish_every"},
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    parser.add_argument("--only", choices=PLANTS, action="append", help="these alone")
    options = parser.parse_args()
    wrong = 0
    for name in options.only or PLANTS:
        folder = planted_run(options.out.absolute(), name)
        for step in LOOKS:
            wrong += not judged(name, folder, step)
    print(f"{wrong} of {len(LOOKS) * len(options.only or PLANTS)} sentences are wrong")
    return int(wrong > 0)


def planted_run(out: Path, name: str) -> Path:
    """The folder of the run; what is there already is not run again."""
    folder = out / "planted" / name
    if not (folder / "summary.json").exists():
        where = (f"output_dir={out}", "project=planted", f"name={name}")
        leeway("run", "async_rl", "--config", "quickstart", *where, *COMMON, *PLANTS[name].overrides)
    return folder


def judged(name: str, folder: Path, step: int) -> bool:
    recent = [row for row in rows(folder) if step - LAST_STEPS < row["step"] <= step]
    wait = who_waits(recent, RunFolder(folder).settings("async_rl"))
    right = wait is not None and wait.holder in PLANTS[name].holders and wait.setting in PLANTS[name].settings
    said = "nothing" if wait is None else f"{wait.sentence} [{wait.setting or 'no setting'}]"
    print(f"{name}, step {step}: {'right' if right else 'WRONG'}: {said}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(main())
