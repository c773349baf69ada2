"""Engine, weight sync and trainer on one device, end to end: whole runs of `async_rl`, and what bounds them beside.

    python benchmarks/gpu/end_to_end.py               # on a GPU: every model, in turns and together, two transports
    python benchmarks/gpu/end_to_end.py --models smollm=/models/SmolLM2-135M-Instruct --placements turns --steps 8
    python benchmarks/gpu/end_to_end.py --device cpu --models quickstart 135m --placements separate turns

Needs no network. Each row is a run in a folder of its own under `--out`; its logs stay there, and a run that fails is a
row that says so. Medians over all steps but the first; `gap` is the largest of the run.

    generated   response tokens per second while the engine generates; bare: vLLM alone, same prompts and lengths
    trained     tokens per second of the trainer; MFU: its arithmetic against the device's peak
    weights     the phases of a weight sync; floor: a copy of the same bytes from main memory to the device
    turns       handing the devices over, to the trainer and back; GiB: what engine and trainer gave back
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]

from trainer import PEAKS, SHAPES  # noqa: E402  # the benchmark beside this folder

LEEWAY = [sys.executable, "-c", "from leeway.cli.main import main; main()"]
GROUP_SIZE, GROUPS, RESPONSE = 8, 16, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--models",
        nargs="+",
        default=["quickstart", "135m", "qwen2_5-0.5b", "qwen2_5-1.5b"],
        help=f"quickstart (it learns), a random shape ({', '.join(SHAPES)}), or NAME=FOLDER",
    )
    parser.add_argument("--placements", nargs="+", default=["turns", "together"])
    parser.add_argument(
        "--transports", nargs="+", default=["object_store", "ipc"], help="of weights; see docs/design.md"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--response-tokens", type=int, default=RESPONSE)
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--compiled", action="store_true", help="vLLM with torch.compile and graphs, ours and alone")
    parser.add_argument("--gpu-memory", type=float, help="vLLM's share; default: 0.8 in turns, 0.4 together")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--bare", help=argparse.SUPPRESS)  # of this script's own process for vLLM alone
    parser.add_argument("overrides", nargs="*", help="more settings of the runs, key=value, after --")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.bare:
        print(json.dumps(bare_vllm(args, Path(args.bare))))
        return
    out = args.out or Path(tempfile.mkdtemp(prefix="end-to-end-"))
    print(f"runs under {out}, {args.device}, {args.dtype}, {GROUPS} x {GROUP_SIZE} answers a step", flush=True)
    for name in args.models:
        folder = model_folder(name, out, args)
        bare = None if folder is None else own_process(args, folder)
        for placement, transport in itertools.product(args.placements, args.transports):
            show(name, f"{placement}, {transport}", run(name, folder, placement, transport, out, args), bare, args)


def model_folder(name: str, out: Path, args: argparse.Namespace) -> Path | None:
    """A folder with weights and tokenizer; None for the quickstart, which builds its own."""
    if "=" in name:
        return Path(name.partition("=")[2]).expanduser()
    if name == "quickstart":
        return None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from leeway.tasks.tiny_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(["the quick brown fox jumps over the lazy dog 0123456789 +-=?"], max_length=2048)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        **SHAPES[name],
        max_position_embeddings=2048,
        initializer_range=0.02,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    folder = out / "models" / name
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(
    name: str, folder: Path | None, placement: str, transport: str, out: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """One run; its metrics by name, or what it said last."""
    label = f"{name.partition('=')[0]}-{placement}-{transport}"
    settings = [
        f"output_dir={out}",
        f"name={label}",
        "monitor.console=plain",
        f"model.dtype={args.dtype}",
        f"cluster.device={args.device}",
        f"stages.async_rl.cluster.placement={placement}",
        f"stages.async_rl.param_server.transport={transport}",
        f"stages.async_rl.train.steps={args.steps}",
        "staleness.in_flight=recompute",
        "cluster.start_timeout_s=600",
    ]
    if args.device == "cuda":
        share = args.gpu_memory or (0.8 if placement == "turns" else 0.4)
        settings += [f"rollout.engine.gpu_memory_utilization={share}"]
        settings += [f"rollout.engine.enforce_eager={str(not args.compiled).lower()}"]
    elif placement == "turns":
        cores = len(os.sched_getaffinity(0))
        settings += [f"stages.async_rl.cluster.cpus_per_generator={cores}"]
        settings += [f"stages.async_rl.cluster.cpus_per_trainer={cores}"]
    if folder is not None:
        settings += [
            "stages.sft=null",
            "model.init=null",
            f"model.path={folder}",
            "env.reward=rewards:share_of_vowels",
            f"algorithm.group_size={GROUP_SIZE}",
            f"stages.async_rl.train.groups_per_step={GROUPS}",
            "stages.async_rl.optimizer.lr=1.0e-6",
            f"rollout.max_response_tokens={args.response_tokens}",
            f"rollout.max_model_len={args.response_tokens + 64}",
            "rollout.max_prompt_tokens=64",
            "param_server.canary_prompts=3",
        ]
    command = [*LEEWAY, "run", "async_rl", "--config", "quickstart", *settings, *args.overrides]
    began = time.monotonic()
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    file = out / "leeway" / label / "stages" / "async_rl" / "metrics.jsonl"
    if not file.exists():
        return {"failed": (done.stderr or done.stdout).strip().splitlines()[-1:]}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    summary = json.loads((out / "leeway" / label / "summary.json").read_text())
    found: dict[str, Any] = {"wall_s": time.monotonic() - began, "status": summary["status"], "cause": summary["cause"]}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float) and row["step"] > 1:
                found.setdefault(key, []).append(value)
    gaps = [row["param_server/served_gap/max"] for row in rows if "param_server/served_gap/max" in row]
    return found | {"gap": max(gaps, default=float("nan"))}


def own_process(args: argparse.Namespace, folder: Path) -> float | None:
    """vLLM alone, in a process that gives everything back."""
    command = [sys.executable, __file__, "--bare", str(folder), "--device", args.device, "--dtype", args.dtype]
    command += ["--response-tokens", str(args.response_tokens), *(["--compiled"] if args.compiled else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith('{"tokens_per_s"')]  # vLLM logs there too
    if not said:
        print(f"vLLM alone failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    return json.loads(said[0])["tokens_per_s"]


def bare_vllm(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Response tokens per second of as many sequences as a step has, twice; the faster."""
    if args.device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype=args.dtype,
        max_model_len=args.response_tokens + 64,
        skip_tokenizer_init=True,
        enforce_eager=not args.compiled,
        **({"gpu_memory_utilization": 0.8} if args.device == "cuda" else {}),
    )
    params = SamplingParams(n=GROUP_SIZE, max_tokens=args.response_tokens, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": [2 + (7 * i + j) % 40 for j in range(16)]} for i in range(GROUPS)]
    speeds = []
    for _ in range(2):
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        speeds.append(GROUPS * GROUP_SIZE * args.response_tokens / (time.perf_counter() - began))
    return {"tokens_per_s": max(speeds)}


def copy_floor_s(num_bytes: int, device: str) -> float:
    """Seconds of a copy of so many bytes from (pinned) main memory to the device; the fastest of five."""
    import torch

    num_bytes = max(1, num_bytes)
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def peak_flops(device: str) -> float | None:
    if device == "cpu":
        return None
    import torch

    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def show(name: str, how: str, found: dict[str, Any], bare: float | None, args: argparse.Namespace) -> None:
    if "failed" in found:
        print(f"\n{name}, {how}: FAILED: {found['failed']}", flush=True)
        return

    def median(key: str) -> float:
        return statistics.median(found[key]) if found.get(key) else float("nan")

    num_bytes = int(median("param_server/bytes")) if found.get("param_server/bytes") else 0
    weights = num_bytes / (2 if args.dtype == "bfloat16" else 4)
    peak, trained = peak_flops(args.device), median("train/tokens_per_s")
    generate_s = median("collector/generate_frac") or float("nan")
    generated = median("collector/tokens_per_s") / generate_s
    lines: Sequence[tuple[str, str]] = (
        (
            "status",
            f"{found['status']} ({found['cause']}), {found['wall_s']:.0f} s, step {median('step/total_s'):.3f} s",
        ),
        ("generated", f"{generated:,.0f} tok/s while generating" + (f", bare vLLM {bare:,.0f}" if bare else "")),
        ("trained", f"{trained:,.0f} tok/s" + (f", MFU {6 * weights * trained / peak:.1%}" if peak else "")),
        ("efficiency", f"{median('limit/efficiency'):.0%} of the speed limit"),
        (
            "weights",
            f"{num_bytes / 1e9:.3f} GB: ahead {median('param_server/ahead_s'):.3f}, "
            f"pause {median('collector/pause_s'):.4f}, proof {median('param_server/proof_s'):.3f} s; "
            f"floor {copy_floor_s(num_bytes, args.device):.4f} s",
        ),
        ("gap", f"{found['gap']:.2g} nats"),
        (
            "turns",
            f"to trainer {median('turns/to_trainer_s'):.3f} s, to engines {median('turns/to_engines_s'):.3f} s; "
            f"released {median('turns/released_gib'):.2f}, offloaded {median('turns/offloaded_gib'):.2f} GiB"
            if how.startswith("turns")
            else "none",
        ),
        ("memory", f"trainer's peak {median('train/peak_memory_gib'):.2f} GiB"),
    )
    print(f"\n{name}, {how}")
    for label, text in lines:
        print(f"  {label:<12}{text}", flush=True)


if __name__ == "__main__":
    main()
