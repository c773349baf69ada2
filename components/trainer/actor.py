"""One trainer rank as a Ray actor."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import ray

from .. import spans
from ..failures import Watched, as_text
from ..monitor.logs import log_to_file
from ..transports.transport import TransportSettings, WeightTransport, fetch_whole, open_transport
from ..weights import Publication

if TYPE_CHECKING:
    import torch

    from ..types import TrainBatch
    from .trainer import Trainer

T = TypeVar("T")


class TrainedStep(NamedTuple):
    """What a rank says of an optimizer step. `logprobs`: by row of the step's rollouts, those of its response tokens in
    the pass that was trained, of the rows in this rank's share.
    """

    metrics: dict[str, float]
    logprobs: dict[int, list[float]]


class TrainerActor(Watched):
    """Computes in one thread, in the order of the calls, and answers everything else in the meantime."""

    def __init__(self, *, role: str, log_file: Path, log_level: str, cores: list[int]) -> None:
        self.role = role
        log_to_file(log_file, log_level)
        if cores:
            os.sched_setaffinity(0, cores)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._step_inputs: deque[dict[str, Any]] = deque()
        self._logprobs: dict[int, list[float]] = {}  # of the step under way, see `TrainedStep`

    async def address(self) -> str:
        """The rendezvous address of the ranks; rank 0 provides it."""
        host = ray.util.get_node_ip_address()
        if host == "127.0.0.1":  # all ranks are here; torch's TCPStore would listen on every interface
            return f"file://{tempfile.mkdtemp(prefix='ranks-')}/meeting"
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"tcp://{host}:{port}"

    @as_text
    async def start(self, settings: Any, rank: int, init_method: str, transport: TransportSettings) -> dict[str, Any]:
        from transformers.utils import logging as transformers_logging

        from .actor_critic import make_trainer
        from .memory import keep_freed_memory

        transformers_logging.disable_progress_bar()
        if settings.cluster.device == "cpu":
            keep_freed_memory()
        self._settings = settings
        self._fetch_timeout_s = transport.timeout_s
        self._place = {"rank": rank, "init_method": init_method, "transport": _opened(transport)}
        self._trainer = await self._in_order(lambda: make_trainer(settings, **self._place))
        return {"pid": os.getpid(), "node": ray.util.get_node_ip_address()}

    async def devices(self) -> tuple[str, list[str]]:
        """(Ray's id of its node, the GPUs that Ray gave it)."""
        here = ray.get_runtime_context()
        return here.get_node_id(), [str(gpu) for gpu in here.get_accelerator_ids().get("GPU", [])]

    @as_text
    async def reset(self, settings: Any, transport: TransportSettings) -> None:
        """Another run with the same ranks."""
        from .actor_critic import make_trainer

        def another() -> Any:
            self._trainer.retire()
            del self._trainer  # before the next one is made: both would not fit
            gc.collect()
            return make_trainer(settings, **self._place)

        self._step_inputs.clear()
        self._logprobs = {}
        self._settings = settings
        self._place["transport"].close()
        self._place["transport"] = _opened(transport)
        self._trainer = await self._in_order(another)

    @as_text
    async def score_batch(self, *batches: TrainBatch) -> dict[str, float]:
        """Score a batch of several steps under the current weights, by policy or critic, for its later steps."""
        from .actor_critic import step_inputs

        def score() -> dict[str, float]:
            started = time.monotonic()
            needs_proximal = self._settings.objective.needs_proximal
            self._step_inputs = deque(step_inputs(self._trainer, batches, needs_proximal=needs_proximal))
            return {"step/proximal_s": time.monotonic() - started}

        return await self._in_order(score)

    @as_text
    async def audit(self, batch: TrainBatch, publication: Publication) -> dict[str, float]:
        """See `Trainer.audit`; `publication` is one that was kept."""
        buckets = await fetch_whole(self._place["transport"], publication, within_s=self._fetch_timeout_s)
        return await self._in_order(lambda: self._trainer.audit(batch, publication.manifest, buckets))

    @as_text
    async def train_part(self, batch: TrainBatch) -> None:
        """Add the gradient of a part of the next step, which `train_step` ends with the last one."""

        def part() -> None:
            logprobs = None if batch.recorded is None else _room_for_logprobs(batch, self._trainer)
            with spans.span("forward_backward", step=self._trainer.policy_version + 1):
                self._trainer.add_part(batch, logprobs_out=logprobs)
            if logprobs is not None:
                self._logprobs |= _as_rows(batch, logprobs)

        await self._in_order(part)

    @as_text
    async def train_step(self, batch: TrainBatch, publish: bool) -> TrainedStep:
        """forward_backward, optim_step and, if asked, what `publish` does.

        `step/publish_s`: what publishing costs a step, waiting for the last version's canary included.
        """
        asked = time.monotonic()

        def step() -> TrainedStep:
            canary_s = time.monotonic() - asked
            inputs = self._step_inputs.popleft() if self._step_inputs else {}
            step = self._trainer.policy_version + 1
            logprobs = None if batch.recorded is None else _room_for_logprobs(batch, self._trainer)
            if logprobs is not None:
                inputs["logprobs_out"] = logprobs
            with spans.span("forward_backward", step=step):
                metrics = self._trainer.forward_backward(batch, **inputs)
            with spans.span("optimizer", step=step):
                metrics |= self._trainer.optim_step()
            started = time.monotonic()
            if publish:
                with spans.span("copy_aside", version=step):
                    metrics |= self._trainer.begin_publish()
            metrics |= {"step/publish_s": canary_s + time.monotonic() - started}
            rows, self._logprobs = self._logprobs, {}
            return TrainedStep(metrics, rows if logprobs is None else rows | _as_rows(batch, logprobs))

        stepped = self._in_order(step)
        if publish:
            self._in_order(self._trainer.score_canary)
        return await stepped

    @as_text
    async def offload(self) -> float:
        """See `Trainer.offload`; a canary of the last publication is scored before."""
        return await self._in_order(self._trainer.offload)

    @as_text
    async def onload(self) -> None:
        await self._in_order(self._trainer.onload)

    @as_text
    async def publish(self) -> None:
        """Returns when the current weights have been copied aside.

        The canary is scored in the same turn of every rank, while the driver gets the next batch.
        """
        copied = self._in_order(self._trainer.begin_publish)
        self._in_order(self._trainer.score_canary)
        await copied

    @as_text
    async def publication(self) -> Publication | None:
        """The last published weights, once they are uploaded, while the trainer computes what comes next.

        Every rank is asked, because its part may fail; only rank 0 has something to answer. They are claimed when this
        call begins. Calls begin in the order they are made, so a call before the next step never gets that step's
        weights.
        """
        return await asyncio.wrap_future(self._trainer.claim_publication())

    @as_text
    async def measure(self, batch: TrainBatch) -> dict[str, float]:
        return await self._in_order(lambda: self._trainer.measure(batch))

    @as_text
    async def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """See `Trainer.evaluate`."""
        return await self._in_order(lambda: self._trainer.evaluate(batch))

    @as_text
    async def token_logprobs(self, batch: TrainBatch) -> np.ndarray:
        """float32 [S], see `Trainer.token_logprobs`."""
        return await self._in_order(lambda: self._trainer.token_logprobs(batch).numpy())

    @as_text
    async def policy_version(self) -> int:
        """Returns after every step that was requested earlier."""
        return await self._in_order(lambda: self._trainer.policy_version)

    @as_text
    async def begin_save(self, state: str | None, hf: str | None) -> dict[str, float]:
        """Returns when training may continue; see `Trainer.begin_save`."""
        return await self._in_order(lambda: self._trainer.begin_save(state=state, hf=hf))

    @as_text
    async def finish_save(self) -> dict[str, float]:
        """Returns when it is on disk, while the trainer computes what comes next."""
        return await asyncio.to_thread(self._trainer.finish_save)

    @as_text
    async def load_state(self, directory: str) -> int:
        return await self._in_order(lambda: self._trainer.load_state(directory))

    @as_text
    async def close(self) -> None:
        await self._in_order(self._trainer.close)

    def _in_order(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Its turn is fixed by this call, not by who awaits it."""
        return asyncio.get_running_loop().run_in_executor(self._compute, function)


def _room_for_logprobs(batch: TrainBatch, trainer: Trainer) -> torch.Tensor:
    """[S], nan until a pass has computed them."""
    import torch

    return torch.full(batch.response_tokens.shape, math.nan, device=trainer.device)


def _as_rows(batch: TrainBatch, logprobs: torch.Tensor) -> dict[int, list[float]]:
    """See `TrainedStep.logprobs`. Those that no pass computed are left out."""
    from ..train_batch import of_recorded

    rows = of_recorded(batch, logprobs.cpu())
    return {row: own.tolist() for row, own in rows.items() if not own.isnan().all()}


def _opened(settings: TransportSettings) -> WeightTransport:
    return open_transport(replace(settings, host=ray.util.get_node_ip_address()))


# Ray's overloads do not name max_concurrency.
TrainerRank = ray.remote(num_cpus=0, max_concurrency=100)(TrainerActor)  # type: ignore[call-overload]
