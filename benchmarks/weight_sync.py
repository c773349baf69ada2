"""Seconds per GB of a weight sync by transport and phase, whole and as differences, beside the floors.

    python benchmarks/weight_sync.py                                  # the quickstart's model on vLLM
    python benchmarks/weight_sync.py --shape 135m --engine hf --dtype bfloat16
    python benchmarks/weight_sync.py --pulls 0 --clean 200            # weights moved randomly, the largest gap

A real engine with random weights, and groups of 8 in flight. Before each pull every weight moves by about the learning
rate in float32, as a step of Adam does. Each row is a median over pulls; CPU seconds are those of all processes, what
the groups in flight cost included, and hold on a busy machine too.

    publish   put and commit, in the trainer's publishing thread         pause   load, while nothing is generated
    ahead     fetch and check, while the engine generates                after   read back and canary
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from leeway.collector.engine import EngineSettings, start_engine
from leeway.collector.weight_sync import WeightSync
from leeway.config.transports import TRANSPORTS
from leeway.transports.delta import Delta
from leeway.transports.object_store import ObjectStore
from leeway.transports.transport import TransportSettings, open_transport
from leeway.weights import Canary, CanaryPrompts, Manifest, Publication, Tolerance, checksum_of, digest_of, plan_buckets

SHAPES = {
    "quickstart": dict(
        vocab_size=256, hidden_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=512,
    ),
    "135m": dict(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536,
    ),
    "0.5b": dict(
        vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864,
    ),
}  # fmt: skip
GROUP_SIZE, PROMPT, RESPONSE = 8, 14, 32


class Model:
    """A model, moved a little in float32 before each publication."""

    def __init__(self, folder: Path, shape: dict[str, int], checksum: Any, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen2",
            **shape,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            initializer_range=0.05,
            eos_token_id=1,
        )
        self.lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._masters = [p.detach().clone() for p in self.lm.parameters()]
        self.lm.to(dtype).save_pretrained(folder)
        self.version, self._checksum = -1, checksum
        self.num_bytes = sum(p.nbytes for p in self.lm.parameters())
        generator = torch.Generator().manual_seed(1)
        draw = lambda n, t: torch.randint(2, 256, (n, t), generator=generator).tolist()  # noqa: E731
        self.prompts = CanaryPrompts(scored=draw(1, 16), cached=draw(1, 40))

    @torch.no_grad()
    def publish(self, transport: Any, scale: float) -> tuple[Publication, float]:
        """A version, and the CPU seconds that the transport took for it."""
        self.version += 1
        for parameter, master in zip(self.lm.parameters(), self._masters, strict=True):
            master.add_(torch.randn_like(master), alpha=scale)
            parameter.copy_(master)
        parameters = dict(self.lm.named_parameters())
        tied = {"model.embed_tokens.weight": ["lm_head.weight"]}
        entries, sizes, outgoing, spent_s = [], [], transport.begin(self.version), 0.0
        for plan in plan_buckets((([n, *tied.get(n, [])], p.dtype, p.shape) for n, p in parameters.items()), 1 << 28):
            memory = plan.empty()
            for span in plan.spans:
                span.tensor(memory).copy_(parameters[span.names[0]])
            entries += plan.entries(checksum_of(span.data(memory).numpy(), self._checksum) for span in plan.spans)
            sizes.append(memory.nbytes)
            started = time.process_time()
            outgoing.put(memory.numpy())
            spent_s += time.process_time() - started
        scored = [
            self._logits(s)[:-1].gather(-1, torch.tensor(s)[1:, None])[:, 0].tolist() for s in self.prompts.scored
        ]
        best = [self._logits(s)[-1].max(-1) for s in self.prompts.cached]
        canary = Canary(self.prompts, scored, [int(b.indices) for b in best], [float(b.values) for b in best])
        manifest = Manifest(self.version, entries, sizes, canary, digest_of(entries), self._checksum)
        started = time.process_time()
        publication = outgoing.commit(manifest)
        return publication, spent_s + time.process_time() - started

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        return self.lm(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


class Pulled(NamedTuple):
    """CPU seconds, and those of the clock."""

    publish_cpu: float
    ahead_cpu: float
    pause_cpu: float
    after_cpu: float
    ahead: float
    pause: float
    after: float
    fetched_bytes: float
    gap: float


class Bench:
    def __init__(self, engine: Any, model: Model, transport: Any, scale: float, tolerance: float) -> None:
        self.engine, self.model, self.transport, self._scale = engine, model, transport, scale
        self._paused_at = self._resumed_at = 0.0
        self.sync = WeightSync(
            engine,
            self._nothing,
            transport,
            in_flight="recompute",
            tolerance=Tolerance(tolerance),
            pull_every=1,
            deadline_s=300,
            paused=self._paused,
            on_quarantine=self._nothing,
            max_failures=0,
        )

    async def group(self) -> None:
        prompt = torch.randint(2, 256, (PROMPT,)).tolist()
        await self.engine.generate(prompt, n=GROUP_SIZE, temperature=1.0, max_tokens=RESPONSE, stop_token_ids=[])

    async def pull(self, scale: float | None = None) -> Pulled:
        sync, (publication, publish_s) = (
            self.sync,
            self.model.publish(self.transport, self._scale if scale is None else scale),
        )
        started, begun = time.monotonic(), cpu_s()
        staged, fetched_bytes = await sync._staged(publication)
        await sync._load_and_verify(staged, time.monotonic() - started, fetched_bytes)
        after = cpu_s()
        if self.transport.uses_held:
            sync._hold(staged)
        else:
            staged.release()
        (r,) = sync.drain_reports()
        cpu = publish_s, self._paused_at - begun, self._resumed_at - self._paused_at, after - self._resumed_at
        return Pulled(*cpu, r.ahead_s, r.pause_s, r.proof_s, fetched_bytes, r.served_gap.largest)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._paused_at = cpu_s()
        yield
        self._resumed_at = cpu_s()

    async def _nothing(self, *_: Any) -> None: ...

    async def row(self, name: str, pulls: int, in_flight: int) -> None:
        await self.pull()
        rows = await self._pulls(in_flight, pulls)
        medians = [statistics.median(row[i] for row in rows) for i in range(len(Pulled._fields) - 1)]
        num_gb = self.model.num_bytes / 1e9
        seconds = " ".join(f"{m / num_gb:11.3f}" for m in medians[:-1])
        print(f"{name:<32} {in_flight:>9} {seconds} {medians[-1] / self.model.num_bytes:9.1%}", flush=True)

    async def _pulls(self, in_flight: int, pulls: int) -> list[Pulled]:
        stop = asyncio.Event()

        async def keep_busy() -> None:
            while not stop.is_set():
                await self.group()

        busy = [asyncio.create_task(keep_busy()) for _ in range(in_flight)]
        rows = []
        for _ in range(pulls):
            await asyncio.sleep(0.2)
            rows.append(await self.pull())
        stop.set()
        await asyncio.gather(*busy)
        return rows

    async def clean(self, pulls: int) -> None:
        """Weight changes from none at all to large; any false alarm raises."""
        gaps = [(await self.pull(scale=(0.0, 1e-6, 1e-4, 1e-3)[i % 4])).gap for i in range(pulls)]
        print(f"{pulls} clean pulls, no alarm; largest gap {max(gaps):.2e} nats")


def cpu_s() -> float:
    """CPU seconds so far of this process and the engine's."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(p.cpu_times()[:2]) for p in processes)


