"""Does every preset learn? The quickstart's RL stage with each of them, from one warm-up, several seeds each.

    python benchmarks/algorithms.py                                     # every preset that needs nothing else, 3 seeds
    python benchmarks/algorithms.py --presets grpo gspo --seeds 1 --steps 60 model.path=... algorithm.group_size=4
    python benchmarks/algorithms.py --presets mix --experts experts.jsonl    # jsd, on_policy_distill: --teacher FOLDER

Engine and trainer stay up between the runs, as in `leeway run frontier`. Held-out greedy accuracy before, twice on the
way and after; algorithms.csv has each evaluation, the table means and 95 % intervals over seeds. Exit code 1 where a
preset does not end above where it began. Corrections at lag 8 are compared by the recipe itself:

    leeway run frontier --config quickstart 'frontier.max_policy_lags=[lockstep,8]' frontier.seeds=5 \\
        'frontier.corrections=[none,decoupled,tis,icepop,mis,m2po]' train.updates_per_batch=2
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quickstart_runs import warmed_up

from leeway.algorithms.presets import PRESETS
from leeway.config import Config, Stage, find_recipe, plan_run
from leeway.driver import EvalPoint
from leeway.driver.context import StageContext, StageResult
from leeway.recipes.async_rl import train
from leeway.studies import Interval, run_trials

TEACHERS: tuple[str, ...] = ("on_policy_distill", "jsd")
EXPERTS: tuple[str, ...] = ("mix",)
ON_POLICY = dict.fromkeys(("rloo", "remax"), "staleness.max_policy_lag=0")
"""Presets without a ratio, and what docs/algorithms.md says that they need."""
OTHER_PARTS = ("ppo",)
"""Presets whose runs need other parts than the rest: they cannot share an engine and a trainer with them."""
EVALUATIONS = 3


@dataclass(frozen=True, eq=False)
class Trial:
    preset: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return f"{self.preset}-seed-{self.seed}"


def trials_of(
    presets: Sequence[str],
    *,
    seeds: int,
    steps: int,
    overrides: Sequence[str] = (),
    needs: Mapping[str, str] | None = None,
) -> list[Trial]:
    """All runs, seed by seed, so that a study cut short has compared something. Raises ConfigError for a wrong one.

    `needs`: by preset, one more override for it alone.
    """
    common = (
        "stages.sft=null", f"stages.async_rl.train.steps={steps}", f"eval.every={-(-steps // EVALUATIONS)}",
        "eval.at_start=true", "eval.at_end=true", "checkpoint.save_hf=never", "monitor.console=off",
        "monitor.rollouts_per_step=0", "staleness.max_policy_lag=2", "rollout.pull_every=1",
        *overrides,
    )  # fmt: skip

    def config(preset: str, seed: int) -> Config:
        own = [needs[preset]] if needs and preset in needs else []
        return plan_run("quickstart", None, [*common, *own, f"algorithm.name={preset}", f"seed={seed}"])[-1].config

    return [Trial(preset, seed, config(preset, seed)) for seed in range(seeds) for preset in presets]


def table(curves: dict[Trial, Sequence[EvalPoint]]) -> tuple[list[str], list[str]]:
    """(lines of the table, presets that did not end above where they began)."""
    lines, failed = (
        ["| preset | seeds | before | after | change, 95 % interval | best |", "|---|---|---|---|---|---|"],
        [],
    )
    for preset in dict.fromkeys(trial.preset for trial in curves):
        of_preset = [[p.accuracy for p in points] for trial, points in curves.items() if trial.preset == preset]
        before, after = (Interval.of([curve[i] for curve in of_preset]).mean for i in (0, -1))
        change = Interval.of([curve[-1] - curve[0] for curve in of_preset])
        best = sum(max(curve) for curve in of_preset) / len(of_preset)
        lines.append(
            f"| `{preset}` | {len(of_preset)} | {before:.3f} | {after:.3f} | "
            f"{change.mean:+.3f} ({change.low:+.3f} to {change.high:+.3f}) | {best:.3f} |"
        )
        if change.mean <= 0:
            failed.append(preset)
    return lines, failed


def csv_lines(curves: dict[Trial, Sequence[EvalPoint]]) -> list[str]:
    return ["preset,seed,policy_version,train_s,accuracy"] + [
        f"{trial.preset},{trial.seed},{p.policy_version},{p.train_s:.2f},{p.accuracy:.4f}"
        for trial, points in curves.items()
        for p in points
    ]


def study(trials: Sequence[Trial], folder: Path) -> dict[Trial, Sequence[EvalPoint]]:
    """Run them; algorithms.csv is written anew after each, so that a study that is cut short leaves one."""
    from leeway.runtime.cluster import connect, disconnect

    folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(name="algorithms", recipe=find_recipe("async_rl"), config=trials[0].config, dir=folder)
    context = StageContext(name=stage.name, recipe=stage.recipe, config=stage.config, dir=folder)
    curves: dict[Trial, Sequence[EvalPoint]] = {}
    started = time.monotonic()

    def finished(trial: Trial, result: StageResult, evals: Sequence[EvalPoint], run: Path) -> None:
        curves[trial] = list(evals)
        (folder / "algorithms.csv").write_text("\n".join(csv_lines(curves)) + "\n")
        shown = " -> ".join(f"{p.accuracy:.3f}" for p in evals)
        print(
            f"{len(curves)}/{len(trials)} {trial.name}: {shown}, {time.monotonic() - started:.0f} s in all", flush=True
        )

    connect([stage], scratch=folder)
    try:
        asyncio.run(run_trials(context, trials, train, finished))
    finally:
        disconnect([])
    return curves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs are kept (default: runs)")
    parser.add_argument("--model", type=Path, help="weights to start from, instead of the quickstart's warm-up")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), help="default: all that need nothing else")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--teacher", type=Path, help="model that on_policy_distill and jsd learn from")
    parser.add_argument("--experts", type=Path, help="jsonl of expert answers for mix")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_intermixed_args()
    options.teacher, options.experts = (p and p.absolute() for p in (options.teacher, options.experts))
    left_out = {*OTHER_PARTS, *(() if options.teacher else TEACHERS), *(() if options.experts else EXPERTS)}
    presets = options.presets or [name for name in PRESETS if name not in left_out]
    if wrong := left_out & {*presets}:
        parser.error(f"{', '.join(sorted(wrong))}: give --teacher or --experts, or run it with `leeway run`")
    out = options.out.absolute()
    model = options.model or warmed_up(out, "algorithms")
    overrides = ["model.init=null", f"model.path={model}", *options.overrides]
    needs = (
        dict.fromkeys(TEACHERS, f"algorithm.reference_path={options.teacher}")
        | dict.fromkeys(EXPERTS, f"replay.buffers.experts.path={options.experts}")
        | ON_POLICY
    )
    trials = trials_of(presets, seeds=options.seeds, steps=options.steps, overrides=overrides, needs=needs)
    curves = study(trials, out / "algorithms" / time.strftime("%Y%m%d-%H%M%S"))
    lines, failed = table(curves)
    print("\n".join(lines))
    if failed:
        print(f"did not end above where they began: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
