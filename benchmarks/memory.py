"""What a plan counts for a process of a run, and what a real one holds at its peak, on random weights.

    python benchmarks/memory.py --shape medium --part trainer
    python benchmarks/memory.py --shape 135m --part trainer -- model.dtype=bfloat16

A trainer rank (alone) makes two steps of one full microbatch and publishes; an engine (hf) fills its cache of keys and
values while it loads a version. Each is a process; its memory is resident memory above what it has with everything
imported. Prints one line of JSON each: MiB measured, counted, and counted by part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from publish import release_memory, resident_mb
from trainer import SHAPES, Batch

PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--part", nargs="+", choices=("trainer", "engine"), default=["trainer", "engine"])
    parser.add_argument("--length", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    # The C library keeps freed blocks for itself otherwise: they would be counted.
    os.environ |= {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": f"{2**20}", "MALLOC_MMAP_THRESHOLD_": f"{2**20}"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")  # read when a process starts
    with tempfile.TemporaryDirectory() as folder:
        make_model(args.shape, args.length, folder)
        for part in args.part:
            process = context.Process(target=measure, args=(args.shape, args.length, folder, part, args.settings))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)


def make_model(shape: str, length: int, folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", max_position_embeddings=max(64, length), **SHAPES[shape])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measure(shape: str, length: int, folder: str, part: str, settings: list[str]) -> None:
    from leeway.config import plan_run
    from leeway.driver.memory import processes_of
    from leeway.driver.models import shape_of

    given = ["cluster.device=cpu", "rollout.engine.name=hf", f"model.path={folder}", "model.init=null"]
    given += [f"rollout.max_model_len={length}", "train.max_tokens_per_microbatch=1024", "cluster.kv_cache_gib=0.125"]
    stage = plan_run("quickstart", "async_rl", [*given, *settings])[-1]
    model = shape_of({"model_type": "qwen2"} | SHAPES[shape])
    assert model is not None
    counted = {p.name.split()[0]: p for p in processes_of(stage.config, stage.recipe, model)}[part]
    measured = (trainer_mb if part == "trainer" else engine_mb)(stage, SHAPES[shape]["vocab_size"])
    by_part = {name: round(size / 2**20, 1) for name, size in (counted.device | counted.main).items()}
    row = {"part": part, "shape": shape, "settings": settings, "measured_mb": round(measured, 1)}
    print(json.dumps(row | {"counted_mb": round(sum(by_part.values()), 1), "counted": by_part}), flush=True)


def trainer_mb(stage: Any, vocab_size: int) -> float:
    import torch

    from leeway.runtime.launch import trainer_settings
    from leeway.trainer.trainer import Trainer
    from leeway.weights import CanaryPrompts

    config, length = stage.config, stage.config.rollout.max_model_len
    prompts = CanaryPrompts(scored=[list(range(24))], cached=[list(range(64))])
    settings = trainer_settings(config, stage.recipe, total_steps=10, canary=prompts, cores=[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    before = release_memory()
    trainer = Trainer(settings, rank=0, init_method=address, transport=Nowhere())  # type: ignore[arg-type]
    num, response = config.train.microbatch_tokens("cpu") // length, length - PROMPT
    for step in range(2):
        tokens = torch.randint(0, vocab_size, (num * length,))
        batch = Batch(
            prompt_tokens=tokens[: num * PROMPT],
            prompt_lengths=torch.full((num,), PROMPT),
            response_tokens=tokens[num * PROMPT :],
            response_lengths=torch.full((num,), response),
            loss_mask=torch.ones(num * response, dtype=torch.bool),
            behavior_logprobs=-torch.rand(num * response) - 4,
            policy_versions=torch.full((num * response,), step),
            advantages=torch.randn(num * response),
            temperatures=torch.ones(num),
            num_sequences=torch.tensor(num),
            num_tokens=torch.tensor(num * response),
        )
        trainer.forward_backward(batch)  # type: ignore[arg-type]
        trainer.optim_step()
        trainer.begin_publish()
        trainer.score_canary()
        trainer.claim_publication().result()
    peak = resident_mb("VmHWM") - before
    trainer.close()
    return peak


class Nowhere:
    """A transport that keeps nothing: where versions wait is counted elsewhere."""

    keep, memory_bytes = 1, 0

    def begin(self, policy_version: int) -> Nowhere:
        return self

    def put(self, bucket: Any) -> None: ...

    def commit(self, manifest: Any) -> Any:
        return manifest

    def discard(self) -> None: ...


def engine_mb(stage: Any, vocab_size: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401  # imported before memory is looked at

    from leeway.engines.hf_engine import HfEngine
    from leeway.runtime.launch import engine_settings
    from leeway.weights import Canary, CanaryPrompts, Manifest, checksum_of, digest_of, plan_buckets

    config = stage.config
    before = release_memory()
    engine = HfEngine(engine_settings(config, cores=[], initial_version=0))

    async def work() -> None:
        length = config.rollout.max_model_len
        generating = [
            asyncio.create_task(
                engine.generate([2 + i], n=8, temperature=1.0, max_tokens=length - 1, stop_token_ids=[])
            )
            for i in range(max(1, engine.cache_tokens // length // 8))
        ]
        while not engine._running:
            await asyncio.sleep(0.05)
        tensors = engine._tensors.tensors
        plans = plan_buckets((([n], t.dtype, t.shape) for n, t in tensors.items()), 1 << 40)
        sizes = [plan.num_bytes for plan in plans]
        staged = engine.stage(Manifest(1, [], sizes, Canary(CanaryPrompts([], []), [], [], []), ""))
        entries = []
        for plan, bucket in zip(plans, staged.buckets, strict=True):
            memory = plan.lay_out(torch.from_numpy(bucket))
            for span in plan.spans:
                span.tensor(memory).copy_(tensors[span.names[0]])
            entries += plan.entries(checksum_of(span.data(memory).numpy(), "xxh3_128") for span in plan.spans)
        staged.manifest.entries.extend(entries)
        object.__setattr__(staged.manifest, "digest", digest_of(entries))
        await asyncio.gather(*generating)
        await engine.load_weights(staged, in_flight="recompute")
        await engine.read_back(staged)

    asyncio.run(work())
    peak = resident_mb("VmHWM") - before
    engine.shutdown()
    return peak


if __name__ == "__main__":
    main()
