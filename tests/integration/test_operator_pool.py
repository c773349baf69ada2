"""The operator pool with real processes: what crosses, what dies, what hangs, what raises."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leeway.replay import operator_pool
from leeway.replay.operator_pool import OperatorPool
from leeway.replay.operators import OperatorFailed, Pipeline
from leeway.types import Group, Trajectory, Turn

from ..fakes import SOON_S, admit, buffer_of, group, take_batch
from ..forked import Forked
from .conftest import ANY_ENGINE, DIGITS_LAST

JUDGED = """
import os, signal, time
from dataclasses import replace
from pathlib import Path

def judged(group, *, folder, kills):
    '''Changes every reward, and takes longest for the group that came first. Two groups end their process.'''
    time.sleep(0.05 * (3 - group.group_id % 4))
    if kills and group.group_id in (2, 5) and not list(Path(folder).glob(f"{group.group_id}.killed")):
        (Path(folder) / f"{group.group_id}.killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (Path(folder) / f"{group.group_id}.{os.getpid()}").touch()
    rewards = zip(group.rewards, group.texts)
    return replace(group, rewards=[reward + 0.01 * i + 0.001 * len(text) for i, (reward, text) in enumerate(rewards)])
"""
OPERATORS = """
import os, signal, time
from dataclasses import replace
from pathlib import Path

def in_turn(group, *, folder):
    '''Waits until it may go on, so that a test decides when.'''
    print("printed where it can do no harm")
    (Path(folder) / f"{group.group_id}.{os.getpid()}.begun").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)

