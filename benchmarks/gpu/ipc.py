"""Weights from one process to another on one GPU: `ipc` in the device's memory (CUDA IPC) beside `ipc` in main memory.

    python benchmarks/gpu/ipc.py --gb 0.3 3                    # on a GPU that both processes see
    python benchmarks/gpu/ipc.py --gb 0.1 --device cpu         # without one: main memory in the place of the device's

Needs no network and no model. One process publishes random bytes in buckets, the other one takes them as an engine
does. Seconds of the clock, the median of `--versions`, and beside each what it stands for in a weight sync:

    put        rank 0 copies a version out of (pinned) main memory; beside training
    check      the receiver opens it, and checks every byte in main memory; beside generation
    copy       into tensors of its own on the device; the pause
    floor      the same copy from pinned main memory to the device, and within the device

It ends with what CUDA IPC must do beside being fast: a receiver that is killed leaves no memory behind.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
import torch.multiprocessing as mp

from leeway.transports.device_ipc import DeviceIpc
from leeway.transports.device_memory import Opened, device_memory
from leeway.transports.ipc import Ipc
from leeway.transports.shared_memory import mapped
from leeway.transports.transport import DevicePlace
from leeway.weights import (
    Canary,
    CanaryPrompts,
    Manifest,
    Publication,
    TensorEntry,
    check_bucket,
    checksum_of,
    digest_of,
)


def version(number: int, buckets: list[np.ndarray]) -> Manifest:
    entries = [
        TensorEntry(f"t{i}", "uint8", (b.nbytes,), i, 0, b.nbytes, checksum_of(b, "xxh3_128"))
        for i, b in enumerate(buckets)
    ]
    canary = Canary(CanaryPrompts([], []), [], [], [])
    return Manifest(number, entries, [b.nbytes for b in buckets], canary, digest_of(entries))


def receive(asked: Connection, kind: str) -> None:
    device = torch.device(kind)
    own: list[torch.Tensor] = []
    while True:
        publication, to_the_end = asked.recv()
        manifest = publication.manifest
        began = time.perf_counter()
        opened: Opened | None = None
        if isinstance(publication.bucket_refs[0], DevicePlace):
            opened = Opened(manifest, publication.bucket_refs, device_memory(device))
            for _ in opened.checks(manifest):
                pass
            given = opened.tensors
        else:
            given = [torch.from_numpy(mapped(Path(ref))) for ref in publication.bucket_refs]
            for index, bucket in enumerate(given):
                check_bucket(manifest, index, bucket.numpy())
        check_s = time.perf_counter() - began
        own = own or [torch.empty(n, dtype=torch.uint8, device=device) for n in manifest.bucket_bytes]
        copy_s = clocked(lambda to=own, of=given: copy(to, of), device)
        if opened is not None:
            opened.confirm(manifest)
        got = [checksum_of(tensor.cpu().numpy(), "xxh3_128") for tensor in own]
        if opened is not None and to_the_end:
            del given
            opened.close()
        asked.send((check_s, copy_s, got == [entry.checksum for entry in manifest.entries]))


def copy(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    for target, bucket in zip(into, of, strict=True):
        target.copy_(bucket)


def clocked(work: Callable[[], Any], device: torch.device) -> float:
    finish(device)
    began = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - began


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(num_bytes: int, args: argparse.Namespace, parent: Path) -> None:
    device = torch.device(args.device)
    sizes = [min(args.bucket_mb << 20, num_bytes - at) for at in range(0, num_bytes, args.bucket_mb << 20)]
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for size in sizes]
    there, also = ([torch.empty(size, dtype=torch.uint8, device=device) for size in sizes] for _ in range(2))
    to = min(clocked(lambda: copy(there, pinned), device) for _ in range(5))
    within = min(clocked(lambda: copy(also, there), device) for _ in range(5))
    print(f"\n{num_bytes / 1e9:.2f} GB: floor to the device {to:.4f} s, within it {within:.4f} s", flush=True)
    there.clear(), also.clear()
    for memory in ("host", "device"):
        transport: Any = Ipc(parent=parent)
        if memory == "device":
            transport = DeviceIpc(lambda folder: device_memory(device, folder), longest_s=600, parent=parent)
        rows, right = pulls(transport, pinned, args)
        put, check, copied = (statistics.median(row[i] for row in rows) for i in range(3))
        print(f"  {memory:<7} put {put:.4f}   check {check:.4f}   copy {copied:.4f} s   right: {right}", flush=True)
        transport.close()


def pulls(transport: Any, pinned: list[torch.Tensor], args: argparse.Namespace) -> tuple[list[Any], bool]:
    """(seconds of put, check and copy) of each version but the first, and whether all arrived as they were put."""
    buckets = [part.numpy() for part in pinned]

    def publish(manifest: Manifest) -> Publication:
        outgoing = transport.begin(manifest.policy_version)
        for bucket in buckets:
            outgoing.put(bucket)
        return outgoing.commit(manifest)

    context = mp.get_context("spawn")
    here, other = context.Pipe()
    process = context.Process(target=receive, args=(other, args.device), daemon=True)
    process.start()
    rows, right = [], True
    for number in range(args.versions + 2):
        for part in pinned:
            part.random_(0, 256)
        manifest = version(number, buckets)
        began = time.perf_counter()
        publication = publish(manifest)
        put = time.perf_counter() - began
        here.send((publication, number <= args.versions))
        if not here.poll(600):
            raise TimeoutError("the receiver said nothing for 600 s")
        check, copied, whole = here.recv()
        rows.append((put, check, copied))
        right = right and whole
    process.kill()  # while it has the last version open
    process.join()
    if isinstance(transport, DeviceIpc):
        for number in range(3):
            publish(version(number, buckets))
        versions = transport.device_bytes / sum(part.nbytes for part in pinned)
        print(f"  its reader was killed: {versions:.0f} versions are kept (2 as before: none for the dead)", flush=True)
    return rows[1:-1], right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gb", type=float, nargs="+", default=[0.3, 3.0])
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--versions", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        for gb in args.gb:
            measure(int(gb * 1e9), args, Path(parent))


if __name__ == "__main__":
    main()
