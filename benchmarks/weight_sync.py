"""What the checks of a weight sync cost: seconds of a pull with and without each of them, beside a training step.

    python benchmarks/weight_sync.py                # the table
    python benchmarks/weight_sync.py --pulls 0 --clean 200    # 200 pulls of randomly moved weights, the largest gap

A real engine with the quickstart's model and 0, 48 or 480 groups of 8 in flight all the time, each variant in turn and
interleaved. Seconds of CPU time are those of both processes. The step is generation of 48 groups and one forward,
backward and optimizer step on them, each measured alone in CPU seconds; the share is of the larger of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from leeway.weights import Canary, CanaryPrompts, Manifest, digest_of, plan_buckets, sha256_of

VOCABULARY = 256
GROUPS, GROUP_SIZE, PROMPT, RESPONSE = 48, 8, 14, 8
VARIANTS = ["all", "no digest", "no coverage", "no read-back", "no canary", "none"]


class Model:
    """The quickstart's model in float32, moved a little before each publication."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen2",
            vocab_size=VOCABULARY,
            hidden_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=512,
            tie_word_embeddings=True,
            max_position_embeddings=256,
            initializer_range=0.05,
            eos_token_id=1,
        )
        self.lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.lm.save_pretrained(folder)
        self.version = -1
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        draw = lambda n, t: torch.randint(2, VOCABULARY, (n, t), generator=generator).tolist()  # noqa: E731
        self.prompts = CanaryPrompts(scored=draw(2, 24), cached=draw(1, 63))

    @torch.no_grad()
    def publication(self, scale: float = 1e-3) -> tuple[Manifest, list[np.ndarray]]:
        self.version += 1
        for parameter in self.lm.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
        parameters = dict(self.lm.named_parameters())
        tied = {"model.embed_tokens.weight": ["lm_head.weight"]}
        entries, buckets = [], []
        for plan in plan_buckets((([n, *tied.get(n, [])], p.dtype, p.shape) for n, p in parameters.items()), 1 << 28):
            memory = plan.empty()
            for span in plan.spans:
                span.tensor(memory).copy_(parameters[span.names[0]])
            entries += plan.entries(sha256_of(span.data(memory)) for span in plan.spans)
            buckets.append(memory)
        scored = [
            self._logits(s)[:-1].gather(-1, torch.tensor(s)[1:, None])[:, 0].tolist() for s in self.prompts.scored
        ]
        best = [self._logits(s)[-1].max(-1) for s in self.prompts.cached]
        canary = Canary(self.prompts, scored, [int(b.indices) for b in best], [float(b.values) for b in best])
        manifest = Manifest(self.version, entries, len(buckets), 0, canary, digest_of(entries))
        return manifest, [b.numpy() for b in buckets]

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        return self.lm(torch.tensor([tokens])).logits[0].log_softmax(-1)

    def train_step(self) -> float:
        """CPU seconds of one forward, backward and optimizer step on 48 groups."""
        tokens = torch.randint(2, VOCABULARY, (GROUPS * GROUP_SIZE, PROMPT + RESPONSE))
        started = time.process_time()
        logprobs = self.lm(tokens).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        (-logprobs.gather(-1, tokens[:, PROMPT:, None]).mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - started


class Pulled(NamedTuple):
    whole_s: float
    pause_s: float
    cpu_s: float
    gap: float


class Bench:
    def __init__(self, folder: Path) -> None:
        from leeway.collector.engine import EngineSettings
        from leeway.engines import vllm_worker_env
        from leeway.engines.vllm_engine import VllmEngine

        here = str(Path(__file__).resolve().parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *sys.path])
        sys.path.insert(0, here)
        vllm_worker_env.WORKER_EXTENSION = "engine_switches.Switches"
        self.model = Model(folder)
        self.engine = VllmEngine(
            EngineSettings(
                model_path=str(folder),
                dtype="float32",
                device="cpu",
                max_model_len=64,
                seed=0,
                options={"enforce_eager": True, "block_size": 32, "max_num_seqs": 256},
                cores=[0],  # one, as in the quickstart
                kv_cache_gib=1.0,
            )
        )

    async def group(self) -> None:
        prompt = torch.randint(2, VOCABULARY, (PROMPT,)).tolist()
        await self.engine.generate(prompt, n=GROUP_SIZE, temperature=1.0, max_tokens=RESPONSE, stop_token_ids=[])

    async def pull(self, variant: str, scale: float = 1e-3) -> Pulled:
        """One pull; tokens of the new version are withheld until its end."""
        await self.engine._llm.collective_rpc("only", args=(variant,))
        manifest, buckets = self.model.publication(scale)

        async def stream() -> AsyncIterator[np.ndarray]:
            for bucket in buckets:
                yield bucket

        started, cpu = time.monotonic(), self.cpu_s()
        manifest.check()
        times = await self.engine.load_weights(manifest, stream(), in_flight="recompute")
        gap = 0.0
        if variant not in ("no canary", "none"):
            gap = (await self.engine.score(manifest.canary)).largest
            assert gap <= 1e-4, f"false alarm at version {manifest.policy_version}: {gap}"
        return Pulled(time.monotonic() - started, times.pause_s, self.cpu_s() - cpu, gap)

    def cpu_s(self) -> float:
        """CPU seconds so far of this process and the engine's."""
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(sum(p.cpu_times()[:2]) for p in processes)

    async def run(self, pulls: int, in_flight: list[int], clean: int) -> None:
        if pulls:
            await self.table(pulls, in_flight)
        if clean:
            await self.clean(clean)

    async def table(self, pulls: int, in_flight: list[int]) -> None:
        await self.pull("all")
        await asyncio.gather(*(self.group() for _ in range(GROUPS)))
        generation = await self._median_s(lambda: asyncio.gather(*(self.group() for _ in range(GROUPS))))
        training = statistics.median(self.model.train_step() for _ in range(5))
        step = max(generation, training)
        print(f"step: generation {generation:.3f} s, training {training:.3f} s of CPU; {os.cpu_count()} cores")
        print(f"{'in flight':>9} {'checks':>13} {'pull s':>7} {'pause s':>8} {'CPU s':>6} {'above none / step':>18}")
        for groups in in_flight:
            rows = await self._variants(groups, pulls)
            none = statistics.median(row.cpu_s for row in rows["none"])
            for variant, pulled in rows.items():
                whole, pause = (statistics.median(getattr(r, n) for r in pulled) for n in ("whole_s", "pause_s"))
                cpu = statistics.median(row.cpu_s for row in pulled)
                # Of CPU time, which others on this machine do not stretch; with groups in flight it holds their work.
                share = f"{(cpu - none) / step:.1%}" if not groups else ""
                print(f"{groups:>9} {variant:>13} {whole:7.3f} {pause:8.3f} {cpu:6.3f} {share:>18}")

    async def _variants(self, in_flight: int, pulls: int) -> dict[str, list[Pulled]]:
        stop = asyncio.Event()

        async def keep_busy() -> None:
            while not stop.is_set():
                await self.group()

        busy = [asyncio.create_task(keep_busy()) for _ in range(in_flight)]
        rows: dict[str, list[Pulled]] = {variant: [] for variant in VARIANTS}
        for i in range(pulls):
            first = i % len(VARIANTS)  # so that no variant always follows the same one
            for variant in VARIANTS[first:] + VARIANTS[:first]:
                await asyncio.sleep(0.2)
                rows[variant].append(await self.pull(variant))
        stop.set()
        await asyncio.gather(*busy)
        return rows

    async def _median_s(self, call: Any) -> float:
        seconds = []
        for _ in range(5):
            started = self.cpu_s()
            await call()
            seconds.append(self.cpu_s() - started)
        return statistics.median(seconds)

    async def clean(self, pulls: int) -> None:
        """Weight changes from none at all to large; any false alarm raises."""
        worst = 0.0
        for i in range(pulls):
            worst = max(worst, (await self.pull("all", scale=(0.0, 1e-6, 1e-4, 1e-3)[i % 4])).gap)
        print(f"{pulls} clean pulls, no alarm; largest gap {worst:.2e} nats (tolerance 1e-4)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pulls", type=int, default=9, help="pulls per variant")
    parser.add_argument("--in-flight", type=int, nargs="*", default=[0, GROUPS, 10 * GROUPS], help="groups in flight")
    parser.add_argument("--clean", type=int, default=0, help="then so many pulls with every check: none may fail")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            asyncio.run(bench.run(args.pulls, args.in_flight, args.clean))
        finally:
            bench.engine.shutdown()


if __name__ == "__main__":
    main()