async def run(args: argparse.Namespace, folder: Path) -> None:
    dtype = getattr(torch, args.dtype)
    model = Model(folder / "model", SHAPES[args.shape], args.checksum, dtype)
    print(f"{model.num_bytes / 1e9:.3f} GB in {args.dtype}, every weight moved by about {args.lr:g}; seconds per GB")
    for name, seconds in floors(folder, min(model.num_bytes, 1 << 28)).items():
        print(f"{name:<32} {seconds:11.3f}")
    names = [name.replace("_cpu", " CPU") for name in Pulled._fields[:-2]]
    print(f"{'transport':<32} {'in flight':>9} " + " ".join(f"{name:>11}" for name in names) + f" {'fetched':>9}")
    for num_ranks in args.engine_ranks:
        await table(args, folder, model, num_ranks)


async def table(args: argparse.Namespace, folder: Path, model: Model, num_ranks: int) -> None:
    options: dict[str, Any] = {"max_num_seqs": 256}
    if args.engine == "vllm":
        options |= {"enforce_eager": True, "block_size": 32, "tensor_parallel_size": num_ranks}
    settings = EngineSettings(
        name=args.engine,
        model_path=str(folder / "model"),
        dtype=args.dtype,
        device="cpu",
        max_model_len=128,
        seed=0,
        options=options,
        cores=list(range(num_ranks)),  # one a rank, as in the quickstart
        kv_cache_gib=1.0,
    )
    engine, tolerance = await start_engine(settings), 1e-3 if args.dtype == "float32" else 0.3
    try:
        for name in args.transport:
            for delta in args.delta if name != "ipc" else [0]:  # where nothing travels
                transport = opened(name, folder / f"{name}-{delta}-{num_ranks}", delta)
                bench = Bench(engine, model, transport, args.lr, tolerance)
                title = name + " + delta" * delta + (f", {num_ranks} ranks" if num_ranks > 1 else "")
                for in_flight in args.in_flight if args.pulls else []:
                    await bench.row(title, args.pulls, in_flight)
                if args.clean:
                    await bench.clean(args.clean)
                bench.sync._hold(None)
                transport.close()
    finally:
        engine.shutdown()


