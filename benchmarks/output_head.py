"""Logprobs and entropy at a large vocabulary: tiles of logits against all of them at once, time and peak extra memory.

    python benchmarks/output_head.py --tokens 4096 --hidden 1536 --vocab 151936

Forward and backward, the two ways in turn within one process, `--rounds` times. "Extra" is what comes on top of hidden
states and head. `gradients_gib` of it are the gradients of both, the result, which are no smaller either way; whole
logits peak before the head's exists. `memory_ratio` leaves them in, `memory_ratio_without` takes them off the tiles.
Needs torch only; run from a checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F

from leeway.trainer.logprobs import LogitTransform, token_logprobs

TRANSFORM = LogitTransform(cap=None, scale=1 / 0.7)
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(TRANSFORM(F.linear(hidden, weight).float()), dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def tiled(chunk: int) -> Way:
    def way(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(hidden, weight, None, targets, transform=TRANSFORM, chunk=chunk)

    return way


def measure(way: Way, args: argparse.Namespace) -> tuple[float, float, torch.Tensor]:
    """Seconds, peak extra GiB, and the gradient of the hidden states."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, device=args.device).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden, device=args.device) / args.hidden**0.5).to(dtype).requires_grad_()
    targets = torch.randint(args.vocab, (args.tokens,), device=args.device)
    upstream = torch.randn(args.tokens, device=args.device)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    before = reset_peak(args.device)
    begun = clock()
    logprobs, entropy = way(hidden, weight, targets)
    logprobs.backward(upstream)
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - begun
    assert hidden.grad is not None
    assert bool(entropy.isfinite().all())
    return seconds, (peak(args.device) - before) / 2**30, hidden.grad.float()


def reset_peak(device: str) -> int:
    """Bytes in use now; the peak is counted from here on."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    for round_ in range(args.rounds):
        whole_s, whole_gib, expected = measure(whole, args)
        for chunk in args.chunk:
            seconds, gib, got = measure(tiled(chunk), args)
            row = {"round": round_, "chunk": chunk, "whole_s": round(whole_s, 2), "tiled_s": round(seconds, 2)}
            row |= {"whole_gib": round(whole_gib, 2), "tiled_gib": round(gib, 2)}
            gradients = (args.tokens + args.vocab) * args.hidden * getattr(torch, args.dtype).itemsize / 2**30
            row |= {
                "gradients_gib": round(gradients, 2),
                "memory_ratio_without": round((gib - gradients) / whole_gib, 3),
            }
            row |= {"time_ratio": round(seconds / whole_s, 3), "memory_ratio": round(gib / whole_gib, 3)}
            difference = float((got - expected).norm() / expected.norm())
            print(json.dumps(row | {"gradient_difference": f"{difference:.1e}"}), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--chunk", type=int, nargs="+", default=[256], help="train.logprob_chunk_tokens")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 0: torch's default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: others matter less")
    return parser.parse_args()


if __name__ == "__main__":
    main()
