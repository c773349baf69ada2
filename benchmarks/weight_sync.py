"""Seconds per GB of a weight sync by transport and phase, whole and as differences, beside the floors.

    python benchmarks/weight_sync.py                                  # the quickstart's model on vLLM
    python benchmarks/weight_sync.py --shape 135m --dtype bfloat16 --trainer-ranks 1 2 --engine-ranks 1 2 --pulls 3
    python benchmarks/weight_sync.py --pulls 0 --clean 200            # weights moved randomly, the largest gap

Real trainer ranks, each a process, and a real engine, with random weights. Before each pull every weight moves by about
the learning rate in float32, as a step of Adam does. Each row is a median over pulls. Seconds are those of the
processor, of all processes and threads, unless said to be of the clock; what groups in flight cost is included.

    aside     a rank copies its shards, while nothing is trained     pause      load, while nothing is generated
    publish   gather, hash, put and commit, beside the next step     read back  beside generation
    ahead     fetch, check and load, while the engine generates      canary     beside generation
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp

from leeway.collector.engine import EngineSettings, start_engine
from leeway.collector.weight_sync import WeightSync
from leeway.config.transports import TRANSPORTS
from leeway.transports.delta import Delta
from leeway.transports.object_store import ObjectStore
from leeway.transports.transport import TransportSettings, open_transport
from leeway.weights import Canary, CanaryPrompts, Publication, Tolerance, checksum_of

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


def make_model(shape: dict[str, int], folder: Path, dtype: str) -> None:
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
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(getattr(torch, dtype)).save_pretrained(folder)


class Way(NamedTuple):
    """One transport, whole or as differences, between these processes."""

    name: str
    delta: bool
    folder: Path

    def open(self) -> Any:
        if self.name != "object_store":
            return open_transport(TransportSettings(name=self.name, folder=self.folder, delta=self.delta))
        transport = ObjectStore(StoredBucket, read_stored)  # Ray's own work is not in these numbers
        return Delta(transport) if self.delta else transport


class StoredBucket:
    """In shared memory, as Ray's store keeps it, while a reference is held where it was put."""

    def __init__(self, bucket: np.ndarray) -> None:
        descriptor, name = tempfile.mkstemp(dir="/dev/shm", prefix="leeway-bench-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(bucket.data)
        self.path = Path(name)
        weakref.finalize(self, self.path.unlink, missing_ok=True)

    def __reduce__(self) -> tuple[type[Path], tuple[str]]:
        return Path, (str(self.path),)


async def read_stored(path: Path) -> np.ndarray:
    return np.memmap(path, mode="r")


class Switch:
    """The transport of the row at hand, for trainers that were made once."""

    keep, memory_bytes, now = 1, 0, None

    def begin(self, policy_version: int) -> Any:
        assert self.now is not None
        return self.now.begin(policy_version)


class Published(NamedTuple):
    publication: Publication
    aside_cpu: float
    publish_cpu: float


class Trainers:
    """The ranks of one trainer. They publish their weights, moved a little in float32 each time."""

    def __init__(self, num_ranks: int, model: Path, dtype: str, checksum: str, prompts: CanaryPrompts) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.num_ranks = num_ranks
        context = mp.get_context("spawn")
        self._ranks: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            given = (there, rank, num_ranks, str(model), dtype, checksum, prompts, address)
            self._processes.append(context.Process(target=run_rank, args=given, daemon=True))
            self._processes[-1].start()
            self._ranks.append(here)
        (self.num_bytes,) = {rank.recv() for rank in self._ranks}

    def turn_to(self, way: Way | None) -> None:
        self._ask(way)

    def publish(self, scale: float) -> Published:
        of_ranks = self._ask(scale)
        return Published(of_ranks[0].publication, *(sum(r[i] for r in of_ranks) for i in (1, 2)))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join(60)

    def _ask(self, what: Any) -> list[Any]:
        for rank in self._ranks:
            rank.send(what)
        return [rank.recv() for rank in self._ranks]


def run_rank(
    asked: Connection, rank: int, num_ranks: int, model: str, dtype: str, checksum: str, prompts: Any, address: str
) -> None:
    from trainer import settings_of

    from leeway.trainer.canary import score_canary
    from leeway.trainer.sharding import reshard
    from leeway.trainer.shards import local_rows
    from leeway.trainer.trainer import Trainer

    torch.set_num_threads(1)
    given = argparse.Namespace(
        device="cpu",
        dtype=dtype,
        max_tokens=4096,
        gradient_checkpointing=False,
        threads=1,
        compile=False,
        cpu_offload=False,
    )
    settings = settings_of(given, model, "auto")
    settings = replace(
        settings,
        train=settings.train.model_copy(update={"num_ranks": num_ranks}),
        param_server=settings.param_server.model_copy(update={"checksum": checksum}),
        canary=prompts,
    )
    switch = Switch()
    trainer = Trainer(settings, rank=rank, init_method=address, transport=switch)  # type: ignore[arg-type]
    asked.send(sum(plan.num_bytes for plan in trainer._gatherer.plans))
    kept: list[Any] = []
    torch.manual_seed(rank)
    while True:
        wanted = asked.recv()
        if not isinstance(wanted, float):
            kept.clear()
            if switch.now is not None:
                switch.now.close()
            switch.now = wanted.open() if wanted is not None and rank == 0 else None
            asked.send(None)
            continue
        with torch.no_grad():
            reshard(trainer._model)
            for parameter in trainer._model.parameters():
                _, own = local_rows(parameter)
                own.add_(torch.randn_like(own), alpha=wanted)
            canary: Canary = score_canary(trainer._model, prompts, torch.device("cpu"))
            reshard(trainer._model)
        trainer.policy_version += 1
        begun = time.process_time()
        started = time.thread_time()
        trainer.begin_publish()
        aside = time.thread_time() - started
        trainer._publisher.score(lambda scored=canary: scored)
        publication = trainer.claim_publication().result()
        kept = [*kept[-1:], publication]  # what is being fetched stays in the store
        asked.send(Published(publication, aside, time.process_time() - begun - aside))  # type: ignore[arg-type]


class Pulled(NamedTuple):
    """Seconds of processor, and those of the clock."""

    aside_cpu: float
    publish_cpu: float
    ahead_cpu: float
    pause_cpu: float
    pause_clock: float
    read_back_cpu: float
    canary_cpu: float
    fetched_bytes: float
    gap: float


class InTurn:
    """The engine, which is scored when it has been read back: each can be measured by itself then."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._was_read = asyncio.Event()
        self.read_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def read_back(self, staged: Any) -> None:
        try:
            await self._engine.read_back(staged)
        finally:
            self.read_at = cpu_s()
            self._was_read.set()

    async def score(self, canary: Canary) -> Any:
        await self._was_read.wait()
        self._was_read.clear()
        return await self._engine.score(canary)


class Bench:
    def __init__(self, engine: Any, trainers: Trainers, transport: Any, scale: float, tolerance: float) -> None:
        self.engine, self.trainers, self.transport, self._scale = InTurn(engine), trainers, transport, scale
        self._paused_at = self._resumed_at = 0.0
        self.sync = WeightSync(
            self.engine,  # type: ignore[arg-type]
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
        sync = self.sync
        publication, aside_s, publish_s = self.trainers.publish(self._scale if scale is None else scale)
        started, begun = time.monotonic(), cpu_s()
        staged, fetched_bytes = await sync._staged(publication)
        await sync._load_and_verify(staged, time.monotonic() - started, fetched_bytes)
        after = cpu_s()
        if self.transport.uses_held:
            sync._hold(staged)
        else:
            staged.release()
        (r,) = sync.drain_reports()
        read_at = self.engine.read_at
        return Pulled(
            aside_cpu=aside_s,
            publish_cpu=publish_s,
            ahead_cpu=self._paused_at - begun,
            pause_cpu=self._resumed_at - self._paused_at,
            pause_clock=r.pause_s,
            read_back_cpu=read_at - self._resumed_at,
            canary_cpu=after - read_at,
            fetched_bytes=fetched_bytes,
            gap=r.served_gap.largest,
        )

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._paused_at = cpu_s()
        yield
        self._resumed_at = cpu_s()

    async def _nothing(self, *_: Any) -> None: ...

    async def row(self, of_row: list[str], pulls: int, in_flight: int) -> None:
        await self.pull()
        rows = await self._pulls(in_flight, pulls)
        medians = [statistics.median(row[i] for row in rows) for i in range(len(Pulled._fields) - 1)]
        num_bytes = self.trainers.num_bytes
        seconds = [f"{m / num_bytes * 1e9:.3f}" for m in medians[:-1]]
        print_row([*of_row, str(in_flight), *seconds, f"{medians[-1] / num_bytes:.1%}"])

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
    """CPU seconds so far of this process and all that it started, from the kernel's clock of each."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(time.clock_gettime(~p.pid << 3 | 2) for p in processes)


async def run(args: argparse.Namespace, folder: Path) -> None:
    maker = mp.get_context("spawn").Process(target=make_model, args=(SHAPES[args.shape], folder / "model", args.dtype))
    maker.start()
    maker.join()
    generator = torch.Generator().manual_seed(1)
    draw = lambda n, t: torch.randint(2, 256, (n, t), generator=generator).tolist()  # noqa: E731
    prompts = CanaryPrompts(scored=draw(1, 16), cached=draw(1, 40))
    trainers: list[Trainers] = []
    try:
        for num_ranks in args.trainer_ranks:
            trainers.append(Trainers(num_ranks, folder / "model", args.dtype, args.checksum, prompts))
        num_bytes = trainers[0].num_bytes
        print(
            f"{num_bytes / 1e9:.3f} GB in {args.dtype}, every weight moved by about {args.lr:g}, a canary of 56 tokens;"
            " seconds per GB\n"
        )
        found = floors(folder, min(num_bytes, 1 << 28))
        print_row(["floor", "seconds"])
        print_row(["---", "---"])
        for name, seconds in found.items():
            print_row([name, f"{seconds:.3f}"])
        names = [name.removesuffix("_cpu").replace("_", " ") for name in Pulled._fields[:-2]]
        print()
        print_row(["transport", "trainer ranks", "engine ranks", "in flight", *names, "fetched"])
        print_row(["---"] * (len(names) + 5))
        for num_ranks in args.engine_ranks:
            await table(args, folder, trainers, num_ranks)
    finally:
        for ranks in trainers:
            ranks.close()


async def table(args: argparse.Namespace, folder: Path, trainers: list[Trainers], num_ranks: int) -> None:
    options: dict[str, Any] = {"max_num_seqs": 256}
    if args.engine == "vllm":
        options |= {"enforce_eager": True, "tensor_parallel_size": num_ranks}
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
                for ranks in trainers:
                    way = Way(name, bool(delta), folder / f"{name}-{delta}-{num_ranks}-{ranks.num_ranks}")
                    ranks.turn_to(way)
                    transport = way.open()
                    bench = Bench(engine, ranks, transport, args.lr, tolerance)
                    of_row = [name + " + delta" * delta, str(ranks.num_ranks), str(num_ranks)]
                    for in_flight in args.in_flight if args.pulls else []:
                        await bench.row(of_row, args.pulls, in_flight)
                    if args.clean:
                        await bench.clean(args.clean)
                    bench.sync._hold(None)
                    transport.close()
                    ranks.turn_to(None)
    finally:
        engine.shutdown()


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--trainer-ranks", type=int, nargs="*", default=[1])
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