def opened(name: str, folder: Path, delta: bool) -> Any:
    if name != "object_store":
        return open_transport(TransportSettings(name=name, folder=folder, delta=delta))
    transport = ObjectStore(np.copy, _itself)  # within this process: Ray's own copy is not in these numbers
    return Delta(transport) if delta else transport


def floors(folder: Path, num_bytes: int) -> dict[str, float]:
    """CPU seconds per GB of what nothing can be faster than; of the disk, seconds of the clock."""
    memory, into, path = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8), folder / "floor"

    def written() -> None:
        with path.open("wb") as file:
            file.write(memory.data)
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.readinto(into.data)

    def sent() -> None:
        one, other = socket.socketpair()
        sending = threading.Thread(target=one.sendall, args=(memory.data,))
        sending.start()
        filled = 0
        while filled < num_bytes:
            filled += other.recv_into(memoryview(into.data)[filled:])
        sending.join()
        one.close()
        other.close()

    timed: dict[str, tuple[Callable[[], Any], Callable[[], float]]] = {
        "memcpy, CPU": (lambda: np.copyto(into, memory), time.process_time),
        "xxh3_128, CPU": (lambda: checksum_of(memory, "xxh3_128"), time.process_time),
        "local socket, both ends, CPU": (sent, time.process_time),
        "disk, write and fsync": (written, time.monotonic),
        "disk, read": (read, time.monotonic),
    }
    found = {}
    for name, (work, clock) in timed.items():
        seconds = []
        for _ in range(3):
            started = clock()
            work()
            seconds.append(clock() - started)
        found[name] = min(seconds) / num_bytes * 1e9
    path.unlink()
    return found


async def _itself(bucket: np.ndarray) -> np.ndarray:
    return bucket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--engine-ranks", type=int, nargs="*", default=[1], help="tensor parallel, of vLLM")
    parser.add_argument("--transport", nargs="*", default=list(TRANSPORTS))
    parser.add_argument("--delta", type=int, nargs="*", default=[0, 1], help="0: whole versions, 1: differences")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lr", type=float, default=1e-6, help="by how much a weight moves")
    parser.add_argument("--checksum", choices=["xxh3_128", "sha256"], default="xxh3_128")
    parser.add_argument("--pulls", type=int, default=9)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[0], help="groups in flight")
    parser.add_argument("--clean", type=int, default=0, help="then so many pulls with every check: none may fail")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(args, Path(folder)))


if __name__ == "__main__":
    main()
