"""The training loop of async_rl over a real trainer actor whose steps take no time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from leeway.config import find_recipe, load_config
from leeway.driver.context import StageContext
from leeway.driver.rl_report import StepReport
from leeway.driver.rl_run import RLRun
from leeway.driver.rl_stage import RLStage
from leeway.failures import PartFailed
from leeway.recipes.async_rl import train
from leeway.replay.actor import BatchRefs
from leeway.runtime.supervisor import Supervisor
from leeway.trainer.actor import TrainerActor
from leeway.trainer.publish import Publisher
from leeway.transports.object_store import ObjectStore
from leeway.weights import BucketPlan, Canary, CanaryPrompts, Publication, plan_buckets

from .standing import generators_of
from .test_staleness_property import VirtualClock

STEPS, UPDATES = 200, 4
SHARE: Any = SimpleNamespace(
    response_tokens=torch.zeros(5), response_lengths=torch.tensor([2, 3]), recorded=torch.tensor([[0, 1]])
)
STEP_TIMEOUT_S = load_config("quickstart", [], recipe="async_rl").cluster.step_timeout_s


class OneWeight:
    """Stands for a `Gatherer`: of a model whose only weight is its version."""

    def __init__(self, trainer: NoTime) -> None:
        self._trainer = trainer
        (self._plan,) = plan_buckets([(("w",), torch.int64, (1,))], 64)

    def new_parts(self) -> list[torch.Tensor]:
        return [self._plan.empty()]

    def copy_parts(self, into: list[torch.Tensor]) -> Callable[[], None]:
        self._plan.spans[0].tensor(into[0]).fill_(self._trainer.policy_version)
        return lambda: None

    def new_bucket(self) -> torch.Tensor:
        return torch.empty(0)

    def gather(self, index: int, part: torch.Tensor, into: torch.Tensor) -> tuple[BucketPlan, torch.Tensor]:
        return self._plan, part

    def as_published(self, plan: BucketPlan, memory: torch.Tensor) -> tuple[BucketPlan, torch.Tensor]:
        return plan, memory


class NoTime:
    """A trainer that computes nothing and publishes its version. `put`: what takes over a bucket."""

    def __init__(self, put: Callable[[np.ndarray], Any] = np.copy) -> None:
        self.policy_version = 0
        gatherer: Any = OneWeight(self)
        transport = ObjectStore(put, np.copy)  # type: ignore[arg-type]
        self._publisher = Publisher(gatherer, transport=transport, checksum="xxh3_128", timeout_s=20)

    device = torch.device("cpu")

    def forward_backward(self, batch: Any, logprobs_out: torch.Tensor | None = None) -> dict[str, float]:
        if logprobs_out is not None:
            logprobs_out.copy_(-torch.arange(len(logprobs_out)) - 10 * self.policy_version)
        return {}

    def optim_step(self) -> dict[str, float]:
        self.policy_version += 1
        return {}

    def begin_publish(self) -> dict[str, float]:
        self._publisher.begin(self.policy_version)
        return {}

    def score_canary(self) -> None:
        self._publisher.score(lambda: Canary(CanaryPrompts(scored=[], cached=[]), [], [], []))

    def claim_publication(self) -> Future[Publication | None]:
        return self._publisher.claim()


class Remote:
    """Calls of an actor as Ray makes them: each begins in the order in which it was made."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(getattr(self._actor, name)(*args)))


class Elsewhere:
    """The buffer, the parameter server, the log and the checkpoints: they answer at once and remember what they got."""

    def __init__(self) -> None:
        self.published_versions: list[int] = []
        self.saved: list[str] = []
        self.reports: list[StepReport] = []

    async def take_batch(self, timeout_s: float) -> BatchRefs:
        rollouts = [[{"text": f"of update {i}"}] for i in range(UPDATES)]
        return BatchRefs(index=0, group_ids=[0], steps=[[SHARE]] * UPDATES, metrics={}, rollouts=rollouts)

    async def trained(self, group_ids: Any) -> dict[str, float]:
        return {}

    async def published(self, version: int) -> None:
        self.published_versions.append(version)

    async def publish(self, publication: Publication) -> None:
        held = publication.bucket_refs[0].view(np.int64)[0]
        assert held == publication.manifest.policy_version, "the weights of another version"

    async def put(self, report: StepReport) -> None:
        self.reports.append(report)

    async def after_step(self, version: int) -> dict[str, float]:
        self.saved.append(f"after {version}")
        return {}

    async def at_end(self, *, interrupted: bool = False) -> None:
        self.saved.append("interrupted" if interrupted else "end")


