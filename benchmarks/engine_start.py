"""From nothing to the first sampled token, and then tokens per second of processor time, by engine.

    python benchmarks/engine_start.py PATH_TO_A_MODEL vllm     # or hf, or pkg.module:Class

Each engine in a process of its own, on one core. Processor seconds (user and system, of all its processes) say what it
costs on a machine that does other things as well; wall seconds, what it takes on one that does not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence

import psutil

BATCHES = ((32, 8, 16), (96, 8, 5), (1, 8, 40))
"""(requests, completions of each, tokens of each)."""
OPTIONS = {"vllm": {"enforce_eager": True, "max_num_seqs": 256}}


def processor_s() -> float:
    """Of this process and those it started, those that have ended included."""
    own = psutil.Process()
    times = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
    return sum(t.user + t.system for t in times) + times[0].children_user + times[0].children_system


async def measure(path: str, name: str, core: int) -> None:
    begun, begun_wall = processor_s(), time.monotonic()

    from leeway.collector.engine import Engine, EngineSettings, start_engine

    engine: Engine = await start_engine(
        EngineSettings(
            name=name, model_path=path, dtype="float32", device="cpu", max_model_len=64, seed=0,
            options=OPTIONS.get(name, {}), cores=[core], kv_cache_gib=1.0, initial_version=0,
        )
    )  # fmt: skip

    async def sample(batch: Sequence[int]) -> None:
        requests, n, length = batch
        prompts = [[3 + (7 * i + j) % 11 for j in range(16)] for i in range(requests)]
        asked = (engine.generate(p, n=n, temperature=1.0, max_tokens=length, stop_token_ids=[]) for p in prompts)
        await asyncio.gather(*asked)

    await sample((1, 1, 1))
    print(f"{name}: first token after {processor_s() - begun:.1f} s of processor time, ", end="")
    print(f"{time.monotonic() - begun_wall:.1f} s of wall time")
    for batch in BATCHES:
        await sample(batch)  # the first of its shape
        before, before_wall = processor_s(), time.monotonic()
        await sample(batch)
        spent, wall, tokens = processor_s() - before, time.monotonic() - before_wall, batch[0] * batch[1] * batch[2]
        print(
            f"{name}: {batch[0]} x {batch[1]} of {batch[2]} tokens: {tokens / spent:.0f} tokens per processor second, ",
            end="",
        )
        print(f"{tokens / wall:.0f} per second")
    engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder with more than 14 tokens")
    parser.add_argument("engine")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    asyncio.run(measure(asked.model, asked.engine, asked.core))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own threads may not end
