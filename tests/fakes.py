"""What stands for the other parts in tests of one: an engine and its collector, a buffer's callers, a trainer rank."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from leeway.collector.clock import ActivityClock
from leeway.collector.collector import Collector
from leeway.collector.engine import EngineLost, LoadTimes, StagedWeights
from leeway.collector.progress import Progress
from leeway.collector.weight_sync import WeightSync
from leeway.config.flow import RolloutConfig
from leeway.config.inputs import EvalSampling
from leeway.config.sampling import Sampling, Samplings
from leeway.integrity import sealed
from leeway.param_server.server import ParameterServer
from leeway.replay.admission import AdmissionRule
from leeway.replay.buffer import ReplayBuffer
from leeway.replay.position import Position
from leeway.trainer.shards import write_safetensors
from leeway.types import Admission, Group, Task, Trajectory
from leeway.weights import Canary, CanaryGap, CanaryPrompts, Manifest, Publication, Tolerance, digest_of

# ------------------------------------------------------------------------------------- a collector and its engine

CANARY = Canary(CanaryPrompts(scored=[], cached=[]), [], [], [])


GREEDY = EvalSampling()


PROMPTER = SimpleNamespace(
    encode=lambda prompt: [1] * len(prompt), decode=lambda tokens: "".join(map(str, tokens)), stop_token_ids=[0]
)


class FakeEngine:
    """Samples two tokens per completion, all under the version that is loaded when it answers."""

    def __init__(self) -> None:
        self.version = -1
        self.requests: list[dict[str, Any]] = []
        self.canary_gate: asyncio.Event | None = None
        self.gap = 0.0
        self.dead = False
        self.shut_down = False
        self.progress, self.places, self.cache_tokens = Progress(), 256, 0

    async def generate(self, prompt_tokens: list[int], *, clock: Any = None, **sampling: Any) -> list[Any]:
        self.requests.append({"prompt": prompt_tokens, "version": self.version, **sampling})
        await asyncio.sleep(0)
        if self.dead:
            raise EngineLost("the inference engine died: core process exited")
        one = SimpleNamespace(
            tokens=[7, 0], logprobs=[-1.0, -0.1], policy_versions=[self.version] * 2, finish_reason="stop"
        )
        return [one] * sampling["n"]

    def stage(self, manifest: Manifest, places: Any = ()) -> StagedWeights:
        return StagedWeights(manifest, [])

    async def load_weights(self, staged: StagedWeights, *, in_flight: str, paused: Any) -> Any:
        with paused():
            self.version = staged.manifest.policy_version
        return LoadTimes(drain_s=0.0, pause_s=0.5)

    async def read_back(self, staged: StagedWeights) -> None: ...

    async def score(self, canary: Canary) -> CanaryGap:
        if self.canary_gate is not None:
            await self.canary_gate.wait()
        return CanaryGap(self.gap, self.gap, 0.0)

    def shutdown(self) -> None:
        self.shut_down = True


class Slots:
    """Hands out admissions as they are added; ends when told to."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Admission | None] = asyncio.Queue()
        self.ended = False
        self.limits: list[int] = []
        self.retried_ids: list[int] = []
        self.failures: dict[int, str] = {}
        self.given_back: list[str] = []

    async def give_back(self, reason: str) -> None:
        self.given_back.append(reason)

    def add(self, *min_policy_versions: int, first: int = 0) -> None:
        for i, version in enumerate(min_policy_versions, start=first):
            self.waiting.put_nowait(
                Admission(group_id=i, task=Task(task_id=f"task-{i}", prompt="2 + 2"), min_policy_version=version)
            )

    def end(self) -> None:
        self.waiting.put_nowait(None)

    async def admit(self, limit: int) -> list[Admission]:
        self.limits.append(limit)
        if self.ended:
            return []
        given = [await self.waiting.get()]
        while given[-1] is not None and len(given) < limit and not self.waiting.empty():
            given.append(self.waiting.get_nowait())
        self.ended = given[-1] is None
        admissions = [a for a in given if a is not None]
        return admissions if admissions or self.ended else await self.admit(limit)

    async def retried(self, admission: Admission) -> None:
        self.retried_ids.append(admission.group_id)

    async def fail(self, admission: Admission, reason: str) -> None:
        self.failures[admission.group_id] = reason


