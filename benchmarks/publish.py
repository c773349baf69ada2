"""What publishing costs: seconds of a step, seconds beside it, and memory of every rank, on random weights.

    python benchmarks/publish.py --shape 135m --ranks 1 2 --dtype float32 bfloat16
    python benchmarks/publish.py --shape qwen2_5-0.5b --device cuda --ranks 1 --groups 64

Needs torch and transformers only; run from a checkout, on Linux. Ranks are processes on this machine. Rank 0 hands
every bucket to a file in shared memory, which is what an object store does with it. The plain copy writes as many bytes
there that lie ready in one bucket, in the same process and in turn with the publications.

A step and a step beside which the last version is published are timed in turns, and the median of each counts; of all
else the best. `critical` is what the thread that computes pays, the copy aside; `canary` is free where a trainer waits
for its batch.
CPU seconds (`_cpu_s`) hold on a busy machine too: `publish_cpu_s` are those of all threads, without the canary; all
others are those of the thread that computes.

Memory is resident memory: its peak since /proc/self/clear_refs was told to forget the last one, above what is resident
before the first publication, with all free memory given back. The canary's forward pass is measured by itself: what it
needs is what FSDP gathers for any forward pass.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer import SHAPES, make_batch, settings_of
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.trainer.canary import score_canary
from leeway.trainer.sharding import reshard
from leeway.trainer.trainer import Trainer
from leeway.transports.object_store import ObjectStore
from leeway.weights import Canary, CanaryPrompts

MB = 2**20


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: computing starts threads, and who forks the ranks must have none.
        maker = mp.get_context("fork").Process(target=make_model, args=(args.shape, folder))
        maker.start()
        maker.join()
        for dtype in args.dtype:
            for bucket_mb in args.bucket_mb:
                results = mp.get_context("fork").SimpleQueue()
                for num_ranks in args.ranks:
                    setting = (args, num_ranks, folder, dtype, bucket_mb, free_port(), results)
                    mp.start_processes(run_rank, setting, nprocs=num_ranks, start_method="fork")  # type: ignore[attr-defined]
                    ranks = sorted((results.get() for _ in range(num_ranks)), key=lambda r: r["rank"])
                    head = {"shape": args.shape, "ranks": num_ranks, "dtype": dtype, "bucket_mb": bucket_mb}
                    for of_rank in ranks:
                        print(json.dumps(head | of_rank), flush=True)


def make_model(shape: str, folder: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", max_position_embeddings=32768, **SHAPES[shape])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def run_rank(
    rank: int, args: argparse.Namespace, num_ranks: int, folder: str, dtype: str, bucket_mb: int, port: int, out: Any
) -> None:
    arguments = argparse.Namespace(
        device=args.device,
        dtype=dtype,
        max_tokens=4096,
        gradient_checkpointing=False,
        threads=args.threads,
        compile=False,
        cpu_offload=False,
    )
    canary = CanaryPrompts(scored=[list(range(24))] * 4, cached=[list(range(args.canary_tokens))] * 2)
    settings = settings_of(arguments, folder, "auto")
    train = settings.train.model_copy(update={"num_ranks": num_ranks})
    buckets = settings.param_server.model_copy(update={"bucket_mb": bucket_mb})
    settings = replace(settings, train=train, param_server=buckets, canary=canary)
    vocab_size = SHAPES[args.shape]["vocab_size"]
    batch = args.groups and make_batch(
        "groups", vocab_size, num_groups=args.groups // num_ranks, group_size=8, median=0, seed=rank
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        put = Store(Path(shared))
        address, transport = f"tcp://127.0.0.1:{port}", ObjectStore(put, put)  # type: ignore[arg-type]
        trainer = Trainer(settings, rank=rank, init_method=address, transport=transport)
        out.put({"rank": rank} | measure(trainer, put, batch, args.repeats))
        trainer.close()


class Store:
    """Buckets as files in shared memory; the last publication only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_buckets = 0

    def __call__(self, bucket: np.ndarray) -> Path:
        path = self._folder / str(self._num_buckets)
        self._num_buckets += 1
        bucket.tofile(path)
        return path

    def clear(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        self._num_buckets = 0


def measure(trainer: Trainer, put: Store, batch: Any, repeats: int) -> dict[str, Any]:
    plans = trainer._gatherer.plans
    rank, largest = dist.get_rank(), max(plan.num_bytes for plan in plans)
    num_bytes = sum(plan.num_bytes for plan in plans)

    @torch.no_grad()
    def scored() -> Canary:
        return score_canary(trainer._model, trainer._settings.canary, trainer._device)

    for _ in range(2):  # the first pass warms up
        reshard(trainer._model)
        canary, canary_mb = watched(scored)
    best: defaultdict[str, float] = defaultdict(lambda: float("inf"))
    steps: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[[], Any], *, threads: bool = False) -> None:
        """The computing thread's CPU seconds, or those of all threads."""
        clock = time.process_time if threads else time.thread_time
        begun, begun_cpu = time.perf_counter(), clock()
        work()
        synchronize(trainer)
        seconds = {f"{name}_s": time.perf_counter() - begun, f"{name}_cpu_s": clock() - begun_cpu}
        for key, value in seconds.items():
            best[key] = min(best[key], value)
            steps[key].append(value)

    def publish() -> None:
        timed("critical", trainer.begin_publish)
        trainer._publisher.score(lambda: canary)
        trainer.claim_publication().result()

    def step() -> None:
        trainer.forward_backward(batch)
        trainer.optim_step()

    before, peak = 0.0, 0.0
    for repeat in range(repeats + 1):
        reshard(trainer._model)  # releases what the canary's pass gathered
        resident = release_memory()
        before = before or resident
        dist.barrier()
        timed("publish", publish, threads=True)
        peak = max(peak, resident_mb("VmHWM"))
        put.clear()
        timed("canary", scored)
        if rank == 0:
            timed("copy", lambda: plain_copy([plan.num_bytes for plan in plans], put))
            put.clear()
        if repeat == 0:  # it warms up
            best.clear()
    for repeat in range(repeats + 1 if batch else 0):
        timed("step", step)
        trainer.begin_publish()
        trainer._publisher.score(lambda: canary)
        timed("step_beside", lambda: (step(), trainer.begin_publish()))
        trainer._publisher.score(lambda: canary)
        trainer.claim_publication().result()
        put.clear()
        if repeat == 0:
            steps.clear()
    best |= {name: statistics.median(seconds) for name, seconds in steps.items() if name.startswith("step")}
    row: dict[str, Any] = {
        "num_buckets": len(plans),
        "gb": round(num_bytes / 1e9, 3),
        "largest_bucket_mb": round(largest / MB, 1),
        "copy_mb": round(sum(part.num_bytes for part in trainer._gatherer._parts) / MB, 1),
        "extra_mb": round(peak - before, 1),
        "canary_extra_mb": round(canary_mb, 1),
    }
    row |= {name: round(seconds, 4) for name, seconds in best.items()}
    if best["step_s"] < float("inf"):
        row |= {
            "critical_share": round(best["critical_s"] / best["step_s"], 4),
            "canary_share": round(best["canary_s"] / best["step_s"], 4),
            "step_grows_by": round(best["step_beside_s"] / best["step_s"] - 1, 4),
            "step_cpu_grows_by": round(best["step_beside_cpu_s"] / best["step_cpu_s"] - 1, 4),
        }
    return row


def synchronize(trainer: Trainer) -> None:
    if trainer._device.type == "cuda":
        torch.cuda.synchronize()


def plain_copy(sizes: list[int], put: Store) -> None:
    """As many bytes are written that are there already."""
    ready = np.ones(max(sizes), dtype=np.uint8)
    for size in sizes:
        put(ready[:size])


def watched(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and by how many MB this process grew at most meanwhile."""
    before = release_memory()
    result = work()
    return result, resident_mb("VmHWM") - before


def release_memory() -> float:
    """Gives free memory back, and forgets the peak; returns the MB that are resident then."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mb("VmRSS")


def resident_mb(key: str) -> float:
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one rank")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 short answers in a step; 0: no steps")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"])
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[256])
    parser.add_argument("--canary-tokens", type=int, default=160, help="of each of its two long prompts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
