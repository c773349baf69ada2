"""What a little load beside a run costs: steps of trainer and engine, quiet and beside one busy loop, by wait policy.

    python benchmarks/light_load.py                              # the trainer; torch and transformers only
    python benchmarks/light_load.py --engine PATH_TO_A_MODEL     # vLLM's passes too

Workers of every policy are started once, on the same cores, and take turns in bursts (A B A B): what else the machine
does meets all of them alike. Printed are medians of seconds, and ratios: those hold on a busy machine too.
`spin` is OpenMP's own default, `sleep` what a run sets (see `runtime.threads`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from leeway.runtime.threads import yielding  # noqa: E402

POLICIES: dict[str, dict[str, str]] = {"spin": {}, "sleep": yielding({})}


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    for what in ("trainer", *(("engine",) if args.engine else ())):
        compare(args, what)


def compare(args: argparse.Namespace, what: str) -> None:
    cores = ",".join(map(str, args.cores))
    pinned = ["taskset", "-c", cores, sys.executable]
    command = [*pinned, __file__, "--worker", what, "--threads", str(args.threads), "--engine", args.engine or ""]
    workers = {
        name: subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": str(args.threads)} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, environ in POLICIES.items()
    }
    seconds: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in workers for busy in (False, True)}
    try:
        for number in range(args.rounds + 1):
            for busy in (False, True):
                loop = subprocess.Popen([*pinned, "-c", "while True: pass"]) if busy else None
                try:
                    for name, worker in workers.items():
                        times = burst(worker, args.steps)
                        seconds[name, busy] += times if number else []  # the first round warms up
                finally:
                    if loop is not None:
                        loop.kill()
                        loop.wait()
    finally:
        for worker in workers.values():
            worker.kill()
    median = {key: statistics.median(values) for key, values in seconds.items()}
    row = {f"{name}_{'busy' if busy else 'quiet'}_s": round(value, 4) for (name, busy), value in median.items()}
    row |= {f"{name}_busy_to_quiet": round(median[name, True] / median[name, False], 2) for name in workers}
    for busy in (False, True):
        ratio = median["sleep", busy] / median["spin", busy]
        row[f"sleep_to_spin_{'busy' if busy else 'quiet'}"] = round(ratio, 2)
    about = {"what": what, "threads": args.threads, "cores": args.cores, "steps": args.rounds * args.steps}
    print(json.dumps(about | row))


def burst(worker: subprocess.Popen[str], steps: int) -> list[float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{steps}\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("seconds "):
            return json.loads(line.removeprefix("seconds "))
    raise RuntimeError("the worker ended")


def work(args: argparse.Namespace) -> None:
    """Do as many steps as each line of the standard input says, and print how long each took."""
    with tempfile.TemporaryDirectory() as folder:
        step = trainer(args, folder) if args.worker == "trainer" else engine(args)
        for line in sys.stdin:
            times = []
            for _ in range(int(line)):
                begun = time.perf_counter()
                step()
                times.append(time.perf_counter() - begun)
            print(f"seconds {json.dumps(times)}", flush=True)


def trainer(args: argparse.Namespace, folder: str) -> Callable[[], object]:
    """The quickstart's step: forward, backward and optimizer, on groups of short answers."""
    import torch
    import trainer as benchmark
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.argv = ["trainer.py", "--shape", "quickstart", "--threads", str(args.threads)]
    settings = benchmark.parse()
    torch.set_num_threads(args.threads)
    shape = benchmark.SHAPES["quickstart"]
    config = AutoConfig.for_model("qwen2", max_position_embeddings=32768, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    batch = benchmark.make_batch("groups", shape["vocab_size"], num_groups=64, group_size=8, median=1)
    return benchmark.trainer_step(settings, folder, "shared", batch)


def engine(args: argparse.Namespace) -> Callable[[], object]:
    """64 prompts, eight answers of 16 tokens each."""
    from leeway.collector.engine import EngineSettings
    from leeway.engines.vllm_engine import VllmEngine

    loop = asyncio.new_event_loop()

    async def start() -> VllmEngine:
        return await VllmEngine.start(
            EngineSettings(
                model_path=args.engine,
                dtype="float32",
                device="cpu",
                max_model_len=64,
                seed=0,
                options={"enforce_eager": True},
                cores=sorted(os.sched_getaffinity(0)),
                kv_cache_gib=1.0,
                initial_version=0,
            )
        )

    running = loop.run_until_complete(start())

    async def generate() -> None:
        prompts = [[3 + (7 * i + j) % 11 for j in range(16)] for i in range(64)]
        calls = (running.generate(p, n=8, temperature=1.0, max_tokens=16, stop_token_ids=[]) for p in prompts)
        await asyncio.gather(*calls)

    return lambda: loop.run_until_complete(generate())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="a Hugging Face folder that vLLM serves, with more than 14 tokens")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="steps in each burst")
    parser.add_argument("--worker", choices=("trainer", "engine"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