class Answer:
    """An environment: one request, one trajectory per completion. Subclasses misbehave."""

    async def rollout(self, task: Task, policy: Any) -> Any:
        prompt = policy.encode(task.prompt)
        return [Trajectory.from_completion(prompt, c, reward=1.0) for c in await policy.generate(task.prompt)]


class NothingToFetch:
    uses_held = False

    def places(self, publication: Publication) -> tuple[()]:
        return ()

    async def fetch(self, *_: Any, **__: Any) -> int:
        raise AssertionError("these publications have no buckets")


class Rig:
    def __init__(
        self, environment: Any = None, *, engine: Callable[[], FakeEngine] = FakeEngine, **changes: Any
    ) -> None:
        self.engine: Any = engine()
        self.server, self.slots = ParameterServer(), changes.pop("slots", None) or Slots()
        self.clock = ActivityClock()
        self.environment = environment or Answer()
        pull_settings = {
            "in_flight": "recompute",
            "tolerance": Tolerance(1e-4),
            "pull_every": 1,
            "deadline_s": 600.0,
            "max_failures": 0,
        }
        self.weight_sync = WeightSync(
            self.engine,
            self._pull,
            NothingToFetch(),
            paused=lambda: self.clock.doing("pause"),
            on_quarantine=lambda error: self.collector.discard(str(error)),
            **{k: changes.pop(k, v) for k, v in pull_settings.items()},  # type: ignore[arg-type]
        )
        rollout: dict[str, Any] = {
            "temperature": 0.7,
            "max_prompt_tokens": 8,
            "max_response_tokens": 4,
            "max_model_len": 12,
            "timeout_s": 600.0,
            "engine_stall_s": 600.0,
            "retries": 2,
        }
        algorithm = {"group_size": 2, "greedy_baseline": False}
        own = {"max_in_flight": 4, "seed": 11, "seeded": True}
        given = {**rollout, **algorithm, **own, **changes}
        own_way = Sampling(group_size=given.pop("group_size"), temperature=given["temperature"])
        self.collector = Collector(
            engine=self.engine,
            environment=self.environment,
            prompter=PROMPTER,
            weight_sync=self.weight_sync,
            clock=self.clock,
            admit=self.slots.admit,
            retried=self.slots.retried,
            give_back=self.slots.give_back,
            fail=self.slots.fail,
            rollout=RolloutConfig(**{name: given.pop(name) for name in rollout}),
            samplings=given.pop("samplings", None) or Samplings(default=own_way, by_taskset={}, shares={}),
            greedy_baseline=given.pop("greedy_baseline"),
            **given,
        )
        self.out: list[list[Group]] = []

    @property
    def group_ids(self) -> list[int]:
        return [g.group_id for batch in self.out for g in batch]

    async def _pull(self, newer_than: int, timeout_s: float) -> Publication | None:
        return await self.server.pull(newer_than=newer_than, timeout_s=timeout_s)

    async def publish(self, version: int) -> None:
        await self.server.publish(Publication(Manifest(version, [], [], CANARY, digest_of([])), []))
        await settle()

    async def collect(self) -> None:
        async for batch in self.collector.groups():
            self.out.append(batch)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def play(
    scenario: Callable[[Rig, asyncio.Task[None]], Awaitable[None]],
    environment: Any = None,
    *,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    limit_s: float = 120,
    **changes: Any,
) -> Rig:
    """Run `scenario` beside a collector and its weight sync, version 0 being served."""

    async def main() -> Rig:
        rig = Rig(environment, **changes)
        pulling = asyncio.create_task(rig.weight_sync.run())
        collecting = asyncio.create_task(rig.collect())
        try:
            async with asyncio.timeout(limit_s):
                await rig.publish(0)
                await scenario(rig, collecting)
        finally:
            pulling.cancel()
            collecting.cancel()
            await asyncio.gather(pulling, collecting, return_exceptions=True)
        return rig

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main())


def play_to_the_end(environment: Any, *, min_policy_versions: tuple[int, ...] = (0,), **changes: Any) -> Rig:
    async def scenario(rig, collecting):
        rig.slots.add(*min_policy_versions)
        rig.slots.end()
        await collecting

    return play(scenario, environment, **changes)


# ------------------------------------------------------------------------------------------ a buffer and its callers

SOON_S = 120.0


