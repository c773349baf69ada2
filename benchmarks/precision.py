"""How far engine and trainer differ by compute type, and how small a fault the canary still sees.

    python benchmarks/precision.py                                     # the quickstart's shape, engine hf
    python benchmarks/precision.py --model ../smollm2 --engine vllm    # a model from a folder
    python benchmarks/precision.py --loads 20 --faults                 # what a tolerance is made of

A trainer of one rank publishes random or given weights, an engine loads them by the usual path, and both score the same
sequences. Gaps are |engine - trainer| in nats. `--loads`: first the same version so many times, then so many versions
moved by `--lr`. `--faults`: the smallest of each kind whose gap is above a tolerance.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from weight_sync import SHAPES

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.objective import PolicyObjective
from leeway.collector.engine import EngineSettings, start_engine
from leeway.config.flow import ParamServerConfig
from leeway.config.inputs import ModelConfig
from leeway.config.learning import CheckpointConfig, OptimizerConfig, TrainConfig
from leeway.config.running import ClusterConfig
from leeway.trainer.settings import TrainerSettings
from leeway.trainer.sharding import reshard
from leeway.trainer.trainer import Trainer
from leeway.weights import CanaryPrompts, Publication

COMPUTED = [
    ("float32", None),
    ("bfloat16", None),
    ("bfloat16", "float32"),
    ("float16", None),
    ("float16", "float32"),
]


def make_model(folder: Path, shape: dict[str, int], init_std: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=init_std,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def sequences(folder: Path, vocab_size: int) -> CanaryPrompts:
    """Text, where the model has a tokenizer; else random tokens."""
    if (folder / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(folder)(Path(__file__).with_name("chaos.py").read_text())["input_ids"]
    else:
        tokens = torch.randint(2, vocab_size, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    return CanaryPrompts(
        scored=[tokens[i * 64 : i * 64 + 48] for i in range(4)], cached=[tokens[300:460], tokens[500:660]]
    )


def trainer_of(folder: Path, prompts: CanaryPrompts, dtype: str, head_dtype: str | None) -> Trainer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    settings = TrainerSettings(
        model=ModelConfig(path=str(folder)).model_copy(update={"dtype": dtype, "head_dtype": head_dtype}),
        optimizer=OptimizerConfig(),
        train=TrainConfig(),
        checkpoint=CheckpointConfig(),
        param_server=ParamServerConfig(),
        cluster=ClusterConfig(device="cpu"),
        objective=PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="seq_mean_token_mean"),
        canary=prompts,
        total_steps=1,
        max_policy_lag=0,
        max_length=256,
        num_threads=1,
        seed=0,
    )
    return Trainer(settings, rank=0, init_method=address)


@torch.no_grad()
def moved(trainer: Trainer, scale: float) -> None:
    reshard(trainer._model)
    for parameter in trainer._model.parameters():
        local = parameter.to_local()  # type: ignore[attr-defined]
        local.add_(torch.randn_like(local), alpha=scale)


def published(trainer: Trainer) -> Publication:
    trainer.publish()
    return trainer.publication()


async def loaded(engine: Any, publication: Publication, change: Any = None) -> list[float]:
    """The gap of each token, by both routes, after the load of a publication or of a changed copy of it."""
    manifest = publication.manifest
    staged = engine.stage(manifest)
    for bucket, source in zip(staged.buckets, publication.bucket_refs, strict=True):
        bucket[:] = source
    if change is not None:
        change(staged)
    await engine.load_weights(staged, in_flight="recompute")
    canary, gaps = manifest.canary, []
    if hasattr(engine, "_decoder"):
        scored = await engine._call(lambda: engine._decoder.beside().score(canary.prompts.scored))
    else:
        scored = []
        for sequence in canary.prompts.scored:
            params = engine._params(max_tokens=1, temperature=1.0, prompt_logprobs=0)
            got = (await engine._final_output(sequence, params)).prompt_logprobs
            scored.append([got[t][sequence[t]].logprob for t in range(1, len(sequence))])
    for got, want in zip(scored, canary.logprobs, strict=True):
        gaps += [abs(a - b) for a, b in zip(got, want, strict=True)]
    gap = await engine.score(canary)
    staged.release()
    return [*gaps, gap.cached]


def tensor_of(staged: Any, name: str) -> torch.Tensor:
    [entry] = [e for e in staged.manifest.entries if e.name == name]
    data = torch.from_numpy(staged.buckets[entry.bucket])[entry.offset : entry.offset + entry.num_bytes]
    return data.view(getattr(torch, entry.dtype)).view(entry.shape)


def faults(manifest: Any) -> dict[str, list[Any]]:
    """Kinds of faults, each from the largest to the smallest."""
    layers = sum(e.name.endswith("mlp.down_proj.weight") for e in manifest.entries)
    middle = f"model.layers.{layers // 2}.mlp.down_proj.weight"

    def flip(bit: int) -> Any:
        def change(staged: Any) -> None:
            tensor = tensor_of(staged, middle)
            wide = tensor.dtype.itemsize == 4
            words = tensor.view(torch.int32 if wide else torch.int16).view(-1).numpy()
            words[words.size // 3] ^= np.array(1 << bit, words.dtype.str.replace("i", "u")).view(words.dtype)

        return change

    def scale(share: float) -> Any:
        return lambda staged: tensor_of(staged, middle).mul_(1 + share)

    def swap(rows: int) -> Any:
        def change(staged: Any) -> None:
            tensor = tensor_of(staged, middle)
            tensor[: 2 * rows] = torch.cat([tensor[rows : 2 * rows], tensor[:rows]])

        return change

    width = next(e for e in manifest.entries if e.name == middle).shape[0]
    wide = next(e for e in manifest.entries if e.name == middle).dtype == "float32"

    def exchanged(staged: Any) -> None:
        gate, up = (tensor_of(staged, middle.replace("down", name)) for name in ("gate", "up"))
        held = gate.clone()
        gate.copy_(up)
        up.copy_(held)

    return {
        "tensors exchanged": [("gate and up", exchanged)],
        "bit of one weight": [(f"bit {b}", flip(b)) for b in range(30 if wide else 14, 20 if wide else 5, -1)],
        "matrix scaled": [(f"by 1 + {s:g}", scale(s)) for s in (1, 0.3, 0.1, 0.03, 0.01, 0.003)],
        "rows exchanged": [
            (f"2 x {r} of {width}", swap(r)) for r in sorted({width >> k for k in (1, 3, 5, 7, 9)} - {0}, reverse=True)
        ],
    }


def in_words(gaps: list[float]) -> str:
    return f"mean {statistics.fmean(gaps):.2e}  max {max(gaps):.2e}"


async def measured(args: argparse.Namespace, folder: Path, dtype: str, head: str | None) -> None:
    prompts = sequences(folder, 256)
    trainer = trainer_of(folder, prompts, dtype, head)
    options: dict[str, Any] = {"max_num_seqs": 64}
    if args.engine == "vllm":
        options |= {"enforce_eager": True}
    settings = EngineSettings(
        name=args.engine,
        model_path=str(folder),
        dtype=dtype,
        head_dtype=head,
        device="cpu",
        max_model_len=256,
        seed=0,
        options=options,
        cores=[0],
        kv_cache_gib=1.0,
    )
    engine: Any = await start_engine(settings)
    label = f"{dtype} + {head} head" if head else dtype
    try:
        first = published(trainer)
        gaps = await loaded(engine, first)
        print(f"{label:24} {in_words(gaps)}", flush=True)
        if args.loads:
            again = [max(await loaded(engine, first)) for _ in range(args.loads)]
            print(f"{'':24} same version, {args.loads} loads: max {min(again):.3e} to {max(again):.3e}", flush=True)
            others: list[float] = []
            means: list[float] = []
            for _ in range(args.loads):
                moved(trainer, args.lr)
                trainer.policy_version += 1
                gaps = await loaded(engine, published(trainer))
                others.append(max(gaps))
                means.append(statistics.fmean(gaps))
            print(
                f"{'':24} versions moved by {args.lr:g}: max {min(others):.2e} to {max(others):.2e}, "
                f"mean {min(means):.2e} to {max(means):.2e}",
                flush=True,
            )
        for kind, changes in faults(first.manifest).items() if args.faults else ():
            found = [(name, await loaded(engine, first, change)) for name, change in changes]
            listed = ", ".join(f"{name} {statistics.fmean(gaps):.2g} / {max(gaps):.2g}" for name, gaps in found)
            print(f"{'':24} {kind} (mean / max): {listed}", flush=True)
    finally:
        engine.shutdown()
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--init-std", type=float, default=0.05)
    parser.add_argument("--model", type=Path, help="a folder, instead of random weights")
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--loads", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-4, help="by how much weights move")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="compute types, as in bfloat16 or bfloat16+float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, contextlib.suppress(KeyboardInterrupt):
        folder = args.model or Path(temporary)
        if args.model is None:
            make_model(folder, SHAPES[args.shape], args.init_std)
        for dtype, head in COMPUTED:
            name = f"{dtype}+{head}" if head else dtype
            if not args.only or name in args.only:
                asyncio.run(measured(args, folder, dtype, head))


if __name__ == "__main__":
    main()