def run_over(trainer: Any, elsewhere: Elsewhere, *, total_steps: int, tmp_path: Path, publish_every: int = 1) -> RLRun:
    actor = TrainerActor(role="trainer-0", log_file=tmp_path / "log", log_level="ERROR", cores=[])
    actor._trainer = trainer
    parts: Any = SimpleNamespace(
        trainers=[Remote(actor)],
        **generators_of(),
        buffer=Remote(elsewhere),
        param_server=Remote(elsewhere),
        supervisor=Supervisor(),
    )
    config = load_config(
        "quickstart",
        [
            f"stages.async_rl.train.updates_per_batch={UPDATES}",
            f"staleness.max_policy_lag={UPDATES}",
            f"param_server.publish_every={publish_every}",
            "eval.every=0",
        ],
        recipe="async_rl",
    )
    there: Any = elsewhere
    return RLRun(config, parts, name="rl", version=0, total_steps=total_steps, report=there, checkpoints=there)


@pytest.mark.slow
def test_steps_that_take_no_time_are_all_published_each_with_its_own_weights(tmp_path: Path) -> None:
    async def main() -> None:
        elsewhere = Elsewhere()
        run = run_over(NoTime(), elsewhere, total_steps=STEPS, tmp_path=tmp_path)
        await train(run)
        await run.finish()
        assert elsewhere.published_versions == list(range(1, STEPS + 1))
        assert elsewhere.saved == [f"after {v}" for v in range(UPDATES, STEPS + 1, UPDATES)], "only between batches"
        steps = [r for r in elsewhere.reports if r.batch_metrics is not None]
        assert [r.step for r in steps] == list(range(1, STEPS + 1))
        assert [r.begins_batch for r in steps] == [True, False, False, False] * (STEPS // UPDATES)
        assert [r.rollouts for r in steps[4:6]] == [
            [{"text": "of update 0", "trainer_logprobs": [-42.0, -43.0, -44.0]}],
            [{"text": "of update 1", "trainer_logprobs": [-52.0, -53.0, -54.0]}],
        ], "those that the step trained on, with what its pass computed"

    asyncio.run(main())


@pytest.mark.slow
def test_a_stage_that_is_interrupted_while_it_starts_is_no_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monitor = SimpleNamespace(close=closed.append, run_dir=tmp_path)
    for name, stands_for in {"build_monitor": monitor, "build_taskset": None, "build_evalsets": []}.items():
        monkeypatch.setattr(f"leeway.driver.rl_stage.{name}", lambda *_, it=stands_for, **__: it)
    monkeypatch.setattr("leeway.driver.rl_stage.Prompter", SimpleNamespace(of=lambda model: None))
    config = load_config("quickstart", [], recipe="async_rl").with_model_path("m")
    context = StageContext(name="rl", recipe=find_recipe("async_rl"), config=config, dir=tmp_path)
    launcher: Any = SimpleNamespace(parts=SimpleNamespace())
    stage = RLStage(context, launcher)

    async def interrupt() -> None:
        monkeypatch.setattr(stage, "_launch", asyncio.Event().wait)
        running = asyncio.create_task(stage.run(train))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    asyncio.run(interrupt())
    assert closed == ["interrupted"]


def test_parts_of_a_batch_are_trained_before_its_step_and_after_the_one_before(tmp_path: Path) -> None:
    done: list[tuple[str, int]] = []

    class Noted(NoTime):
        def add_part(self, batch: Any, logprobs_out: torch.Tensor | None = None) -> None:
            done.append(("part", self.policy_version))
            if logprobs_out is not None:
                logprobs_out.fill_(-1.0)

        def forward_backward(self, batch: Any, logprobs_out: torch.Tensor | None = None) -> dict[str, float]:
            done.append(("step", self.policy_version))
            return {}

    class InParts(Elsewhere):
        left = 2

        async def take_part(self, at_least: int, timeout_s: float) -> list[Any] | None:
            assert at_least == 5
            self.left -= 1
            return [SHARE] if self.left >= 0 else None

        async def take_batch(self, timeout_s: float) -> BatchRefs:
            self.left = 2
            rest: Any = SimpleNamespace(recorded=None)
            return BatchRefs(index=0, group_ids=[0], steps=[[rest]], metrics={}, rollouts=[[{"text": "of a part"}]])

    async def main() -> None:
        elsewhere = InParts()
        run = run_over(Noted(), elsewhere, total_steps=2, tmp_path=tmp_path)
        run.config = run.config.model_copy(
            update={"train": run.config.train.model_copy(update={"stream_groups": 5, "updates_per_batch": 1})}
        )
        await train(run)
        await run.finish()
        assert done == [("part", 0), ("part", 0), ("step", 0), ("part", 1), ("part", 1), ("step", 1)]
        rows = [r.rollouts for r in elsewhere.reports if r.batch_metrics is not None]
        assert rows == [[{"text": "of a part", "trainer_logprobs": [-1.0, -1.0, -1.0]}]] * 2

    asyncio.run(main())


def test_an_interrupted_step_ends_is_saved_and_is_reported_once(tmp_path: Path) -> None:
    class Slow(NoTime):
        """Its third step takes until it is told to end."""

        may_end = threading.Event()
        in_third = threading.Event()

        def forward_backward(self, batch: Any, logprobs_out: torch.Tensor | None = None) -> dict[str, float]:
            if self.policy_version == 2:
                self.in_third.set()
                assert self.may_end.wait(200)
            return {"train/of_step": float(self.policy_version + 1)}

    async def main() -> None:
        elsewhere, slow = Elsewhere(), Slow()
        run = run_over(slow, elsewhere, total_steps=STEPS, tmp_path=tmp_path)
        training = asyncio.create_task(train(run))
        assert await asyncio.to_thread(slow.in_third.wait, 200)
        training.cancel()
        await asyncio.wait({training})
        ending = asyncio.create_task(run.interrupted())
        await asyncio.sleep(0.01)
        assert "interrupted" not in elsewhere.saved, "ranks are still in the step"
        slow.may_end.set()
        last = await ending
        assert elsewhere.saved[-1] == "interrupted"
        assert last is not None
        assert (last.step, last.metrics["train/of_step"]) == (3, 3.0)
        assert [r.step for r in elsewhere.reports if r.batch_metrics is not None] == [1, 2]

    asyncio.run(main())


class InStep(NoTime):
    """Its third step takes until it is told to end. `put` gets every bucket, of version 2 while that step is on."""

    def __init__(self, put: Callable[[np.ndarray], Any]) -> None:
        super().__init__(put)
        self.may_end, self.in_third = threading.Event(), threading.Event()

    def forward_backward(self, batch: Any, **inputs: Any) -> dict[str, float]:
        if self.policy_version == 2:
            self.in_third.set()
            assert self.may_end.wait(200)
        return {}


@pytest.mark.slow
def test_a_publication_that_fails_beside_a_step_ends_the_run_and_is_named(tmp_path: Path) -> None:
    def put(bucket: np.ndarray) -> np.ndarray:
        if bucket.view(np.int64)[0] == 2:
            assert slow.in_third.wait(200)
            raise OSError("the object store is full")
        return bucket.copy()

    slow = InStep(put)

    async def main() -> None:
        elsewhere = Elsewhere()
        run = run_over(slow, elsewhere, total_steps=STEPS, tmp_path=tmp_path)
        with pytest.raises(PartFailed, match="trainer-0: OSError: the object store is full"):
            await asyncio.wait_for(train(run), 200)
        assert run.version == 2, "it did not wait for the step"
        assert elsewhere.published_versions == [1]
        slow.may_end.set()
        assert run._stepping is not None
        await run._stepping

    asyncio.run(main())


def test_an_interrupt_waits_for_the_step_and_not_for_what_is_being_published(tmp_path: Path) -> None:
    ended = threading.Event()

    def put(bucket: np.ndarray) -> np.ndarray:
        assert ended.wait(200)
        return bucket.copy()

    slow = InStep(put)

    async def main() -> None:
        elsewhere = Elsewhere()
        run = run_over(slow, elsewhere, total_steps=STEPS, tmp_path=tmp_path, publish_every=2)
        training = asyncio.create_task(train(run))
        assert await asyncio.to_thread(slow.in_third.wait, 200)
        training.cancel()
        await asyncio.wait({training})
        slow.may_end.set()
        last = await asyncio.wait_for(run.interrupted(), 200)
        assert last is not None
        assert last.step == 3
        assert elsewhere.saved[-1] == "interrupted"
        assert elsewhere.published_versions == []
        ended.set()

    asyncio.run(main())


def test_a_step_is_over_before_its_canary_is_scored_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    class SlowCanary(NoTime):
        may_score = threading.Event()
        scored: ClassVar[list[int]] = []

        def score_canary(self) -> None:
            assert self.may_score.wait(200)
            self.scored.append(self.policy_version)
            super().score_canary()

    async def main() -> None:
        actor = TrainerActor(role="trainer-0", log_file=tmp_path / "log", log_level="ERROR", cores=[])
        actor._trainer = trainer = SlowCanary()
        batch = SHARE
        await asyncio.wait_for(actor.train_step(batch, True), 200)
        published = asyncio.ensure_future(actor.publication())
        second = asyncio.ensure_future(actor.train_step(batch, False))
        await asyncio.sleep(0.5)  # which the second has begun to wait in
        assert (trainer.policy_version, trainer.scored) == (1, [])
        assert not published.done()
        trainer.may_score.set()
        assert (await asyncio.wait_for(second, 200)).metrics["step/publish_s"] > 0.05, "what it waited for the canary"
        publication = await asyncio.wait_for(published, 200)
        assert publication is not None
        assert (publication.manifest.policy_version, trainer.scored) == (1, [1])

    asyncio.run(main())


class Buffer(Elsewhere):
    """Its batch comes after `batch_s`; it answers a ping after `ping_s`."""

    def __init__(self, *, batch_s: float, ping_s: float) -> None:
        super().__init__()
        self._batch_s, self._ping_s = batch_s, ping_s

    async def take_batch(self, timeout_s: float) -> BatchRefs:
        await asyncio.sleep(self._batch_s)
        return await super().take_batch(timeout_s)

    async def ping(self) -> None:
        await asyncio.sleep(self._ping_s)


def first_batch(tmp_path: Path, buffer: Buffer) -> tuple[Any, float]:
    """(the first batch or the failure, after how many seconds)."""

    async def main() -> tuple[Any, float]:
        run = run_over(NoTime(), buffer, total_steps=STEPS, tmp_path=tmp_path)
        try:
            got: Any = await anext(aiter(run.batches()))
        except PartFailed as failure:
            got = failure
        return got, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main())


def test_the_driver_waits_for_a_batch_as_long_as_the_buffer_answers(tmp_path: Path) -> None:
    batch, after_s = first_batch(tmp_path, Buffer(batch_s=5 * STEP_TIMEOUT_S, ping_s=1))
    assert (batch.group_ids, after_s) == ([0], 5 * STEP_TIMEOUT_S)


def test_the_driver_ends_the_run_when_the_buffer_does_not_answer(tmp_path: Path) -> None:
    failure, after_s = first_batch(tmp_path, Buffer(batch_s=1e9, ping_s=1e9))
    assert "replay: no answer" in str(failure)
    assert after_s <= STEP_TIMEOUT_S + 60
