"""The generating half of a run, for a training loop of one's own: batches out, policy versions in."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict
from transformers import PreTrainedModel

from ..collector.torchrl_keys import batch_under_torchrl_keys
from ..config import derive
from ..monitor import build_monitor
from ..monitor.logs import say
from ..runtime.launch import Launcher, transport_settings
from ..runtime.placement import assign_cores
from ..runtime.supervisor import Supervisor, together
from ..tasks.evalsets import build_evalsets
from ..tasks.prompting import Prompter
from ..tasks.taskset import build_taskset
from ..train_batch import TrainBatch
from ..trainer.bound import check_versions
from ..trainer.canary import score_canary
from ..trainer.families import load_model
from ..trainer.gather import Gatherer
from ..trainer.publish import Publisher
from ..transports.transport import open_transport
from ..weights import Publication
from .batch_feed import BatchFeed
from .canary import canary_prompts
from .context import StageContext
from .evaluation import by_set, evaluate, in_one_line
from .publishing import Publishing
from .rl_report import StepReport


class Rollouts:
    """Engines, replay buffer and parameter server of one stage; the caller trains `model`, in this process.

        async with driver.Rollouts(context) as rollouts:
            async for batch in rollouts.batches():
                ...  # one optimizer step on rollouts.model
                await rollouts.publish({"train/loss/policy": loss})

    Everything that the buffer and the weight sync guarantee holds for such a loop too: the bound on the lag, each group
    once, weights proven on both sides. It is one process on one device, takes one step on a batch, and neither saves
    nor resumes.
    """

    model: PreTrainedModel
    """The model at the stage's start, in float32, without dropout, as transformers computes it."""

    def __init__(self, context: StageContext) -> None:
        # A loss divides by what it is given, so nothing is left out.
        train = context.config.train.model_copy(update={"skip_zero_advantage": False})
        config = self._config = context.config.model_copy(update={"train": train})
        assert config.model.path is not None
        assert train.steps is not None, "OWN_LOOP_RULES"
        self._num_steps = train.steps
        self._context = context
        self._numbers = derive(config)
        supervisor = Supervisor(context.watch)
        self._launcher = Launcher(config, context.recipe, run_dir=context.dir, supervisor=supervisor)
        self._parts = self._launcher.parts
        self._tasks = build_taskset(config.task, seed=config.seed, split="train", eval_config=config.eval)
        self._evalsets = build_evalsets(config)
        self._canary = canary_prompts(config, Prompter.of(config.model), self._tasks.tasks)
        self._monitor = build_monitor(
            context.dir, config.monitor, config.written(), train.steps, f"{config.name} / {context.name}"
        )
        self._transport = open_transport(transport_settings(config, context.dir.absolute()))
        self._publishing = Publishing(config, self._parts, report=self._log, keep=lambda _: None, uploads=self._uploads)
        self._publisher: Publisher | None = None
        self._metrics: dict[str, float] = {}
        self.version = 0

    async def __aenter__(self) -> Rollouts:
        try:
            await self._start()
        except BaseException:
            await self._stop("failed")
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and issubclass(kind, asyncio.CancelledError)
        await self._stop("done" if kind is None else "interrupted" if interrupted else "failed")

    async def batches(self) -> AsyncIterator[LazyStackedTensorDict]:
        """A batch for each of `train.steps` optimizer steps, see `batch_under_torchrl_keys`; fewer if tasks run out.

        The next one is collected while one is trained on. Raises `StalenessError` if a token is outside of the bound,
        and RuntimeError if the version before was not published.
        """
        collecting = self._parts.generators.always(lambda actor: actor.collect.remote(), drains=True)
        feed = BatchFeed(self._config, self._parts)
        upcoming = feed.ask()
        for version in range(self._num_steps):
            if self.version != version:
                raise RuntimeError(
                    f"batches: got version {self.version}, expected {version}: publish() after each batch"
                )
            refs = await feed.complete(upcoming)
            if refs is None:
                break
            upcoming = feed.ask()
            ((share,),) = refs.steps
            batch = await self._wait(share, "replay")
            check_versions(batch, policy_version=version, bound=self._numbers.max_policy_lag, num_buffers=0)
            self._metrics = refs.metrics | _lags(batch, version)
            self._monitor.rollouts(version + 1, refs.rollouts[0])
            self._monitor.suspects(version + 1, refs.suspects)
            yield batch_under_torchrl_keys(batch)
            replay = await self._wait(self._parts.buffer.trained.remote(refs.group_ids), "replay")
            await self._log(StepReport(self.version, replay))
        await self._wait(self._parts.buffer.close.remote(), "replay")
        await self._wait(collecting.wound_up(), "generators")

    async def publish(self, metrics: dict[str, float] | None = None) -> None:
        """Hand out the model's weights of this moment as the next version, and log `metrics` at that step.

        Returns when they are copied, and engines can pull the version before: the next step may change them.
        """
        self.version += 1
        await self._hand_out()
        await self._log(StepReport(self.version, {**self._metrics, **(metrics or {})}))

    async def evaluate(self) -> dict[str, Any]:
        """The current version on the held-out tasks, once every engine serves it; {} if there are none."""
        await self._publishing.finish()
        await self._publishing.wait_engines_at(self.version)
        if not self._evalsets:
            return {}
        metrics, _ = await evaluate(self._config, self._parts, self._evalsets, policy_version=self.version)
        self._monitor.log(self.version, metrics, role="evaluation")
        numbers = by_set(metrics, self._evalsets)
        say(f"{self._context.name}: held-out {in_one_line(numbers)} at version {self.version}")
        return numbers

    async def _start(self) -> None:
        config, launcher = self._config, self._launcher
        say(f"{self._context.name}: starting {config.rollout.num_generators} generator(s)")
        await asyncio.gather(  # begun in this order: collectors are given the handles of the first two
            launcher.param_server(), launcher.buffer(), launcher.generators(), asyncio.to_thread(self._load)
        )
        self._parts.generators.always(lambda actor: actor.sync_weights_loop.remote())
        await self._hand_out()
        await self._publishing.finish()
        await self._publishing.wait_engines_at(0)

    def _load(self) -> None:
        config, device = self._config, torch.device(self._config.cluster.device)
        if threads := len(assign_cores(config, self._context.recipe).trainers[0]):
            torch.set_num_threads(threads)
        torch.manual_seed(config.seed)
        scoring = load_model(
            str(config.model.path),
            attn=config.model.attn,
            packing="padded",
            max_length=config.rollout.max_model_len,
            device=device,
        )
        self.model = scoring.lm
        meeting = f"file://{tempfile.mkdtemp(prefix='ranks-')}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        weights, timeout_s = config.param_server, config.cluster.step_timeout_s
        gatherer = Gatherer(
            scoring,
            dtype=getattr(torch, config.model.dtype),
            bucket_bytes=weights.bucket_mb * 2**20,
            timeout_s=timeout_s,
        )
        self._publisher = Publisher(
            gatherer, transport=self._transport, checksum=weights.checked_with, timeout_s=timeout_s
        )
        self._score = functools.partial(score_canary, scoring, self._canary, device)

    def _copy(self) -> None:
        assert self._publisher is not None, "async with"
        self._publisher.begin(self.version)
        with torch.no_grad():
            self._publisher.score(self._score)

    async def _hand_out(self) -> None:
        await asyncio.to_thread(self._copy)
        await self._publishing.begin(self.version)

    def _uploads(self) -> asyncio.Future[list[Publication | None]]:
        assert self._publisher is not None, "async with"
        return together([asyncio.wrap_future(self._publisher.claim())])  # claimed now: the next one replaces it

    async def _stop(self, status: str) -> None:
        try:
            await self._parts.stop()
        finally:
            if self._publisher is not None:
                self._publisher.close()
            self._transport.close()
            self._monitor.close(status)
            if dist.is_initialized():
                dist.destroy_process_group()

    async def _log(self, report: StepReport) -> None:
        self._monitor.log(report.step, report.metrics)

    async def _wait(self, call: Any, what: str) -> Any:
        return await self._parts.supervisor.wait(call, what=what, timeout_s=self._config.cluster.step_timeout_s)


def _lags(batch: TrainBatch, version: int) -> dict[str, float]:
    lags = (version - batch.policy_versions[batch.loss_mask]).float()
    return {f"train/policy_lag/{name}": float(getattr(lags, name)()) for name in ("mean", "max", "min")}