def trajectory(reward: float = 0.0, version: int = 0) -> Trajectory:
    return Trajectory(
        prompt_tokens=[1],
        response_tokens=[2, 3],
        loss_mask=[True, True],
        behavior_logprobs=[-1.0, -1.0],
        policy_versions=[version, version],
        reward=reward,
        finish_reason="stop",
        text="",
    )


def group(group_id: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    return Group.of(group_id=group_id, task_id=f"task-{group_id}", trajectories=[trajectory(r) for r in rewards])


def tasks_from(position: Position, stream: Iterator[Task]) -> Iterator[Task]:
    return (t for draw, t in enumerate(stream) if draw >= position.next_draw or draw in position.open_draws)


def buffer_of(
    *,
    num_tasks: int | None = None,
    num_batches: int | None = None,
    capacity: int = 64,
    operators=(),
    start: Position | None = None,
    num_collectors: int = 1,
    operated_elsewhere: Any = None,
    failed: Any = lambda error: None,
    tasks: Iterator[Task] | None = None,
    P=2,
    W=1,
    T=1,
    **rule,
) -> ReplayBuffer:
    ids = itertools.count() if num_tasks is None else range(num_tasks)
    settings: dict[str, int] = {
        "groups_per_batch": P,
        "updates_per_batch": 1,
        "publish_every": 1,
        "reorder_window": W,
        "target_lag": T,
        "max_lag": T,
    }
    return ReplayBuffer(
        tasks=tasks or tasks_from(start or Position(), (Task(task_id=f"task-{i}", prompt="") for i in ids)),
        start=start,
        rule=AdmissionRule(**(settings | rule)),
        num_batches=num_batches,
        capacity=capacity,
        operators=operators,
        operated_elsewhere=operated_elsewhere,
        failed=failed,
        num_collectors=num_collectors,
    )


async def admit(buffer: ReplayBuffer, limit: int = 100, collector: str = "") -> list[int]:
    return [a.group_id for a in await buffer.admit(limit, timeout_s=SOON_S, collector=collector)]


async def take_batch(buffer: ReplayBuffer) -> Any:
    return await buffer.take_batch(timeout_s=SOON_S)


async def waits(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a waiter and see that it waits."""
    task = asyncio.create_task(call)
    await still_waits(task)
    return task


async def still_waits(task: asyncio.Task[Any]) -> None:
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done(), f"expected to wait, but got {task.result()!r}"


async def goes_on(task: asyncio.Task[Any]) -> Any:
    return await asyncio.wait_for(task, 60)


# -------------------------------------------------------------------------------------------------- a trainer rank


class FakeRank:
    """Saves like a trainer rank, or fails of `fault` with what it saves half written.

    With `slow` nothing is on disk before `go_on` is set; what is written is what it held when saving began. With
    `copies` set, saving holds training up until `copied` is set.
    """

    def __init__(self, *, slow: bool = False) -> None:
        self.step, self.fault, self.slow, self.go_on = 0, None, slow, asyncio.Event()
        self.copies, self.copied = False, asyncio.Event()
        self.policy_version = SimpleNamespace(remote=self._version)
        self.begin_save = SimpleNamespace(remote=self._begin_save)
        self.finish_save = SimpleNamespace(remote=self._finish_save)
        self._begun: list[tuple[int, str | None, str | None]] = []

    async def _version(self) -> int:
        return self.step

    async def _begin_save(self, state: str | None, hf: str | None) -> dict[str, float]:
        assert not self._begun, "one save at a time"
        self._begun.append((self.step, state, hf))
        if self.copies:
            await self.copied.wait()
        return {"checkpoint/copy_s": 0.25}

    async def _finish_save(self) -> dict[str, float]:
        if self.slow:
            await self.go_on.wait()
        step, state, hf = self._begun.pop()
        if state is not None:
            self._write_state(Path(state), step)
        if hf is not None:
            Path(hf).mkdir(parents=True)
            if self.fault == "hf":
                raise OSError(28, "No space left on device")
            (Path(hf) / "model.safetensors").write_text(str(step))
        return {"checkpoint/write_s": 2.0}

    def _write_state(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True)
        if self.fault == "state":
            raise OSError(28, "No space left on device")
        sums = write_safetensors(folder / "shard-00000.safetensors", {}, metadata={"of": str(step)})[0]
        about = {"format": 2, "policy_version": step, "num_ranks": 1, "objective": {}}
        (folder / "state.json").write_text(sealed(about | {"files": [sums.as_json()], "tensors": {}}))
