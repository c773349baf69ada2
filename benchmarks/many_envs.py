"""512 environments in flight, each of which takes its time: what is left of the engine's own tokens/s?

    python benchmarks/many_envs.py                 # one engine, a minute or two on two cores
    python benchmarks/many_envs.py --cores 0 1     # the engine computes on both cores (default: on the first)
    python benchmarks/many_envs.py --run           # a whole run of 40 steps instead: what driver and buffer take

The same prompts go to one engine, in turn and several times over: bare (requests only, no environment), through the
collector with an environment that answers at once, and with one that waits 100 ms after every turn. Two turns per
conversation, one trajectory per group. A random model writes answers of fixed length, so tokens are equal by
construction; so are the requests at a time, their parameters and what is asked for (logprobs, versions). The engine is
kept on its cores, and the process beside it set up, as a run does. A share is that of the bare engine in the same
round. Processor time per request says what costs where, also on a machine that does other things; how much of a core
those took is printed with every round, because they make its share worthless. With --run the same environments (100 ms)
feed a real run, 64 groups of 8 in flight, and the processor seconds of its driver and of its replay buffer are counted
from the third step to the last.

At least 256 requests want the engine's 256 places as long as fewer than 256 conversations wait for their environment:
100 ms x requests per second, some 50. So nothing is lost by waiting, but at the end: 0.2 s, in which the last
conversations wait and the engine is not full. That is the bound for any system.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import uvloop
from quickstart_runs import HERE

from leeway import Completion, StepEnvironment, Task
from leeway.collector.clock import ActivityClock
from leeway.collector.collector import Collector
from leeway.collector.engine import EngineSettings
from leeway.config import load_config
from leeway.config.flow import RolloutConfig
from leeway.config.sampling import Sampling, Samplings
from leeway.engines.vllm_engine import VllmEngine
from leeway.tasks.bootstrap import build_model_dir
from leeway.tasks.prompting import Prompter
from leeway.tasks.taskset import build_taskset

TURNS, TOKENS = 2, 16


class Slow(StepEnvironment):
    """Asks twice; thinks `delay_s` after every answer, without using a processor."""

    max_turns = TURNS
    max_tokens_per_turn = TOKENS

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def reset(self, task: Task) -> Any:
        self._turn = 0
        return task.prompt

    async def step(self, completion: Completion) -> Any:
        await asyncio.sleep(self._delay_s)
        self._turn += 1
        return " again =", len(completion.text) % 2, self._turn == TURNS, {}


async def bare(engine: VllmEngine, prompter: Prompter, tasks: list[Task], in_flight: int) -> int:
    """Tokens sampled: each prompt, then prompt, answer and a second question, with no environment in between."""
    room = asyncio.Semaphore(in_flight)
    again = prompter.encode_plain(" again =")
    sampling = {"n": 1, "temperature": 1.0, "max_tokens": TOKENS, "stop_token_ids": []}

    async def one(task: Task) -> int:
        async with room:
            tokens, count = prompter.encode(task.prompt), 0
            for _ in range(TURNS):
                (sampled,) = await engine.generate(tokens, **sampling)
                tokens, count = [*tokens, *sampled.tokens, *again], count + len(sampled.tokens)
            return count

    return sum(await asyncio.gather(*map(one, tasks)))


async def measure(options: argparse.Namespace) -> int:
    config = load_config("quickstart", ["model.init.options.max_position_embeddings=128"])
    taskset = build_taskset(config.task, seed=0, split="train", eval_config=config.eval)
    with tempfile.TemporaryDirectory() as folder:
        assert config.model.init is not None
        path = build_model_dir(config.model.init, taskset.texts(), Path(folder), seed=0)
        engine = await VllmEngine.start(
            EngineSettings(
                model_path=str(path), dtype="float32", device="cpu", max_model_len=128, seed=0,
                options={"enforce_eager": True, "max_num_seqs": 256},
                cores=options.cores, kv_cache_gib=1, initial_version=0,
            )
        )  # fmt: skip
        prompter = Prompter.load(path)
        prompter.stop_token_ids = []  # answers of one length
        tasks = list(taskset.tasks[: options.tasks])
        gc.collect()
        gc.freeze()  # as a collector's process does
        rounds: dict[str, list[Round]] = {}
        try:
            for _ in range(options.rounds + 1):  # the first one warms up
                for name, work in (
                    ("bare engine", lambda: bare(engine, prompter, tasks, options.in_flight)),
                    ("environment, 0 ms", lambda: rolled(engine, prompter, tasks, options.in_flight, 0.0)),
                    ("environment, 100 ms", lambda: rolled(engine, prompter, tasks, options.in_flight, 0.1)),
                ):
                    found = await timed(work, engine, TURNS * len(tasks))
                    rounds.setdefault(name, []).append(found)
                    print(
                        f"{name:22}{found.tokens_per_s:8.0f} tokens/s, others {found.others:.2f} of a core", flush=True
                    )
        finally:
            engine.shutdown()
    own = rounds["bare engine"][1:]
    print(f"{options.tasks} conversations of {TURNS} x {TOKENS} tokens, {options.in_flight} in flight")
    print("share of the bare engine in the same round; processor time per request in this process and in the engine's")
    for name, (_, *found) in rounds.items():
        shares = [a.tokens_per_s / b.tokens_per_s for a, b in zip(found, own, strict=True)]
        speed = statistics.median(r.tokens_per_s for r in found)
        here, there = statistics.median(r.here_us for r in found), statistics.median(r.there_us for r in found)
        print(
            f"{name:22}{speed:8.0f} tokens/s, {statistics.median(shares):.2f} of its own ({min(shares):.2f} to "
            f"{max(shares):.2f}) {here:6.0f} us {there:6.0f} us"
        )
    return 0


@dataclass(frozen=True)
class Round:
    """`here_us`, `there_us`: processor time per request, in this process and in the engine's."""

    tokens_per_s: float
    here_us: float
    there_us: float
    others: float
    """Cores that processes of others took meanwhile."""


