"""How many generators one buffer and one parameter server can serve: the real actors, and generators that only ask.

    python benchmarks/explorers.py --generators 100 --groups 20000
    python benchmarks/explorers.py --generators 1000 --groups 20000

Each generator asks for groups, delivers them made up (8 answers of 64 tokens), and pulls every version that is
announced. A trainer's loop takes batches, marks them as trained and announces the next version. Printed as one JSON
line: groups per second of the wall clock; milliseconds of the buffer's and of the server's processor for each group,
whose inverse is what one core can do; the median and the 99th percentile of an `admit`, in which it may wait for room;
the buffer's memory, in MiB at every tenth of the groups.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from leeway.config import Config, load_config
from leeway.group import Group
from leeway.param_server.actor import ParameterServerRemote
from leeway.replay.actor import ReplayBufferRemote
from leeway.runtime.launch import calls_at_once
from leeway.tasks.bootstrap import build_model_dir
from leeway.types import Trajectory
from leeway.weights import Canary, CanaryPrompts, Manifest, Publication, digest_of

ANSWERS, TOKENS = 8, 64
DEADLINE_S = 600.0


class Generators:
    """`number` of them in one process."""

    def __init__(self, first: int, number: int, buffer: Any, server: Any) -> None:
        self._names = [f"generator-{first + i}/x" for i in range(number)]
        self._buffer, self._server = buffer, server
        self._admitted_s: list[float] = []

    async def run(self) -> list[float]:
        """Returns the seconds that each `admit` took, once there is nothing left to do."""
        pulling = [asyncio.ensure_future(self._pull()) for _ in self._names]
        await asyncio.gather(*map(self._generate, self._names))
        for task in pulling:
            task.cancel()
        return self._admitted_s

    async def _generate(self, name: str) -> None:
        while True:
            asked = time.monotonic()
            admissions = await self._buffer.admit.remote(4, DEADLINE_S, name)
            self._admitted_s.append(time.monotonic() - asked)
            if not admissions:
                return
            await self._buffer.put.remote(
                [made_up(a.group_id, a.task.task_id, a.min_policy_version) for a in admissions]
            )

    async def _pull(self) -> None:
        version = -1
        while True:
            publication = await self._server.pull.remote(newer_than=version, timeout_s=DEADLINE_S, oldest=False)
            version = publication.manifest.policy_version


def made_up(group_id: int, task_id: str, version: int) -> Group:
    """Every other answer is right."""
    answers = [
        Trajectory(
            prompt_tokens=[1] * 16,
            response_tokens=[2] * TOKENS,
            loss_mask=[True] * TOKENS,
            behavior_logprobs=[-1.0] * TOKENS,
            policy_versions=[version] * TOKENS,
            reward=float(i % 2),
            finish_reason="stop",
            text="",
        )
        for i in range(ANSWERS)
    ]
    return Group.of(answers, group_id=group_id, task_id=task_id)


def settings(folder: Path, generators: int, groups: int) -> Config:
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(10, 60)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config("quickstart", [], recipe="async_rl")
    assert config.model.init is not None
    model = build_model_dir(config.model.init, ["0 1 2"] * 9, folder / "model", seed=0, dtype="float32")
    each = generators * 4
    return load_config(
        "quickstart",
        [
            "stages=null",
            "model.init=null",
            f"model.path={model}",
            "task={name: jsonl, path: " + str(folder / "tasks.jsonl") + "}",
            f"rollout.num_generators={generators}",
            f"rollout.max_response_tokens={TOKENS}",
            "rollout.max_model_len=128",
            "rollout.engine.name=hf",
            "staleness.max_policy_lag=4",
            f"train.groups_per_step={each}",
            f"train.steps={max(2, groups // each)}",
            "monitor.suspects=false",
            "monitor.rollouts_per_step=0",
        ],
        recipe="async_rl",
    )


async def measure(generators: int, groups: int, folder: Path) -> dict[str, Any]:
    config = settings(folder, generators, groups)
    room = {"max_concurrency": calls_at_once(config)}
    buffer = ReplayBufferRemote.options(**room).remote(config, role="replay", log_file=folder / "replay.log")
    server = ParameterServerRemote.options(**room).remote(
        keep=1, role="param_server", log_file=folder / "param_server.log", log_level="INFO"
    )
    (_, pid), (_, server_pid) = await buffer.answer.remote(), await server.answer.remote()
    processes = psutil.Process(pid), psutil.Process(server_pid)
    before = [sum(p.cpu_times()[:2]) for p in processes]
    making: Any = ray.remote(num_cpus=0, max_concurrency=10 * generators)(Generators)
    half = generators // 2
    both = [making.remote(first, number, buffer, server) for first, number in ((0, half), (half, generators - half))]
    begun, memory, done = time.monotonic(), [], 0
    await announce(buffer, server, 0)
    asking = [asyncio.ensure_future(as_coroutine(each.run.remote())) for each in both]
    every = max(1, (config.train.steps or 1) // 10)
    for step in itertools.count(1):
        batch = await buffer.take_batch.remote(DEADLINE_S)
        if batch is None:
            break
        done += len(batch.group_ids)
        await buffer.trained.remote(batch.group_ids)
        await announce(buffer, server, step)
        if step % every == 0:
            memory.append(round(processes[0].memory_info().rss / 2**20))
        if step == config.train.steps:
            break
    wall_s = time.monotonic() - begun
    await buffer.close.remote()
    admitted = sorted(s for seconds in await asyncio.gather(*asking) for s in seconds)
    used = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    return {
        "generators": generators,
        "groups": done,
        "groups_per_s": round(done / wall_s, 1),
        "buffer_ms_per_group": round(1000 * used[0] / done, 3),
        "server_ms_per_group": round(1000 * used[1] / done, 3),
        "server_ms_per_pull": round(1000 * used[1] / (generators * step), 3),
        "admit_ms": [round(1000 * admitted[int(len(admitted) * q)], 1) for q in (0.5, 0.99)],
        "buffer_mib": memory,
    }


async def announce(buffer: Any, server: Any, version: int) -> None:
    manifest = Manifest(version, [], [], Canary(CanaryPrompts(scored=[], cached=[]), [], [], []), digest_of([]))
    await server.publish.remote(Publication(manifest, []))
    await buffer.published.remote(version)


async def as_coroutine(call: Any) -> Any:
    return await call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=100)
    parser.add_argument("--groups", type=int, default=20_000)
    args = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=500 * 2**20, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(args.generators, args.groups, Path(folder)))), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