def misbehaves(group):
    if group.group_id == 1:
        raise KeyError(group.texts[0])
    if group.group_id == 2:
        return replace(group, rewards=[float("nan")] * len(group))
    if group.group_id == 3:
        time.sleep(10000)
    if group.group_id == 4:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_ops.py").write_text(OPERATORS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_ops", None)


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that have imported what this one has, where their start, which takes seconds, is not tested."""

    def start(command: list[str], *, env: dict[str, str], stdin: int, pass_fds: list[int]) -> Forked:
        assert command[2:4] == ["-m", "leeway.replay.operator_process"]
        code = "from leeway.replay.operator_process import main; main()"
        with open(os.devnull, "r+b") as nothing:
            return Forked(code, "3", env=env, stdin=nothing, stdout=nothing, more=pass_fds)

    instead = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(operator_pool, "subprocess", instead)


def with_pool(
    steps: list[Any], tmp_path: Path, scenario: Callable[[OperatorPool], Awaitable[None]], **settings: Any
) -> None:
    async def play() -> None:
        options = {"num_processes": 1, "timeout_s": SOON_S, **settings}
        pool = OperatorPool(steps, log_file=tmp_path / "logs/replay.log", **options)
        try:
            await scenario(pool)
        finally:
            pids = pool.process_ids()
            pool.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    asyncio.run(play())


LIMIT_S = 900.0
"""A process loads torch: seconds, and on a busy machine minutes."""


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"it never came: {what}"
        await asyncio.sleep(0.01)


def agents_group() -> Group:
    """With all that a group may have beside its tokens."""
    answers = [
        Trajectory(
            prompt_tokens=[1, 2],
            response_tokens=[5, 6, 7],
            loss_mask=[True, False, True],
            behavior_logprobs=[-0.125, 0.0, -1 / 3],
            policy_versions=[3, -1, 4],
            reward=reward,
            finish_reason="length" if reward else "stop",
            text="\x1b[31m\u4f60 }{",
            metrics={"a": 0.1},
            turns=[Turn(start=0, stop=1, state="s", reward=0.5)],
            token_tensors={"kept": torch.arange(6, dtype=torch.int32).view(3, 2)},
        )
        for reward in (0.0, 1 / 3, 1e-300)
    ]
    return Group.of(answers, group_id=7, task_id="t/\u00e9", greedy_reward=0.25, environment_s=1.5, attempt=2)


def test_groups_cross_bit_for_bit_and_the_pool_does_what_the_pipeline_does(tmp_path: Path) -> None:
    mixed = ["mask_truncated", {"shape_reward": {"scale": 1.0}}, {"filter_reward": {"max": 0.5}}]

    async def scenario(pool: OperatorPool) -> None:
        await pool.start()
        here = Pipeline(mixed)
        groups = [agents_group(), group(1, (1.0, 1.0)), group(2, (0.0, 0.25))]
        results = await asyncio.gather(*(pool.apply(g) for g in groups))
        for own, found in zip(groups, results, strict=True):
            assert found == here(own)
            if isinstance(found, Group):
                assert found.rewards == here(own).rewards  # type: ignore[union-attr]
        assert results[1] == "mean reward out of range"
        assert results[2] is groups[2], "what no operator changed does not come back"
        counted = {name: value for name, value in pool.metrics().items() if not name.startswith("replay/operators")}
        fresh = Pipeline(mixed)
        for own in groups:
            fresh(own)
        assert counted == fresh.counts()
        assert counted["replay/filtered_by/filter_reward"] == 1
        assert counted["replay/changed_by/mask_truncated"] == 1

    with_pool(mixed, tmp_path, scenario)


@pytest.mark.usefixtures("forked_processes")
def test_groups_are_worked_on_at_the_same_time_and_the_buffer_answers_meanwhile(tmp_path: Path) -> None:
    """The second in line is done first where the first is slow, and the batch is in admission order all the same."""

    async def scenario(pool: OperatorPool) -> None:
        await pool.start()
        buffer = buffer_of(operated_elsewhere=pool.apply, P=2, T=0)
        await buffer.published(0)
        await admit(buffer)
        await buffer.put([group(0), group(1)])
        await until(lambda: len(list(tmp_path.glob("*.begun"))) == 2, "both have begun")
        assert len({path.name.split(".")[1] for path in tmp_path.glob("*.begun")}) == 2, "in two processes"
        assert (buffer.stats().groups_ready, pool.metrics()["replay/operators/groups"]) == (0, 2)
        (tmp_path / "go").touch()
        assert (await take_batch(buffer)).group_ids == [0, 1]
        assert pool.metrics()["replay/operators/seconds"] > 0

    with_pool([{"my_ops:in_turn": {"folder": str(tmp_path)}}], tmp_path, scenario, num_processes=2)


@pytest.mark.usefixtures("forked_processes")
def test_a_killed_process_is_replaced_and_its_group_done_again(tmp_path: Path) -> None:
    async def scenario(pool: OperatorPool) -> None:
        buffer = buffer_of(operated_elsewhere=pool.apply, P=2, T=0)
        await buffer.published(0)
        await admit(buffer)
        await buffer.put([group(0), group(1)])
        await until(lambda: len(list(tmp_path.glob("0.*.begun"))) == 1, "the first has begun")
        (first,) = pool.process_ids()
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(list(tmp_path.glob("0.*.begun"))) == 2, "it is done again, before the second")
        assert not list(tmp_path.glob("1.*.begun"))
        (tmp_path / "go").touch()
        assert (await take_batch(buffer)).group_ids == [0, 1]
        assert pool.process_ids() != [first]
        assert pool.metrics()["replay/operators/replaced"] == 1
        assert buffer.stats().slots_in_use == 0

    with_pool([{"my_ops:in_turn": {"folder": str(tmp_path)}}], tmp_path, scenario)


@pytest.mark.usefixtures("forked_processes")
def test_what_raises_or_hangs_or_kills_every_process_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_pool, "MOST_DEATHS", 2)

    async def scenario(pool: OperatorPool) -> None:
        async def fails(group_id: int, message: str, *, note: str = "") -> None:
            with pytest.raises(OperatorFailed, match=message) as caught:
                await pool.apply(group(group_id))
            assert "\n" not in str(caught.value)
            assert note in "".join(getattr(caught.value, "__notes__", []))

        at = "my_ops:misbehaves"
        await fails(1, f"operator {at} failed on group 1 of task task-1: KeyError", note="raise KeyError(group.texts")
        await fails(2, f"operator {at} returned rewards .nan")
        pid = pool.process_ids()
        assert isinstance(await pool.apply(group(0)), Group), "such a process goes on"
        assert pool.process_ids() == pid
        await fails(3, rf"operator {at} took longer than 15 s for group 3 of task task-3 \(replay.operator_timeout_s")
        await fails(4, f"operator {at} ended its process 2 times .signal SIGKILL. at group 4 of task task-4")

    with_pool(["mask_truncated", "my_ops:misbehaves"], tmp_path, scenario, timeout_s=15.0)


@pytest.mark.usefixtures("forked_processes")
def test_wrong_options_end_the_start_by_name_and_the_process_ends_with_its_owner(tmp_path: Path) -> None:
    async def starts(pool: OperatorPool) -> None:
        with pytest.raises(OperatorFailed, match=r"replay\.operators: 'dedupe'.*unexpected keyword argument 'keep'"):
            await pool.start()

    async def orphaned(pool: OperatorPool) -> None:
        await pool.start()
        (pid,) = pool.process_ids()
        asking = asyncio.create_task(pool.apply(group(3)))
        await until(lambda: pool._workers[0].at == "my_ops:misbehaves", "it sleeps")
        monitor = os.pidfd_open(pid)
        pool._workers[0]._writer.close()  # type: ignore[union-attr]  # as the system does when the owner is killed
        ready, _, _ = await asyncio.to_thread(select.select, [monitor], [], [], LIMIT_S)
        os.close(monitor)
        assert ready, "the operator sleeps for ever, and its process with it"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    with_pool([{"dedupe": {"keep": 1}}], tmp_path, starts)
    with_pool(["my_ops:misbehaves"], tmp_path, orphaned)


@pytest.mark.timeout(900)
def test_a_run_whose_operators_have_processes_trains_the_same_weights(
    start: Any, from_untrained: list[str], of_sums: list[str], tmp_path: Path
) -> None:
    """In lockstep, side by side: one has a pool, whose processes die, where the other has its buffer do it."""
    (tmp_path / "my_judge.py").write_text(JUDGED)
    hashes, workers, groups = [], [], 4
    commands = []
    for number in (0, 2):
        folder = tmp_path / f"by-{number}"
        folder.mkdir()
        command = start(
            "async_rl", *from_untrained, *of_sums, *DIGITS_LAST, ANY_ENGINE,
            "stages.async_rl.train.steps=3", f"stages.async_rl.train.groups_per_step={groups}",
            "stages.async_rl.optimizer.warmup_steps=0", "staleness.max_policy_lag=0", "eval.at_start=false",
            "eval.at_end=false",
            f"replay.operators=[{{my_judge:judged: {{folder: '{folder}', kills: {str(number > 0).lower()}}}}}]",
            f"replay.operator_processes={number}", name=f"operators-{number}",
        )  # fmt: skip
        commands.append((number, command, folder))
    for number, command, folder in commands:
        run = command.wait(600)
        assert run.code == 0, run.output
        hashes.append(run.summary["weights_sha256"])
        done = [path.name.split(".") for path in folder.iterdir()]
        assert {int(group) for group, _ in done} >= set(range(3 * groups)), "the operator saw every group"
        workers.append({pid for _, pid in done} - {"killed"})
        assert min(run.series("train/reward/std")) > 0, "it changed rewards"
        assert max(run.series("replay/operators/replaced"), default=0) == number, "two groups ended their process"
    assert len(workers[0]) == 1 < len(workers[1])
    assert hashes[0] == hashes[1]
