"""How many generators one buffer and one parameter server can serve: the real actors, and generators that only ask.

    python benchmarks/explorers.py --generators 100 --groups 1000000 --answers 2 --tokens 8   # does it grow?
    python benchmarks/explorers.py --generators 100 --groups 20000                    # what a call costs
    python benchmarks/explorers.py --generators 100 --groups 10000 --through folder   # jobs that share a folder

Each generator asks for groups, delivers them made up (`--answers` of `--tokens` tokens, `--at-once` groups in a call),
and pulls every version that is announced. One of them is lost every `--lost-every` groups, with what it holds, and
comes back under another name. A trainer's loop takes batches, marks them as trained and announces the next version.

Printed as JSON lines, one at 10^4, 10^5, ... groups and one at the end: groups per second of the wall clock since the
line before; microseconds of the buffer's and of the server's processor for each group, whose inverse is what one core
can do; the memory that the two have for themselves, in MiB; and at the end the median and the 99th percentile of an
`admit` in milliseconds, in which it may wait for room.

`--through folder`: the generators are explorers with a link of their own each (`jobs/link.py`), in four processes, and
the calls are files. Weights are not pulled there. Printed too: calls a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

from leeway.config import Config, load_config
from leeway.group import Group
from leeway.jobs.folder import Meeting
from leeway.jobs.link import TrainLink
from leeway.param_server.actor import ParameterServerRemote
from leeway.replay.actor import ReplayBufferRemote
from leeway.runtime.launch import calls_at_once
from leeway.tasks.bootstrap import build_model_dir
from leeway.types import Admission, Trajectory
from leeway.weights import Canary, CanaryPrompts, Manifest, Publication, digest_of

DEADLINE_S = 3000.0
GROUPS_EACH = 4
NUM_PROCESSES = 4


class Generators:
    """Those of these names, in one process. `parts`: buffer and server, or the folder that stands for both."""

    def __init__(self, names: list[str], parts: Any, *, answers: int, tokens: int, at_once: int) -> None:
        self._names, self._parts = names, parts
        # One of each version is made, here: what is cached cannot travel to this process.
        self._of_version = functools.lru_cache(maxsize=16)(functools.partial(made_up, answers, tokens))
        self._at_once = at_once
        self._admitted_s: list[float] = []
        self._num_calls = 0
        self._lives = dict.fromkeys(names, 0)

    async def run(self) -> tuple[list[float], int]:
        """Returns the seconds that each `admit` took, and the number of calls, once there is nothing left to do."""
        work = self._through_folder if isinstance(self._parts, Path) else self._through_actors
        await asyncio.gather(*map(work, self._names))
        return self._admitted_s, self._num_calls

    async def lose(self, name: str, buffer: Any) -> None:
        """What it holds is gone; it goes on under another name."""
        own = self._collector(name)
        self._lives[name] += 1
        await buffer.mark_dead.remote(own, "it was lost")

    def _collector(self, name: str) -> str:
        return f"{name}/{self._lives[name]}"

    async def _through_actors(self, name: str) -> None:
        buffer, server = self._parts
        pulling = asyncio.ensure_future(self._pull(server))
        admit = lambda own: buffer.admit.remote(GROUPS_EACH, DEADLINE_S, own)  # noqa: E731
        while True:
            own = self._collector(name)
            admissions = await self._timed(admit(own))
            if not admissions and own == self._collector(name):
                pulling.cancel()
                return
            for groups in self._deliveries(admissions):
                if own == self._collector(name):
                    self._num_calls += 1
                    await buffer.put.remote(groups)

    async def _through_folder(self, name: str) -> None:
        link = TrainLink(Meeting(self._parts), name, silent_s=600.0, wait_s=DEADLINE_S)
        serving = asyncio.ensure_future(link.run())
        while admissions := await self._timed(link.admit(GROUPS_EACH, "collector")):
            for groups in self._deliveries(admissions):
                self._num_calls += 1
                await link.put(groups)
        await link.leave()
        serving.cancel()

    def _deliveries(self, admissions: list[Admission]) -> list[list[Group]]:
        groups = [admitted_as(admission, self._of_version) for admission in admissions]
        return [groups[i : i + self._at_once] for i in range(0, len(groups), self._at_once)]

    async def _timed(self, admit: Any) -> list[Admission]:
        self._num_calls += 1
        asked = time.monotonic()
        admissions = await admit
        self._admitted_s.append(time.monotonic() - asked)
        return admissions

    async def _pull(self, server: Any) -> None:
        version = -1
        while True:
            publication = await server.pull.remote(newer_than=version, timeout_s=DEADLINE_S, oldest=False)
            version = publication.manifest.policy_version


def admitted_as(admission: Admission, of_version: Callable[[int], Group]) -> Group:
    own = {"group_id": admission.group_id, "task_id": admission.task.task_id, "attempt": admission.attempt}
    return replace(of_version(admission.min_policy_version), **own)


def made_up(answers: int, tokens: int, version: int) -> Group:
    """Every other answer is right."""
    each = [
        Trajectory(
            prompt_tokens=[1] * 16,
            response_tokens=[2] * tokens,
            loss_mask=[True] * tokens,
            behavior_logprobs=[-1.0] * tokens,
            policy_versions=[version] * tokens,
            reward=float(i % 2),
            finish_reason="stop",
            text="",
        )
        for i in range(answers)
    ]
    return Group.of(each, group_id=0, task_id="")


def settings(folder: Path, args: argparse.Namespace) -> Config:
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(10, 60)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config("quickstart", [], recipe="async_rl")
    assert config.model.init is not None
    model = build_model_dir(config.model.init, ["0 1 2"] * 9, folder / "model", seed=0, dtype="float32")
    each = args.generators * GROUPS_EACH
    return load_config(
        "quickstart",
        [
            "stages=null",
            "model.init=null",
            f"model.path={model}",
            "task={name: jsonl, path: " + str(folder / "tasks.jsonl") + "}",
            f"rollout.num_generators={args.generators}",
            f"rollout.max_response_tokens={args.tokens}",
            f"rollout.max_model_len={args.tokens + 64}",
            "rollout.engine.name=hf",
            f"algorithm.group_size={args.answers}",
            "staleness.max_policy_lag=4",
            f"train.groups_per_step={each}",
            f"train.steps={max(2, -(-args.groups // each))}",
            "monitor.suspects=false",
            "monitor.rollouts_per_step=0",
            f"explorer.folder={folder / 'meeting'}",
        ],
        recipe="async_rl",
    )


class Marks:
    """Prints a line at each power of ten from 10^4 on, and at the end."""

    def __init__(self, *pids: int) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._next = 10**4
        self._done, self._since, self._used = 0, time.monotonic(), self._cpu_s()

    def _cpu_s(self) -> list[float]:
        return [sum(p.cpu_times()[:2]) for p in self._processes]

    def at(self, done: int, *, last: bool = False, **more: Any) -> None:
        if done < self._next and not last:
            return
        now, used = time.monotonic(), self._cpu_s()
        number = max(1, done - self._done)
        row = {
            "groups": done,
            "groups_per_s": round(number / (now - self._since), 1),
            "us_per_group": [round(1e6 * (u - b) / number) for u, b in zip(used, self._used, strict=True)],
            "own_mib": [round(p.memory_full_info().uss / 2**20, 1) for p in self._processes],
        }
        print(json.dumps(row | more), flush=True)
        self._done, self._since, self._used = done, now, used
        self._next *= 10


async def measure(args: argparse.Namespace, folder: Path) -> None:
    config = settings(folder, args)
    through_folder = args.through == "folder"
    if through_folder:
        config = config.of_half("generators")
    room = {"max_concurrency": calls_at_once(config)}
    buffer: Any = ReplayBufferRemote.options(**room).remote(
        config, role="replay", log_file=folder / "replay.log", meets=through_folder
    )
    server: Any = ParameterServerRemote.options(**room).remote(
        keep=1, role="param_server", log_file=folder / "param_server.log", log_level="INFO"
    )
    (_, pid), (_, server_pid) = await buffer.answer.remote(), await server.answer.remote()
    names = [f"generator-{i}" for i in range(args.generators)]
    making: Any = ray.remote(Generators)
    shares = {i: names[i::NUM_PROCESSES] for i in range(min(NUM_PROCESSES, args.generators))}
    parts = config.meeting_folder if through_folder else (buffer, server)
    shape = {"answers": args.answers, "tokens": args.tokens, "at_once": args.at_once}
    many: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 10 * args.generators}
    processes = [making.options(**many).remote(share, parts, **shape) for share in shares.values()]
    await announce(buffer, server, 0)
    hosting = asyncio.ensure_future(as_coroutine(buffer.host.remote())) if through_folder else None
    begun, asking = time.monotonic(), [asyncio.ensure_future(as_coroutine(each.run.remote())) for each in processes]
    marks, done, lost = Marks(pid, server_pid), 0, 0
    for step in range(1, (config.train.steps or 0) + 1):
        batch = await buffer.take_batch.remote(DEADLINE_S)
        done += len(batch.group_ids)
        await buffer.trained.remote(batch.group_ids)
        await announce(buffer, server, step)
        if not through_folder and args.lost_every and done // args.lost_every > lost:
            lost = done // args.lost_every
            which = lost % len(shares)
            await processes[which].lose.remote(shares[which][lost % len(shares[which])], buffer)
        marks.at(done)
    wall_s = time.monotonic() - begun
    await buffer.close.remote()
    answers = await asyncio.gather(*asking)
    if hosting is not None:
        hosting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hosting
    admitted = sorted(s for seconds, _ in answers for s in seconds)
    marks.at(
        done,
        last=True,
        generators=args.generators,
        through=args.through,
        lost=lost,
        calls_per_s=round(sum(calls for _, calls in answers) / wall_s, 1),
        all_groups_per_s=round(done / wall_s, 1),
        admit_ms=[round(1000 * admitted[int(len(admitted) * q)], 1) for q in (0.5, 0.99)],
    )


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
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=GROUPS_EACH, help="groups in a delivery")
    parser.add_argument("--lost-every", type=int, default=1000, help="groups between two deaths; 0: none")
    parser.add_argument("--through", choices=["actors", "folder"], default="actors")
    args = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=500 * 2**20, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder)))
    ray.shutdown()


if __name__ == "__main__":
    main()
