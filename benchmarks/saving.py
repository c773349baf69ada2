"""What a checkpoint costs training: seconds held up, and seconds to disk, written beside training or not.

    python benchmarks/saving.py --shape small --folder /tmp/saving

Steps without saving and steps beside a save are timed in turn, so that other work on the machine hits both alike. One
JSON line per way of saving. One rank; with several each writes its share of the bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from trainer import SHAPES, make_batch, settings_of
from transformers import AutoConfig, AutoModelForCausalLM

from leeway.config.learning import CheckpointConfig
from leeway.trainer.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--folder", type=Path, required=True, help="where to write: the disk that is measured")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=4096)
    args = parser.parse_args()
    args.gradient_checkpointing = args.compile = args.cpu_offload = False
    torch.set_num_threads(args.threads)
    batch = make_batch("groups", SHAPES[args.shape]["vocab_size"], num_groups=16, group_size=8, median=64)
    with tempfile.TemporaryDirectory() as base:
        config = AutoConfig.for_model("qwen2", max_position_embeddings=1024, **SHAPES[args.shape])
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
        settings = settings_of(args, base, "shared")
        for in_background in (True, False):
            chosen = replace(settings, checkpoint=CheckpointConfig(in_background=in_background))
            trainer = Trainer(chosen, rank=0, init_method=f"file://{base}/meet-{in_background}")
            print(json.dumps({"in_background": in_background, **measure(trainer, batch, args)}), flush=True)
            trainer.close()


def measure(trainer: Trainer, batch: object, args: argparse.Namespace) -> dict[str, float]:
    def step() -> float:
        started = time.perf_counter()
        trainer.forward_backward(batch)  # type: ignore[arg-type]
        trainer.optim_step()
        return time.perf_counter() - started

    step()
    alone, beside, held_up, written = [], [], [], []
    for _ in range(args.saves):
        alone.append(step())
        held_up.append(trainer.begin_save(state=str(args.folder / "state"))["checkpoint/copy_s"])
        beside.append(step())
        written.append(trainer.finish_save()["checkpoint/write_s"])
        size = sum(p.stat().st_size for p in (args.folder / "state").iterdir())
        shutil.rmtree(args.folder / "state")
    names = {"held_up_s": held_up, "write_s": written, "step_alone_s": alone, "step_beside_s": beside}
    return {"mb": size / 1e6} | {name: statistics.median(values) for name, values in names.items()}


if __name__ == "__main__":
    main()
