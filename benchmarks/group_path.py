"""What a group costs on its way from a collector to the trainer's tensors. One JSON line for each size.

    python benchmarks/group_path.py [--repeats 20]

Milliseconds of processor (the best of the repeats), of one group of trajectories x response tokens:

    flatten      from the environment's trajectories to what travels, with the collector's checks
    send         serialise, copy into a store and deserialise, as Ray does (pickle 5, buffers out of band): collector ->
                 buffer
    store        `put` into the replay buffer and out again as a batch
    assemble     advantages and the share of one trainer rank
    send_share   as `send`, of that share: buffer -> trainer
    cut          into microbatches

`group_bytes` and `share_bytes` are the sizes in the store.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pickle
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from ray import cloudpickle

from leeway.algorithms.presets import ADVANTAGES
from leeway.collector.checks import checked
from leeway.replay.admission import AdmissionRule
from leeway.replay.assemble import Assembler
from leeway.replay.buffer import ReplayBuffer
from leeway.trainer.microbatch import split_into_microbatches
from leeway.types import Group, Task, Trajectory

T = TypeVar("T")
SIZES = ((512, 5), (128, 2048), (16, 8192))
PROMPT_TOKENS = 64


def trajectories_of(count: int, tokens: int) -> list[Trajectory]:
    rng = random.Random(0)
    prompt = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    return [
        Trajectory(
            prompt_tokens=prompt,
            response_tokens=[rng.randrange(150_000) for _ in range(tokens)],
            loss_mask=[True] * tokens,
            behavior_logprobs=[-rng.random() for _ in range(tokens)],
            policy_versions=[3] * tokens,
            reward=float(i % 2),
            finish_reason="stop",
            text="".join(rng.choice("abcdefgh ") for _ in range(4 * tokens)),
            metrics={"exact_match": float(i % 2)},
        )
        for i in range(count)
    ]


def flattened(trajectories: list[Trajectory]) -> Group:
    samples = checked(trajectories, group_size=len(trajectories), temperature=1.0, max_model_len=1 << 20, versions={3})
    return Group.of(trajectories, samples=samples, group_id=0, task_id="t")


def sent(value: T) -> tuple[T, int]:
    """The value as it comes out of an object store, and its bytes there."""
    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    store = [bytes(data), *(bytes(b.raw()) for b in buffers)]  # read-only, as shared memory is
    return pickle.loads(store[0], buffers=store[1:]), sum(map(len, store))


def stored(group: Group) -> list[Group]:
    async def scenario() -> list[Group]:
        buffer = ReplayBuffer(
            tasks=(Task(task_id="t", prompt="") for _ in itertools.count()),
            rule=AdmissionRule(
                groups_per_batch=1, updates_per_batch=1, publish_every=1, reorder_window=1, target_lag=0, max_lag=0
            ),
            num_batches=None,
            capacity=2,
        )
        await buffer.published(0)
        await buffer.admit(1, timeout_s=60)
        nonlocal begun
        begun = time.process_time()
        await buffer.put([group])
        taken = await buffer.take_batch(timeout_s=60)
        nonlocal spent
        spent = time.process_time() - begun
        assert taken is not None
        return taken.groups

    begun = spent = 0.0
    groups = asyncio.run(scenario())
    STORED_S.append(spent)
    return groups


STORED_S: list[float] = []


def measure(count: int, tokens: int, repeats: int) -> dict[str, Any]:
    trajectories = trajectories_of(count, tokens)
    assembler = Assembler(
        advantage=ADVANTAGES["grpo"](), updates_per_batch=1, num_ranks=1, skip_zero_advantage=True, rollouts_per_step=1
    )
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], T]) -> T:
        begun = time.process_time()
        result = function()
        times.setdefault(name, []).append(time.process_time() - begun)
        return result

    group_bytes = share_bytes = 0
    for _ in range(repeats + 1):  # the first one warms up
        group = timed("flatten", lambda: flattened(trajectories))
        group, group_bytes = timed("send", lambda group=group: sent(group))
        groups = stored(group)
        times.setdefault("store", []).append(STORED_S[-1])
        batch = timed("assemble", lambda groups=groups: assembler(0, groups))
        share, share_bytes = timed("send_share", lambda batch=batch: sent(batch.steps[0][0]))
        timed("cut", lambda share=share: split_into_microbatches(share, max_tokens=32_768))
    ms = {f"{name}_ms": 1000 * min(values[1:]) for name, values in times.items()}
    return ms | {"total_ms": sum(ms.values()), "group_bytes": group_bytes, "share_bytes": share_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for count, tokens in SIZES:
        row = {"size": f"{count} x {tokens}", **measure(count, tokens, repeats)}
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
