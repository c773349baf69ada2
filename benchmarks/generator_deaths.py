"""A run whose generator is killed again and again, beside the same run left alone: what each death costs.

    python benchmarks/generator_deaths.py --out /tmp/deaths                    # the quickstart, 10 deaths in 100 steps
    python benchmarks/generator_deaths.py --out /tmp/deaths --engine hf --deaths 3 --steps 30

Deaths are spread evenly over the steps. By turns the engine's process and its generator's is killed (with hf they are
one). Printed, and written to deaths.json: exit codes, seconds from each kill to the first verified weights of the
successor, groups that were issued again, steps, tokens, held-out accuracy. deaths.png: tokens per second over time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from chaos import MARK, WORDS, leeway, processes, signal_part, warmed_up

SERVES = "serves again"
WAIT_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder to start from; default: made here")
    parser.add_argument("overrides", nargs="*", help="for both runs, key=value")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.model or warmed_up(args.out)
    results = {}
    for name, deaths in (("alone", 0), ("killed", args.deaths)):
        results[name] = run(name, deaths, model, args)
        print(name, json.dumps(results[name]), flush=True)
    (args.out / "deaths.json").write_text(json.dumps(results, indent=2) + "\n")
    picture(
        {name: rows_of(args.out, name) for name in results}, results["killed"]["killed_at"], args.out / "deaths.png"
    )


def run(name: str, deaths: int, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    mark, log = f"{name}-{time.monotonic_ns()}", args.out / f"{name}.txt"
    command = ["run", "async_rl", "--config", "quickstart", f"output_dir={args.out}", f"name={name}"]
    command += [
        "stages.sft=null",
        "model.init=null",
        f"model.path={model}",
        "monitor.console=plain",
        "eval.at_start=false",
    ]
    command += [
        f"stages.async_rl.train.steps={args.steps}",
        f"cluster.restarts={max(1, deaths)}",
        "seed=7",
        "eval.at_start=false",
    ]
    process = leeway(
        [*command, f"rollout.engine.name={args.engine}", *args.overrides], env={MARK: mark}, log=log, cwd=args.out
    )
    killed_at, down_s = [], []
    try:
        for death in range(deaths):
            wait_for(
                process, lambda due=(death + 1) * args.steps // (deaths + 1): num_steps(args.out, name) >= due, log
            )
            part = "engine" if args.engine == "vllm" and death % 2 == 0 else "generator"
            signal_part(mark, WORDS[part], signal.SIGKILL)
            killed_at.append(time.time())
            wait_for(process, lambda due=death + 1: log.read_text(errors="replace").count(SERVES) >= due, log)
            down_s.append(round(time.time() - killed_at[-1], 1))
        code = process.wait(WAIT_S)
    finally:
        for other in processes(mark):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends because another has
                other.kill()
    summary = json.loads((args.out / "leeway" / name / "summary.json").read_text())
    stage = summary["stages"]["async_rl"]
    rows = rows_of(args.out, name)
    return {
        "code": code,
        "steps": stage["steps"],
        "rl_s": stage["rl_s"],
        "tokens": stage["tokens"],
        "max_policy_lag": stage["max_policy_lag_observed"],
        "held_out": {key: value for key, value in stage["eval"]["after"].items() if key in ("exact_match", "reward")},
        "restarts": stage["restarts"],
        "groups_lost": sum(row.get("collector/groups_lost") or 0 for row in rows),
        "down_s": down_s,
        "killed_at": killed_at,
    }


def wait_for(process: subprocess.Popen[bytes], holds: Any, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"it did not come to that:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)


def rows_of(out: Path, name: str) -> list[dict[str, Any]]:
    file = out / "leeway" / name / "stages/async_rl/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def num_steps(out: Path, name: str) -> int:
    return sum("train/grad_norm" in row for row in rows_of(out, name))


def picture(runs: dict[str, list[dict[str, Any]]], killed_at: list[float], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, rows in runs.items():
        steps = [row for row in rows if row.get("train/tokens_per_s")]
        begun = steps[0]["time"]
        # A rate is that of the time since the step before.
        times, rates = [s["time"] - begun for s in steps], [s["train/tokens_per_s"] for s in steps]
        axes.plot(times, rates, drawstyle="steps", label=name)
        if name == "killed":
            for number, at in enumerate(killed_at):
                axes.axvline(at - begun, color="grey", linewidth=0.8, label=None if number else "a generator is killed")
    axes.set(xlabel="seconds since the first step", ylabel="tokens trained per second", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
