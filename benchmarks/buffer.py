"""What the replay buffer costs for each group and each token. One JSON line for each measurement.

    python benchmarks/buffer.py [--repeats 3]

`put`: seconds of processor per delivered group, with collectors that wait for slots. `window`: the same for the order
of groups alone, by groups in a batch. `assemble`: seconds per token from groups to tensors, and the longest time in
which a loop beside it could do nothing else. On one core; the ratio of two lines of one run is what can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable

import torch

from leeway.algorithms.presets import ADVANTAGES
from leeway.replay.admission import AdmissionRule
from leeway.replay.assemble import Assembler
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.window import Window
from leeway.types import Group, Task, Trajectory


def buffer_of(P: int, *, T: int) -> ReplayBuffer:
    return ReplayBuffer(
        tasks=(Task(task_id=str(i), prompt="") for i in itertools.count()),
        rule=AdmissionRule(
            groups_per_batch=P, updates_per_batch=1, publish_every=1, reorder_window=1, target_lag=T, max_lag=T
        ),
        num_batches=None,
        capacity=P * (T + 1),
    )


def group_of(group_id: int, *, num_trajectories: int = 2, tokens: int = 2) -> Group:
    rng = random.Random(group_id)
    return Group.of(
        group_id=group_id,
        task_id=str(group_id),
        trajectories=[
            Trajectory(
                prompt_tokens=[group_id + 1] * 16,
                response_tokens=[rng.randrange(150_000) for _ in range(tokens)],
                loss_mask=[True] * tokens,
                behavior_logprobs=[-rng.random() for _ in range(tokens)],
                policy_versions=[3] * tokens,
                reward=float(i % 2),
                finish_reason="stop",
                text="",
            )
            for i in range(num_trajectories)
        ],
    )


def put_s(num_waiting: int) -> float:
    """Seconds per group, of 256 that are delivered one by one while `num_waiting` collectors wait for slots."""

    async def scenario() -> float:
        buffer = buffer_of(256, T=0)
        await buffer.published(0)
        groups = [group_of(a.group_id) for a in await buffer.admit(256, timeout_s=60)]
        waiting = [
            asyncio.create_task(buffer.admit(1, timeout_s=60, collector=f"generator-{i}")) for i in range(num_waiting)
        ]
        await asyncio.sleep(0.1)
        begun = time.process_time()
        for group in groups:
            await buffer.put([group])
            await asyncio.sleep(0)
        seconds = time.process_time() - begun
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return seconds / len(groups)

    return asyncio.run(scenario())


def window_s(P: int) -> float:
    """Seconds per group that is admitted, finished and taken, with a look after each whether the batch is complete."""
    rule = AdmissionRule(
        groups_per_batch=P, updates_per_batch=1, publish_every=1, reorder_window=P, target_lag=2, max_lag=2
    )
    window, rng, begun = Window(rule), random.Random(0), time.process_time()
    count, batches = 0, max(2, 4096 // P)
    running: list[int] = []
    while window.num_batches < batches:
        while window.num_outstanding < 2 * P:
            window.admit(count)
            running.append(count)
            count += 1
        index = rng.randrange(min(P, len(running)))
        window.finish(running.pop(index))
        while window.is_ready(last=False):
            window.take_batch(last=False)
    return (time.process_time() - begun) / window.num_taken


def assembling(num_groups: int, group_size: int, tokens: int) -> tuple[float, float]:
    """(seconds per token, the longest pause of a loop beside it in seconds)."""
    groups = [group_of(i, num_trajectories=group_size, tokens=tokens) for i in range(num_groups)]
    assembler = Assembler(
        advantage=ADVANTAGES["grpo"](),
        updates_per_batch=1,
        num_ranks=2,
        skip_zero_advantage=False,
        rollouts_per_step=16,
    )

    async def scenario() -> tuple[float, float]:
        longest, last, done = 0.0, time.monotonic(), False

        async def beat() -> None:
            nonlocal longest, last
            while not done:
                await asyncio.sleep(0.001)
                now = time.monotonic()
                longest, last = max(longest, now - last), now

        beating = asyncio.create_task(beat())
        begun = time.process_time()
        await asyncio.to_thread(assembler, 0, groups)
        seconds, done = time.process_time() - begun, True
        await beating
        return seconds / (num_groups * group_size * tokens), longest

    return asyncio.run(scenario())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="the shortest of so many times is reported")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)

    def best(measure: Callable[[], float]) -> float:
        return min(measure() for _ in range(repeats))

    for num_waiting in (0, 100, 1000):
        say("put", waiting=num_waiting, s_per_group=best(lambda n=num_waiting: put_s(n)))
    for P in (64, 512, 4096):
        say("window", groups_per_batch=P, s_per_group=best(lambda P=P: window_s(P)))
    per_token, pause = min(assembling(128, 8, 4000) for _ in range(repeats))
    say("assemble", s_per_token=per_token, tokens_per_s=1 / per_token, longest_pause_s=pause)


def say(what: str, **numbers: float) -> None:
    print(json.dumps({"what": what, **{name: float(f"{value:.4g}") for name, value in numbers.items()}}), flush=True)


if __name__ == "__main__":
    main()