async def timed(work: Callable[[], Awaitable[int]], engine: VllmEngine, num_requests: int) -> Round:
    def seconds() -> tuple[float, float, float, float]:
        there, machine = sum(_seconds(psutil.Process(pid)) for pid in engine.process_ids()), psutil.cpu_times()
        return time.monotonic(), time.process_time(), there, machine.user + machine.nice + machine.system

    before = seconds()
    tokens = await work()
    wall, here, there, machine = (b - a for a, b in zip(before, seconds(), strict=True))
    return Round(
        tokens / wall, 1e6 * here / num_requests, 1e6 * there / num_requests, max(0.0, machine - here - there) / wall
    )


async def rolled(engine: VllmEngine, prompter: Prompter, tasks: list[Task], in_flight: int, delay_s: float) -> int:
    unused: Any = None
    weights: Any = SimpleNamespace(one_version=contextlib.nullcontext)  # the engine serves one version, and no other
    collector = Collector(
        engine=engine, environment=Slow(delay_s), prompter=prompter, weight_sync=weights, clock=ActivityClock(),
        admit=unused, retried=unused, give_back=unused, fail=unused,
        rollout=RolloutConfig(max_prompt_tokens=64, max_response_tokens=64, max_model_len=128, retries=0),
        samplings=Samplings(default=Sampling(group_size=1, temperature=1.0), by_taskset={}, shares={}),
        greedy_baseline=False, seed=0, seeded=False, max_in_flight=in_flight,
    )  # fmt: skip
    trajectories = await collector.rollouts(tasks, temperature=1.0, group_size=1)
    return sum(sum(t.loss_mask) for t in trajectories)


RUN = (
    "env.name=many_envs:Slow", "env.options={delay_s: 0.1}", "stages.sft=null", "algorithm.group_size=8",
    "stages.async_rl.train.groups_per_step=16", "stages.async_rl.train.steps=40", "staleness.max_policy_lag=3",
    "eval.at_start=false", "eval.at_end=false", "checkpoint.save_hf=never", "monitor.console=off",
)  # fmt: skip
BUFFER = "ray::Replay"
"""How the process of the buffer's actor is called."""


def shares_in_a_run() -> int:
    """Start a run in a folder of its own and print which share of one core its driver and its buffer took."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "from leeway.cli.main import main; main()", "run", "async_rl"]
    with tempfile.TemporaryDirectory() as folder:
        overrides = (f"output_dir={folder}", "project=many_envs", "name=run", *RUN)
        driver = subprocess.Popen([*command, "--config", "quickstart", *overrides], cwd=HERE, env=env)
        rows = Path(folder) / "many_envs/run/stages/async_rl/metrics.jsonl"
        seen: list[tuple[float, float, float]] = []  # time, processor seconds of driver and buffer
        while driver.poll() is None:
            time.sleep(0.2)
            if not rows.exists() or not 3 <= _num_steps(rows) < 40:
                continue
            family = psutil.Process(driver.pid)
            buffers = [p for p in family.children(recursive=True) if p.name().startswith(BUFFER)]
            if buffers:
                seen.append((time.monotonic(), _seconds(family), sum(map(_seconds, buffers))))
    if driver.returncode or len(seen) < 2:
        print(f"the run ended with {driver.returncode}, after {len(seen)} samples", file=sys.stderr)
        return 1
    (start, *first), (end, *last) = seen[0], seen[-1]
    shares = [(after - before) / (end - start) for before, after in zip(first, last, strict=True)]
    print(f"{end - start:.0f} s: driver {shares[0]:.3f} of a core, buffer {shares[1]:.3f}, together {sum(shares):.3f}")
    return int(sum(shares) > 0.15)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _num_steps(rows: Path) -> int:
    return sum("train/reward/mean" in line for line in rows.open(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2048)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    first = sorted(os.sched_getaffinity(0))[:1]
    parser.add_argument(
        "--cores", type=int, nargs="*", default=first, help="where the engine computes (none: anywhere)"
    )
    parser.add_argument("--run", action="store_true", help="processor time of driver and buffer in a whole run")
    options = parser.parse_args()
    if options.run:
        return shares_in_a_run()
    uvloop.install()  # what Ray's actors run on
    return asyncio.run(measure(options))


if __name__ == "__main__":
    sys.exit(main())
