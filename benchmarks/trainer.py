"""How fast the trainer trains: tokens/s, step time, peak memory and model-FLOPs utilisation (MFU) on random weights.

    python benchmarks/trainer.py --shape quickstart --data groups --packing shared packed padded
    python benchmarks/trainer.py --shape qwen2_5-0.5b --data lognormal --device cuda --dtype bfloat16 --bare

Needs torch and transformers only; run from a checkout. All layouts of one call train on the same batch, and tokens/s
count its prompts and responses as they are, whatever a layout saves. MFU counts the arithmetic of the tokens that a
layout really computes, without padding, against the peak of the device (on a CPU: of a large matrix product).
With `--clock cpu` (one thread only) seconds are those of CPU time, which others on the machine do not stretch.
`--bare` adds a plain PyTorch loop over the same passes: what is left to gain in this trainer's own code.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.algorithms.grpo import PPOClip
from leeway.algorithms.objective import PolicyObjective
from leeway.config.flow import ParamServerConfig
from leeway.config.inputs import ModelConfig
from leeway.config.learning import CheckpointConfig, OptimizerConfig, TrainConfig
from leeway.config.running import ClusterConfig
from leeway.trainer.families import load_model
from leeway.trainer.memory import keep_freed_memory, peak_memory_gib
from leeway.trainer.microbatch import split_into_microbatches
from leeway.trainer.optimizer import make_optimizer
from leeway.trainer.settings import TrainerSettings
from leeway.trainer.trainer import Trainer
from leeway.weights import CanaryPrompts

SHAPES: dict[str, dict[str, Any]] = {
    "quickstart": {"vocab_size": 104, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "small": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "medium": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen2_5-0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2_5-1.5b": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
clock = time.perf_counter
# Dense bfloat16 peaks in FLOP/s, by part of the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12}


@dataclass
class Batch:
    """The fields of `types.TrainBatch`, without tensordict."""

    prompt_tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    response_tokens: torch.Tensor
    response_lengths: torch.Tensor
    loss_mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    policy_versions: torch.Tensor
    advantages: torch.Tensor
    temperatures: torch.Tensor
    num_sequences: torch.Tensor
    num_tokens: torch.Tensor
    prompt_tensors: None = None
    token_tensors: None = None


def make_batch(data: str, vocab_size: int, *, num_groups: int, group_size: int, median: int, seed: int = 0) -> Batch:
    """`groups`: prompts of 14-18 tokens, responses of 3-5. `tails`: the same prompts, responses of geometric length,
    half of which are cut at 4 `median` tokens. `lognormal`: each sequence has a short prompt of its own and a response
    of `median` tokens times exp(N(0, 1))."""
    rng = random.Random(seed)
    prompts, responses = [], []
    for _ in range(num_groups):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(14, 18))]
        for _ in range(group_size):
            own = [rng.randrange(vocab_size) for _ in range(16)] if data == "lognormal" else prompt
            if data == "lognormal":
                length = int(median * rng.lognormvariate(0, 1)) + 1
            elif data == "tails":
                length = min(4 * median, int(rng.expovariate(math.log(2) / (4 * median))) + 1)
            else:
                length = rng.randint(3, 5)
            prompts.append(own)
            responses.append([rng.randrange(vocab_size) for _ in range(length)])
    flat = torch.tensor([t for r in responses for t in r])
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(r) for r in responses])
    return Batch(
        prompt_tokens=torch.tensor([t for p in prompts for t in p]),
        prompt_lengths=torch.tensor([len(p) for p in prompts]),
        response_tokens=flat,
        response_lengths=lengths,
        loss_mask=torch.ones(len(flat), dtype=torch.bool),
        behavior_logprobs=-torch.rand(len(flat), generator=generator) - 4,
        policy_versions=torch.zeros(len(flat), dtype=torch.int64),
        advantages=torch.repeat_interleave(torch.randn(len(responses), generator=generator), lengths),
        temperatures=torch.ones(len(responses)),
        num_sequences=torch.tensor(len(responses)),
        num_tokens=torch.tensor(len(flat)),
    )


def settings_of(args: argparse.Namespace, path: str, packing: str) -> TrainerSettings:
    return TrainerSettings(
        model=ModelConfig(path=path, dtype=args.dtype, attn="sdpa"),
        optimizer=OptimizerConfig(),
        train=TrainConfig(
            max_tokens_per_microbatch=args.max_tokens,
            gradient_checkpointing=args.gradient_checkpointing,
            compile=args.compile,
            cpu_offload=args.cpu_offload,
        ).model_copy(update={"packing": packing}),
        checkpoint=CheckpointConfig(),
        param_server=ParamServerConfig(),
        cluster=ClusterConfig(device=args.device),
        objective=PolicyObjective(policy_loss=PPOClip(clip_low=0.2, clip_high=0.28), aggregation="token_mean"),
        canary=CanaryPrompts(scored=[[0, 1]], cached=[[0, 1]]),
        total_steps=100,
        max_policy_lag=10**9,
        num_threads=args.threads,
        seed=0,
    )


def main() -> None:
    args = parse()
    global clock
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    torch.set_num_threads(args.threads or torch.get_num_threads())
    if args.device == "cpu":
        keep_freed_memory()  # as a rank does
    shape = SHAPES[args.shape]
    batch = make_batch(
        args.data, shape["vocab_size"], num_groups=args.groups, group_size=args.group_size, median=args.median
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen2", max_position_embeddings=32768, **shape)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        body = sum(p.numel() for p in model.parameters() if p.ndim > 1 and p is not embedding and p is not head)
        del model, embedding, head
        peak = peak_flops(args)
        for packing in args.packing:
            runs = {"trainer": trainer_step(args, folder, packing, batch)}
            if args.bare:
                runs["bare"] = bare_step(args, folder, packing, batch)
            for loop, (pass_s, step_s, peak_gib) in zip(runs, timed(args, list(runs.values())), strict=True):
                row: dict[str, Any] = {"loop": loop} | describe(args, shape, batch, packing, body)
                flops = row.pop("flops")
                row |= {"forward_backward_s": round(pass_s, 4), "tokens_per_s": round(row["tokens"] / pass_s)}
                row |= {"mfu": round(flops / pass_s / peak, 3)}
                row |= {"step_s": round(step_s, 4), "step_mfu": round(flops / step_s / peak, 3)}
                # Of a process, where there is no GPU: both loops together.
                row |= {} if args.bare and args.device == "cpu" else {"peak_gib": round(peak_gib, 2)}
                print(json.dumps(row), flush=True)
            dist.destroy_process_group()


Step = Callable[[], tuple[float, float]]
"""One step; returns the seconds of its forward and backward passes, and the GiB that it took at most."""


def trainer_step(args: argparse.Namespace, folder: str, packing: str, batch: Any) -> Step:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    trainer = Trainer(settings_of(args, folder, packing), rank=0, init_method=address)

    def step() -> tuple[float, float]:
        begun = clock()
        trainer.forward_backward(batch)
        synchronize(args)
        seconds = clock() - begun
        return seconds, trainer.optim_step()["train/peak_memory_gib"]

    return step


def bare_step(args: argparse.Namespace, folder: str, packing: str, batch: Any) -> Step:
    """The same passes through the same model in a loop with nothing around it: no FSDP, cross-entropy for a loss."""
    settings = settings_of(args, folder, packing)
    model = load_model(folder, attn="sdpa", packing=packing).to(args.device)
    if args.gradient_checkpointing:
        model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = make_optimizer(model.parameters(), settings.optimizer)
    pieces = [
        p.to(torch.device(args.device))
        for p in split_into_microbatches(batch, max_tokens=args.max_tokens, packing=packing)
    ]  # type: ignore[arg-type]

    def step() -> tuple[float, float]:
        begun = clock()
        for piece in pieces:
            packed = {} if piece.layout is None else {"position_ids": piece.position_ids, "layout": piece.layout}
            with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
                hidden = model.lm.base_model(input_ids=piece.input_ids, use_cache=False, **packed).last_hidden_state
                logits = model.lm.lm_head(hidden.flatten(0, 1)[piece.logit_positions])
            loss = torch.nn.functional.cross_entropy(logits.float(), piece.targets, reduction="sum")
            (loss / len(batch.response_tokens)).backward()
        synchronize(args)
        seconds = clock() - begun
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return seconds, peak_memory_gib(torch.device(args.device))

    return step


def timed(args: argparse.Namespace, runs: list[Step]) -> list[tuple[float, float, float]]:
    """Of each run, in turn and after two that warm up: best seconds of (forward_backward, step); most GiB."""
    for run in runs * 2:  # compiled layers are compiled for one length, then for all
        run()
    best = [(float("inf"), float("inf"), 0.0) for _ in runs]
    for _ in range(args.steps):
        for i, run in enumerate(runs):
            begun = clock()
            pass_s, peak_gib = run()
            synchronize(args)
            best[i] = (min(best[i][0], pass_s), min(best[i][1], clock() - begun), max(best[i][2], peak_gib))
    return best


def describe(
    args: argparse.Namespace,
    shape: dict[str, Any],
    batch: Any,
    packing: str,
    num_body_weights: int,
) -> dict[str, Any]:
    """What a row says of the work: counts, and the floating-point operations of one step's passes."""
    lengths = batch.prompt_lengths + batch.response_lengths
    tokens = int(lengths.sum())
    pieces = split_into_microbatches(batch, max_tokens=args.max_tokens, packing=packing)  # type: ignore[arg-type]
    positions = sum(p.input_ids.numel() for p in pieces)
    # Scores and values, causal: 2 * 2 * hidden * length^2 / 2 per layer forward, twice that backward.
    attention = 6 * shape["num_hidden_layers"] * shape["hidden_size"] * int(lengths.square().sum())
    # The output head computes what responses are scored with.
    head = shape["vocab_size"] * shape["hidden_size"] * len(batch.response_tokens)
    flops = 6 * (num_body_weights * (tokens if packing == "padded" else positions) + head) + attention
    return {
        "shape": args.shape,
        "data": args.data,
        "packing": packing,
        "sequences": len(lengths),
        "tokens": tokens,
        "passes": len(pieces),
        "positions": positions,
        "flops": flops,
    }


def peak_flops(args: argparse.Namespace) -> float:
    if args.device == "cuda":
        name = torch.cuda.get_device_name()
        return next((peak for part, peak in PEAKS.items() if part in name), float("nan"))
    a, best = torch.randn(1024, 1024), float("inf")
    for _ in range(5):
        begun = clock()
        a @ a
        best = min(best, clock() - begun)
    return 2 * 1024**3 / best


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--data", choices=("groups", "tails", "lognormal"), default="groups")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--median", type=int, default=64, help="of response lengths, for lognormal and tails")
    parser.add_argument("--packing", nargs="+", choices=("shared", "packed", "padded"), default=["shared"])
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="the trainer's decoder layers")
    parser.add_argument("--cpu-offload", action="store_true", help="of the trainer's weights and optimizer")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 0: torch's default")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--bare", action="store_true", help="also time a plain PyTorch loop")
    return parser.parse_args()


if __name__ == "__main__":
    with ThreadPoolExecutor(1) as compute:  # a rank computes in a thread of its own, whose memory is managed otherwise
        compute.submit(main).result()
