"""What a step costs as a run grows tenfold: groups, tokens of an answer, environments at a time, steps so far.

    python benchmarks/growth.py                       # about six minutes on two cores
    python benchmarks/growth.py --parts steps         # bookkeeping alone, to 100,000 steps
    python benchmarks/growth.py --warm FOLDER         # the quickstart's warmed-up model (default: made)

| part | grows |
|---|---|
| groups | 16, 160 groups of 8 short answers in a step: the quickstart's model, warmed up, engine `hf`, a lag of 2 |
| tokens | answers of up to 24 and 240 tokens, 16 x 8: the same with random weights, whose answers are nearly as long |
| environments | 16, 160 groups of a step, each of whose environments takes 0.5 s: as `groups`, with `slow_env.py` |
| steps | 10^3, 10^4, 10^5 that a run has taken: the driver's own reports, metrics.jsonl, the watch over learning |

Runs: seconds and processor seconds of a step, and of each group or token: medians after the first fifth of the steps.
Bookkeeping: milliseconds of processor for a step, over the last tenth of the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peer_processes import MARK
from peer_workloads import random_weights
from peers import Run, watched
from quickstart_runs import HERE, warmed_up

STEPS = (1_000, 10_000, 100_000)
ENVIRONMENT_S = 0.5


def main() -> None:
    args = parse()
    out = args.out.absolute() / "growth"
    out.mkdir(parents=True, exist_ok=True)
    if "steps" in args.parts:
        print(json.dumps({"part": "steps"} | asyncio.run(bookkeeping(STEPS))), flush=True)
    if set(args.parts) == {"steps"}:
        return
    warm = args.warm.absolute() if args.warm else warmed_up(out, "growth")
    for part in args.parts:
        for scale in (1, 10) if part != "steps" else ():
            print(json.dumps({"part": part} | one_run(part, scale, warm, out, args.steps)), flush=True)


def one_run(part: str, scale: int, warm: Path, out: Path, steps: int) -> dict[str, Any]:
    groups, tokens, more = 16, 8, []
    model = warm
    if part == "tokens":
        tokens = 24 * scale
        model = random_weights(warm, out / "random")
        more = ["staleness.in_flight=recompute"]
    else:
        groups *= scale
    if part == "environments":
        more = ["env.name=slow_env:SlowSingleTurn", f"env.options={{delay_s: {ENVIRONMENT_S}}}"]
    label = f"{part}-{scale}-{time.time_ns()}"
    options = [
        *("stages.sft=null", "model.init=null", f"model.path={model}", f"output_dir={out}", "project=growth"),
        *(f"name={label}", f"train.steps={steps}", f"train.groups_per_step={groups}", "optimizer.lr=1e-6"),
        *("eval.at_start=false", "eval.at_end=false", "eval.every=0", "monitor.console=off"),
        *("checkpoint.save_hf=never", "checkpoint.save_state=never", "train.skip_zero_advantage=false"),
        *("rollout.engine=null", "rollout.engine.name=hf", f"rollout.max_response_tokens={tokens}"),
        *(f"rollout.max_model_len={64 if tokens == 8 else 384}", "staleness.max_policy_lag=2", "rollout.pull_every=1"),
        *more,
    ]
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()", "run", "async_rl"]
    lines = out / "growth" / label / "stages" / "async_rl" / "metrics.jsonl"
    command += ["--config", "quickstart", *options]
    found = watched(Run({}, label, command, environment(label), lines, out / f"{label}.log", steps, 0.0))
    units = found["tokens"] if part == "tokens" else groups
    return {
        "groups": groups,
        "max_tokens": tokens,
        "step_s": round(found["step_s"], 3),
        "cpu_s": round(found["cpu_s"], 3),
        "peak_gib": round(found["peak_gib"], 2),
        f"ms_for_a_{'token' if part == 'tokens' else 'group'}": round(1000 * found["step_s"] / units, 3),
    }


def environment(label: str) -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, MARK: label, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


async def bookkeeping(marks: tuple[int, ...]) -> dict[str, Any]:
    """The driver's own part of a step, with a collector that always says the same."""
    sys.path.insert(0, str(HERE.parent / "src"))
    from leeway.config import load_config
    from leeway.driver.rl_report import Reporter, StepReport
    from leeway.monitor.build import build_monitor
    from leeway.runtime.limit import Speeds
    from leeway.runtime.supervisor import Supervisor

    config = load_config("quickstart", ["monitor.console=off"], recipe="async_rl")
    speeds = Speeds(
        **dict.fromkeys(("generate_s_per_sequence", "generate_s_per_token", "train_s_per_token"), 1e-4),
        **dict.fromkeys(("optim_s", "first_token_s", "serial_s_per_token", "weight_sync_s"), 1e-3),
    )

    async def stats() -> dict[str, float]:
        return {f"collector/{name}_frac": 0.1 for name in ("generate", "pause", "environment", "withheld")}

    generator = SimpleNamespace(call_now=lambda ask: ask(SimpleNamespace(stats=SimpleNamespace(remote=stats))))
    parts: Any = SimpleNamespace(
        generators=[generator], supervisor=Supervisor(), restarts=SimpleNamespace(over=[], left=1)
    )
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        reporter = Reporter(config, parts, build_monitor(Path(folder), config.monitor, {}, 0, "rl"))
        reporter.begin(speeds)
        begun = time.process_time()
        for step in range(1, max(marks) + 1):
            await reporter.put(report(StepReport, step))
            if any(step == mark - mark // 10 for mark in marks):
                begun = time.process_time()
            if step in marks:
                found[f"ms_a_step_at_{step}"] = round(1e4 * (time.process_time() - begun) / step, 3)
        await reporter.end()
        begun = time.process_time()
        reporter.summary(steps=max(marks))
        found["summary_s"] = round(time.process_time() - begun, 2)
        found["metrics_mib"] = round((Path(folder) / "metrics.jsonl").stat().st_size / 2**20, 1)
    return found


def report(kind: Any, step: int) -> Any:
    """As many numbers as a run has."""
    times = {f"step/{name}_s": 0.01 for name in ("wait_for_batch", "forward_backward", "optim", "other", "total")}
    about = {"train/policy_lag/max": 1.0, "train/tokens_in_pass": 100.0, "train/grad_norm": 0.5, "train/lr": 1e-4}
    batch = {
        **{f"train/reward/{name}": 0.5 + 0.001 * (step % 7) for name in ("mean", "std")},
        **{f"train/response_tokens/{name}": 9.0 for name in ("mean", "max", "total")},
        **{"train/sequences": 128.0, "train/environment_s/max": 0.0, "train/zero_advantage_frac": 0.2},
        **{f"train/more_{i}": float(step) for i in range(40)},
    }
    return kind(step, times | about, batch, begins_batch=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("groups", "tokens", "environments", "steps")
    parser.add_argument("--parts", nargs="+", choices=known, default=list(known))
    parser.add_argument("--steps", type=int, default=15, help="of each run")
    parser.add_argument("--warm", type=Path, help="the quickstart's warmed-up model (default: made by its sft stage)")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
