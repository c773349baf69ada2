"""How near a run comes to its speed limit, by turns: a machine whose speed wanders wanders for both alike.

    python benchmarks/limit.py --model FOLDER                     # the quickstart's reinforcement learning
    python benchmarks/limit.py --model FOLDER --rounds 8 staleness.max_policy_lag=2

Two runs are started, and have the machine for some seconds each, while the processes of the other are stopped: the
whole run (trainer, buffer, generator), and its engine alone, which answers two batches of its tasks at a time, as a run
measures it at its start (docs/metrics.md, limit/): to the last answer, so that its last passes are not full; and then
forgets what it has kept of their prompts, as a run's engine does when it loads a version. A line for each round: mean
seconds of a step, the seconds in which the engine alone makes that step's tokens, and their quotient, the share of the
limit; then that of all rounds. It holds where the generators are the slower side: `train_s` is what the trainer alone
would take, as the run measured it at its start. One engine, on the first core, which computes every answer by itself
(vLLM); the collector has the other cores, as in a run. One optimizer step for each batch.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from peer_processes import MARK  # noqa: E402
from peers import WITHOUT_END, Alive, Run, until_ready  # noqa: E402

NOTHING_BESIDE = ("eval.at_start=false", "eval.at_end=false", "checkpoint.save_hf=never", "checkpoint.save_state=never")


def main() -> int:
    args = parse()
    if args.alone:
        asyncio.run(alone(args))
        return 0
    check(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as after any error, no run is left behind
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    whole, engine = Alive(run_of(args, out)), None
    try:
        until_ready([whole])
        until_ready([engine := Alive(engine_of(args, out))])
        found: list[tuple[float, float]] = []
        for number in range(args.rounds):
            ran, made = (one.has_the_machine(args.slices) for one in (whole, engine))
            if ran is None or made is None:
                return 1
            limit_s = ran["tokens"] * made["mean_s"] / made["tokens"]
            found.append((ran["mean_s"], limit_s))
            row = {"round": number, "step_s": round(ran["mean_s"], 4), "limit_s": round(limit_s, 4)}
            print(json.dumps(row | {"share": round(limit_s / ran["mean_s"], 3)}), flush=True)
        step_s, limit_s = (statistics.fmean(each) for each in zip(*found, strict=True))
        rows = [json.loads(line) for line in whole.run.lines.read_text(encoding="utf-8").splitlines()]
        train_s = statistics.median(row["limit/train_s"] for row in rows if "limit/train_s" in row)  # of every step
        total = {"step_s": round(step_s, 4), "limit_s": round(limit_s, 4), "share": round(limit_s / step_s, 3)}
        print(json.dumps(total | {"train_s": round(train_s, 4)}), flush=True)
    finally:
        for one in (whole, engine):
            if one is not None:
                one.end()
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse, before anything starts, settings with which the two cannot be compared."""
    from leeway.config import load_config

    config = load_config("quickstart", options_of(args))
    for name, got, expected in (
        ("rollout.engine.name", config.rollout.engine_name, "vllm"),
        ("rollout.num_generators", config.rollout.num_generators, 1),
        ("train.updates_per_batch", config.train.updates_per_batch, 1),
    ):
        if got != expected:
            raise SystemExit(f"{name}: got {got}, expected {expected}, with which the engine alone can be compared")


def options_of(args: argparse.Namespace) -> list[str]:
    of_model = ["model.init=null", f"model.path={args.model.absolute()}"]
    return ["stages.sft=null", *of_model, *NOTHING_BESIDE, *args.settings]


def run_of(args: argparse.Namespace, out: Path) -> Run:
    label = f"limit-run-{os.getpid()}"
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()"]
    command += ["run", "async_rl", "--config", "quickstart", f"output_dir={out}", "project=limit", f"name={label}"]
    command += [*options_of(args), f"train.steps={WITHOUT_END}", "optimizer.schedule=constant", "monitor.console=off"]
    lines = out / "limit" / label / "stages/async_rl/metrics.jsonl"
    return Run({}, label, command, environment(label), lines, out / f"{label}.log", steps=30, target=0.0)


def engine_of(args: argparse.Namespace, out: Path) -> Run:
    label = f"limit-engine-{os.getpid()}"
    lines = out / f"{label}.jsonl"
    command = [sys.executable, __file__, "--alone", str(lines), "--model", str(args.model.absolute())]
    command += args.settings
    return Run({}, label, command, environment(label), lines, out / f"{label}.log", 3, 0.0)


def environment(label: str) -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, MARK: label, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


async def alone(args: argparse.Namespace) -> None:
    """The engine with its collector and nothing else: a line for each two steps' worth of groups."""
    from leeway.collector.actor import CollectorRun
    from leeway.collector.engine import start_engine
    from leeway.config import load_config
    from leeway.runtime.launch import engine_settings, transport_settings
    from leeway.tasks.taskset import build_taskset

    config = load_config("quickstart", options_of(args))
    first, *others = sorted(os.sched_getaffinity(0))
    if others:
        os.sched_setaffinity(0, others)
    settings = engine_settings(config, cores=[first], initial_version=0)
    engine = await start_engine(settings)
    with tempfile.TemporaryDirectory() as folder:
        transport = transport_settings(config, Path(folder))
        run = CollectorRun(config, engine, settings, name="alone", buffer=None, param_server=None, transport=transport)
        taskset = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
        taskset.reset()
        size, count = config.algorithm.group_size, 2 * config.train.groups_per_step
        with open(args.alone, "a", buffering=1, encoding="utf-8") as lines:
            for number in itertools.count(1):
                begun = run.collector.generating_s()
                of_tasks = [taskset.next() for _ in range(count)]
                made = await run.collector.rollouts(of_tasks, temperature=config.rollout.temperature, group_size=size)
                row: dict[str, Any] = {"step": number, "seconds": run.collector.generating_s() - begun}
                row["tokens"] = sum(len(t.response_tokens) for t in made)
                lines.write(json.dumps(row) + "\n")
                if not await engine.forget_prompts():  # type: ignore[attr-defined]
                    raise SystemExit("the engine kept its prompts, which a run's cannot")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model that the stage starts from")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--slices", type=float, default=12.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=Path("out/limit"))
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of both")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
