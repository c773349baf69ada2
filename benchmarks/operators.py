"""What a slow operator costs, in the buffer's process and in a pool. One JSON line for each measurement.

    python benchmarks/operators.py [--groups 200] [--operator-ms 20] [--processes 0 1 2 4 8]

Groups of 8 answers of 512 tokens, each put as soon as it is admitted, by 8 collectors at once; the trainer takes each
batch of 16 as it is complete. The operator sleeps, as one does that asks a judge, or (`--busy`) computes.
`groups_per_s`: through the buffer, from the first delivery to the last batch. `put_ms`: how long a collector waits for
its delivery to be taken, median and largest. `answer_ms`: how long somebody else waits for the buffer's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.operator_pool import OperatorPool
from leeway.replay.operators import Pipeline
from leeway.types import Group, Task, Trajectory

P, COLLECTORS, ANSWERS, TOKENS, LAG = 16, 8, 8, 512, 2


def slow(group: Group, *, ms: float, busy: bool = False) -> None:
    """The operator."""
    if not busy:
        time.sleep(ms / 1000)
        return
    until = time.process_time() + ms / 1000
    while time.process_time() < until:
        pass


def group_of(group_id: int, version: int) -> Group:
    answer = Trajectory(
        prompt_tokens=[1] * 64,
        response_tokens=[7] * TOKENS,
        loss_mask=[True] * TOKENS,
        behavior_logprobs=[-0.5] * TOKENS,
        policy_versions=[version] * TOKENS,
        reward=1.0,
        finish_reason="stop",
        text="",
    )
    return Group.of([answer] * ANSWERS, group_id=group_id, task_id=str(group_id))


async def measured(processes: int, num_groups: int, steps: list[Any], folder: Path) -> dict[str, float]:
    pool = OperatorPool(steps, num_processes=processes, timeout_s=60.0, log_file=folder / "replay.log")
    await pool.start()
    buffer = ReplayBuffer(
        tasks=(Task(task_id=str(i), prompt="") for i in itertools.count()),
        rule=AdmissionRule(
            groups_per_batch=P, updates_per_batch=1, publish_every=1, reorder_window=P, target_lag=LAG, max_lag=LAG
        ),
        num_batches=num_groups // P,
        capacity=P * (LAG + 2),
        operators=[] if processes else [Pipeline(steps)],
        operated_elsewhere=pool.apply if processes else None,
        num_collectors=COLLECTORS,
    )
    puts: list[float] = []
    answers: list[float] = []
    template = group_of(0, 0)

    async def collect(name: str) -> None:
        while admissions := await buffer.admit(4, timeout_s=600, collector=name):
            for admission in admissions:
                tokens = torch.full_like(template.samples["policy_versions"], max(0, admission.min_policy_version))
                group = replace(
                    template,
                    group_id=admission.group_id,
                    task_id=admission.task.task_id,
                    samples=template.samples | {"policy_versions": tokens},
                )
                began = time.monotonic()
                await buffer.put([group])
                puts.append(time.monotonic() - began)
                await asyncio.sleep(0)

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            answers.append(time.monotonic() - began - 0.001)

    beating = asyncio.create_task(beat())
    collecting = [asyncio.create_task(collect(f"generator-{i}")) for i in range(COLLECTORS)]
    began, version = time.monotonic(), 0
    await buffer.published(0)
    while (batch := await buffer.take_batch(timeout_s=600)) is not None:
        version += 1
        await buffer.trained(batch.group_ids)
        await buffer.published(version)
    seconds = time.monotonic() - began
    await asyncio.gather(*collecting)
    beating.cancel()
    pool.close()
    return {
        "groups_per_s": version * P / seconds,
        "put_ms_median": 1000 * statistics.median(puts),
        "put_ms_max": 1000 * max(puts),
        "answer_ms_median": 1000 * statistics.median(answers),
        "answer_ms_max": 1000 * max(answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--operator-ms", type=float, default=20.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--busy", action="store_true", help="the operator computes instead of waiting")
    options = parser.parse_args()
    torch.set_num_threads(1)
    here = Path(__file__).resolve()
    sys.path.append(str(here.parent))
    steps: list[Any] = [{f"{here.stem}:slow": {"ms": options.operator_ms, "busy": options.busy}}]
    with tempfile.TemporaryDirectory() as folder:
        for processes in options.processes:
            found = asyncio.run(measured(processes, options.groups, steps, Path(folder)))
            print(
                json.dumps({"processes": processes, **{name: float(f"{x:.4g}") for name, x in found.items()}}),
                flush=True,
            )


if __name__ == "__main__":
    main()
