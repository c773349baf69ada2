"""The engine `hf`: seconds of batches, and of conversations, by number of cores; beside another checkout in turns.

    python benchmarks/hf_engine.py --model MODEL                        # a tiny model: the quickstart's size
    python benchmarks/hf_engine.py --model MODEL --beside CHECKOUT      # ratios: this one's seconds over the other's
    python benchmarks/hf_engine.py --model MODEL --only 0 --rounds 1    # a large model: the first workload alone

Each checkout has a process of its own for each round and number of cores, and takes the best of three. The seconds that
environments wait are not counted: of conversations, their longest chain of waits is taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ENVIRONMENT_S, REPLY_TOKENS = 0.5, 8


@dataclass(frozen=True)
class Workload:
    name: str
    requests: int
    completions: int
    prompt: int
    least: int  # tokens of an answer
    most: int
    turns: int = 1


WORKLOADS = (
    Workload("64 x 8 answers of 5 tokens", 64, 8, 10, 5, 5),
    Workload("16 x 8 of 24", 16, 8, 10, 24, 24),
    Workload("128 x 1 of 24, long prompts", 128, 1, 74, 24, 24),
    Workload("16 x 8 of 10 to 256", 16, 8, 10, 10, 256),
    Workload("128 x 1 of 10 to 256", 128, 1, 10, 10, 256),
    Workload("2 of 60", 1, 2, 10, 60, 60),
    Workload("128 conversations of 3 turns of 24", 128, 1, 10, 24, 24, turns=3),
)


async def measure(model: str, dtype: str, cores: list[int], workloads: list[Workload]) -> dict[str, float]:
    import torch

    torch.set_num_threads(len(cores))

    from leeway.collector.engine import EngineSettings, start_engine

    settings = EngineSettings(
        **{"name": "hf", "model_path": model, "dtype": dtype, "device": "cpu", "max_model_len": 384, "seed": 0},
        **{"options": {}, "cores": cores, "kv_cache_gib": 2.0, "initial_version": 0, "seeded": True},
    )  # type: ignore[arg-type]
    engine = await start_engine(settings)

    async def one(w: Workload, number: int, length: int) -> None:
        tokens = [3 + (7 * number + j) % 90 for j in range(w.prompt)]
        for turn in range(w.turns):
            answers = await engine.generate(
                tokens, n=w.completions, temperature=1.0, max_tokens=length, stop_token_ids=[], seed=100 * number + turn
            )
            if turn + 1 < w.turns:
                tokens = tokens + answers[0].tokens + [3 + j for j in range(REPLY_TOKENS)]
                await asyncio.sleep(ENVIRONMENT_S)

    best = {}
    for w in workloads:
        lengths = [random.Random(number).randint(w.least, w.most) for number in range(w.requests)]
        taken = []
        for _ in range(3):
            begun = time.perf_counter()
            await asyncio.gather(*(one(w, number, length) for number, length in enumerate(lengths)))
            taken.append(time.perf_counter() - begun - (w.turns - 1) * ENVIRONMENT_S)
        best[w.name] = min(taken)
    engine.shutdown()
    return best


def measured(checkout: Path, args: argparse.Namespace, cores: int) -> dict[str, float]:
    command = [sys.executable, str(HERE), "--model", args.model, "--dtype", args.dtype, "--own", str(cores)]
    command += ["--only", *map(str, args.only)] if args.only else []
    env = os.environ | {"PYTHONPATH": str(checkout / "src")}
    run = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model; ids up to 92 are used")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="+", default=[], help="numbers of workloads, from 0 on")
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        workloads = [WORKLOADS[i] for i in args.only] or list(WORKLOADS)
        cores = sorted(os.sched_getaffinity(0))[: args.own]
        print(json.dumps(asyncio.run(measure(args.model, args.dtype, cores, workloads))))
        return
    checkouts = [HERE.parents[1], *([args.beside.resolve()] if args.beside else [])]
    numbers = sorted({1, len(os.sched_getaffinity(0))})
    seconds: dict[tuple[int, Path], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for cores in numbers:
            for checkout in checkouts:
                seconds.setdefault((cores, checkout), []).append(measured(checkout, args, cores))
    for cores in numbers:
        print(f"\n| {cores} core{'s' * (cores > 1)} | s |" + (" of the other's, each round |" if args.beside else ""))
        print("|---|---|" + ("---|" if args.beside else ""))
        own = seconds[cores, checkouts[0]]
        for name in own[0]:
            row = f"| {name} | {statistics.median(r[name] for r in own):.2f} |"
            if args.beside:
                others = seconds[cores, checkouts[1]]
                row += " ".join(f" {a[name] / b[name]:.2f}" for a, b in zip(own, others, strict=True)) + " |"
            print(row)


if __name__ == "__main__":
    main()
