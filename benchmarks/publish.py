"""What publishing costs: memory of every rank, and seconds per GB against a plain copy, on random weights.

    python benchmarks/publish.py --shape qwen2_5-0.5b --ranks 2 --dtype bfloat16 float32 --bucket-mb 64 256

Needs torch and transformers only; run from a checkout, on Linux. Ranks are processes on this machine (gloo). Rank 0
hands every bucket to a file in shared memory, which is what an object store does with it. The plain copy writes as many
bytes there that lie ready in one bucket, in the same process and in turn with the publications.

Memory is resident memory: its peak since /proc/self/clear_refs was told to forget the last one, above what is resident
before, with all free memory given back. The canary's forward pass is measured by itself: what it needs is what FSDP
gathers for any forward pass.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer import SHAPES, settings_of
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.trainer.canary import score_canary
from leeway.trainer.sharding import reshard
from leeway.trainer.trainer import Trainer
from leeway.transports.object_store import ObjectStore
from leeway.weights import CanaryPrompts

MB = 2**20


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen2", max_position_embeddings=32768, **SHAPES[args.shape])
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        for dtype in args.dtype:
            for bucket_mb in args.bucket_mb:
                results = mp.get_context("spawn").SimpleQueue()
                setting = (args, folder, dtype, bucket_mb, free_port(), results)
                mp.spawn(run_rank, setting, nprocs=args.ranks)  # type: ignore[attr-defined]
                ranks = sorted((results.get() for _ in range(args.ranks)), key=lambda r: r["rank"])
                head = {"shape": args.shape, "ranks": args.ranks, "dtype": dtype, "bucket_mb": bucket_mb}
                for of_rank in ranks:
                    print(json.dumps(head | of_rank), flush=True)


def run_rank(rank: int, args: argparse.Namespace, folder: str, dtype: str, bucket_mb: int, port: int, out: Any) -> None:
    arguments = argparse.Namespace(
        device="cpu",
        dtype=dtype,
        max_tokens=4096,
        gradient_checkpointing=False,
        threads=args.threads,
        compile=False,
        cpu_offload=False,
    )
    canary = CanaryPrompts(scored=[list(range(24))] * 4, cached=[list(range(64))] * 2)
    settings = settings_of(arguments, folder, "auto")
    train = settings.train.model_copy(update={"num_ranks": args.ranks})
    buckets = settings.param_server.model_copy(update={"bucket_mb": bucket_mb})
    settings = replace(settings, train=train, param_server=buckets, canary=canary)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        put = Store(Path(shared))
        address, transport = f"tcp://127.0.0.1:{port}", ObjectStore(put, put)  # type: ignore[arg-type]
        trainer = Trainer(settings, rank=rank, init_method=address, transport=transport)
        out.put({"rank": rank} | measure(trainer, put, args.repeats))
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


def measure(trainer: Trainer, put: Store, repeats: int) -> dict[str, Any]:
    plans = trainer._gatherer.plans
    rank, largest = dist.get_rank(), max(plan.num_bytes for plan in plans)
    num_bytes = sum(plan.num_bytes for plan in plans)
    for _ in range(2):  # the first pass warms up
        reshard(trainer._model)
        canary, canary_mb = watched(lambda: score_canary(trainer._model, trainer._settings.canary, trainer._device))
    times: dict[str, list[float]] = {"stop": [], "publish": [], "copy": []}
    peaks: list[float] = []

    def publish() -> None:
        started = time.perf_counter()
        trainer._publisher.publish(0, lambda: canary)
        times["stop"].append(time.perf_counter() - started)
        if rank == 0:
            trainer.publication()
        times["publish"].append(time.perf_counter() - started)

    for repeat in range(repeats + 1):
        dist.barrier()
        _, peak = watched(publish)
        put.clear()
        if rank == 0:
            times["copy"].append(plain_copy([plan.num_bytes for plan in plans], put))
            put.clear()
        if repeat == 0:  # it warms up
            times = {name: [] for name in times}
        else:
            peaks.append(peak)
    row = {
        "num_buckets": len(plans),
        "gb": round(num_bytes / 1e9, 3),
        "largest_bucket_mb": round(largest / MB, 1),
        "extra_mb": round(max(peaks), 1),
        "extra_buckets": round(max(peaks) * MB / max(largest, trainer._settings.param_server.bucket_mb * MB), 2),
        "canary_extra_mb": round(canary_mb, 1),
    }
    if rank == 0:
        row |= {f"{name}_s_per_gb": round(statistics.median(s) * 1e9 / num_bytes, 3) for name, s in times.items()}
        row["publish_over_copy"] = round(
            statistics.median(p / c for p, c in zip(times["publish"], times["copy"], strict=True)), 2
        )
    return row


def plain_copy(sizes: list[int], put: Store) -> float:
    """Seconds in which as many bytes are written that are there already."""
    ready = np.ones(max(sizes), dtype=np.uint8)
    started = time.perf_counter()
    for size in sizes:
        put(ready[:size])
    return time.perf_counter() - started


def watched(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and by how many MB this process grew at most meanwhile."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident_mb("VmRSS")
    result = work()
    return result, resident_mb("VmHWM") - before


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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"])
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[256])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
