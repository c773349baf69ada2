"""Seconds of a weight sync by phase (ahead, pause, after), beside those of a plain copy of the same bytes.

    python benchmarks/weight_sync.py                                  # the quickstart's model
    python benchmarks/weight_sync.py --shape 135m --engine hf --transport files
    python benchmarks/weight_sync.py --pulls 0 --clean 200            # weights moved randomly, the largest gap

A real engine with random weights and groups of 8 in flight all the time. Each row is a median over pulls; CPU seconds
are those of both processes, what the groups in flight cost included, and hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from leeway.collector.engine import EngineSettings, start_engine
from leeway.collector.weight_sync import WeightSync
from leeway.transports.object_store import ObjectStore
from leeway.transports.transport import TransportSettings, open_transport
from leeway.weights import Canary, CanaryPrompts, Manifest, Publication, checksum_of, digest_of, plan_buckets

SHAPES = {
    "quickstart": dict(
        vocab_size=256, hidden_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=512,
    ),
    "135m": dict(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536,
    ),
}  # fmt: skip
GROUP_SIZE, PROMPT, RESPONSE = 8, 14, 32


class Model:
    """A model in float32, moved a little before each publication."""

    def __init__(self, folder: Path, shape: dict[str, int], checksum: Any) -> None:
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
        self.lm.save_pretrained(folder)
        self.version, self._checksum = -1, checksum
        generator = torch.Generator().manual_seed(1)
        draw = lambda n, t: torch.randint(2, 256, (n, t), generator=generator).tolist()  # noqa: E731
        self.prompts = CanaryPrompts(scored=draw(2, 24), cached=draw(1, 63))

    @torch.no_grad()
    def publish(self, transport: Any, scale: float) -> Publication:
        self.version += 1
        for parameter in self.lm.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
        parameters = dict(self.lm.named_parameters())
        tied = {"model.embed_tokens.weight": ["lm_head.weight"]}
        entries, sizes, outgoing = [], [], transport.begin(self.version)
        for plan in plan_buckets((([n, *tied.get(n, [])], p.dtype, p.shape) for n, p in parameters.items()), 1 << 28):
            memory = plan.empty()
            for span in plan.spans:
                span.tensor(memory).copy_(parameters[span.names[0]])
            entries += plan.entries(checksum_of(span.data(memory).numpy(), self._checksum) for span in plan.spans)
            sizes.append(memory.nbytes)
            outgoing.put(memory.numpy())
        scored = [
            self._logits(s)[:-1].gather(-1, torch.tensor(s)[1:, None])[:, 0].tolist() for s in self.prompts.scored
        ]
        best = [self._logits(s)[-1].max(-1) for s in self.prompts.cached]
        canary = Canary(self.prompts, scored, [int(b.indices) for b in best], [float(b.values) for b in best])
        return outgoing.commit(Manifest(self.version, entries, sizes, canary, digest_of(entries), self._checksum))

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        return self.lm(torch.tensor([tokens])).logits[0].log_softmax(-1)

    def copy_s(self) -> float:
        """A plain copy of all weights into memory that is there."""
        source = [p.detach() for p in self.lm.parameters()]
        target = [torch.zeros_like(p) for p in source]
        started = time.process_time()
        for to, of in zip(target, source, strict=True):
            to.copy_(of)
        return time.process_time() - started


class Pulled(NamedTuple):
    ahead_s: float
    pause_s: float
    proof_s: float
    ahead_cpu_s: float
    pause_cpu_s: float
    proof_cpu_s: float
    gap: float


class Bench:
    def __init__(self, engine: Any, model: Model, transport: Any) -> None:
        self.engine, self.model, self.transport = engine, model, transport
        self._paused_at = self._resumed_at = 0.0

    async def group(self) -> None:
        prompt = torch.randint(2, 256, (PROMPT,)).tolist()
        await self.engine.generate(prompt, n=GROUP_SIZE, temperature=1.0, max_tokens=RESPONSE, stop_token_ids=[])

    async def pull(self, scale: float = 1e-3) -> Pulled:
        publication = self.model.publish(self.transport, scale)
        sync = WeightSync(
            self.engine,
            self._nothing,
            self.transport,
            in_flight="recompute",
            tolerance=1e-3,
            pull_every=1,
            deadline_s=300,
            paused=self._paused,
            on_quarantine=self._nothing,
            max_failures=0,
        )
        started, begun = time.monotonic(), cpu_s()
        staged = await sync._staged(publication)
        await sync._load_and_verify(staged, time.monotonic() - started)
        staged.release()
        (report,) = sync.drain_reports()
        cpu = self._paused_at - begun, self._resumed_at - self._paused_at, cpu_s() - self._resumed_at
        return Pulled(report.ahead_s, report.pause_s, report.proof_s, *cpu, report.served_gap)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._paused_at = cpu_s()
        yield
        self._resumed_at = cpu_s()

    async def _nothing(self, *_: Any) -> None: ...

    async def table(self, pulls: int, in_flight: list[int]) -> None:
        await self.pull()
        copy_s = statistics.median(self.model.copy_s() for _ in range(5))
        num_gb = sum(p.nbytes for p in self.model.lm.parameters()) / 1e9
        print(f"{num_gb:.4f} GB; a plain copy: {copy_s:.4f} s of CPU, {copy_s / num_gb:.3f} s per GB")
        print(f"{'in flight':>9} " + " ".join(f"{name:>12}" for name in Pulled._fields[:-1]))
        for groups in in_flight:
            rows = await self._pulls(groups, pulls)
            medians = [statistics.median(row[i] for row in rows) for i in range(len(Pulled._fields) - 1)]
            print(f"{groups:>9} " + " ".join(f"{m:12.4f}" for m in medians))
            print(f"{'per GB':>9} " + " ".join(f"{m / num_gb:12.3f}" for m in medians), flush=True)

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
    settings = EngineSettings(
        name=args.engine,
        model_path=str(folder / "model"),
        dtype="float32",
        device="cpu",
        max_model_len=128,
        seed=0,
        options={"max_num_seqs": 256} | ({"enforce_eager": True, "block_size": 32} if args.engine == "vllm" else {}),
        cores=[0],  # one, as in the quickstart
        kv_cache_gib=1.0,
    )
    model = Model(folder / "model", SHAPES[args.shape], args.checksum)
    if args.transport == "object_store":  # within this process: Ray's own copy is not in these numbers
        transport: Any = ObjectStore(np.copy, _itself)
    else:
        transport = open_transport(TransportSettings(name=args.transport, folder=folder))
    engine = await start_engine(settings)
    try:
        bench = Bench(engine, model, transport)
        if args.pulls:
            await bench.table(args.pulls, args.in_flight)
        if args.clean:
            await bench.clean(args.clean)
    finally:
        engine.shutdown()


async def _itself(bucket: np.ndarray) -> np.ndarray:
    return bucket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--transport", default="object_store")
    parser.add_argument("--checksum", choices=["xxh3_128", "sha256"], default="xxh3_128")
    parser.add_argument("--pulls", type=int, default=9)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[0, 8], help="groups in flight")
    parser.add_argument("--clean", type=int, default=0, help="then so many pulls with every check: none may fail")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(args, Path(folder)))


if __name__ == "__main__":
    main()
