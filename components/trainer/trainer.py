"""One rank of the trainer. Every public method is called on all ranks; FSDP2 exchanges shards between them.

    forward_backward(batch) -> optim_step() -> publish()      token_logprobs(batch)
    begin_save(state=dir, hf=dir), finish_save(), load_state(dir)

`policy_version` is the number of optimizer steps in the weights.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from .. import spans
from ..algorithms.objective import Loss, Objective
from ..transports.object_store import ObjectStore
from ..transports.transport import WeightTransport
from ..weights import CanaryPrompts, Manifest, Publication
from .audit import published_weights
from .bound import StalenessError as StalenessError
from .bound import check_versions
from .canary import score_canary
from .checkpoint import SavedModules, load_state
from .families import find_model
from .gather import Gatherer
from .lora import MergedWeights, adapt, adapter_tensors, adapters_off, base_tensors, initial_adapters
from .memory import peak_memory_gib
from .microbatch import Microbatch, Packing, empty_microbatch, split_into_microbatches
from .offload import Offload
from .optimizer import LossScale, Stepper, embedding_ids, make_optimizer
from .publish import Publisher
from .reference import load_reference
from .saver import Saver
from .scoring import ScoringModel, score_microbatch
from .settings import TrainerSettings
from .sharding import make_mesh, reshard, shard
from .shards import shard_of
from .tensors import saved_tensors
from .vocabulary import check_vocabulary

if TYPE_CHECKING:  # the benchmark runs where tensordict is not installed
    from ..types import TrainBatch


class Counts(TypedDict):
    """What losses are divided by: sequences and trained tokens, see `StepCounts`."""

    num_sequences: int
    num_tokens: int


def counts_of(batch: TrainBatch) -> Counts:
    return {"num_sequences": int(batch.num_sequences), "num_tokens": int(batch.num_tokens)}


@dataclass(kw_only=True)
class _Gradient:
    """What this rank has added of a step's gradient so far, and what all ranks' parts of it count."""

    sums: torch.Tensor
    maxima: torch.Tensor
    divided_by: Counts
    num_parts: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    tokens_in_passes: int = 0
    elapsed_s: float = 0.0

    @classmethod
    def before(cls, first: TrainBatch, objective: Objective, device: torch.device) -> _Gradient:
        """Before its first part."""
        sums = torch.zeros(objective.num_sums, dtype=torch.float64, device=device)
        maxima = torch.full((objective.num_maxima,), float("-inf"), dtype=torch.float64, device=device)
        return cls(sums=sums, maxima=maxima, divided_by=counts_of(first))


class Trainer:
    def __init__(
        self, settings: TrainerSettings, *, rank: int, init_method: str, transport: WeightTransport | None = None
    ) -> None:
        """`transport`: on which weights leave (None: they stay in this process)."""
        self._settings = settings
        self._rank = rank
        self._transport = transport or ObjectStore.of_this_process()
        on_gpu, num_ranks = settings.cluster.device == "cuda", settings.train.num_ranks
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        timeout_s = settings.cluster.step_timeout_s
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        if not dist.is_initialized():  # else by the trainer of an earlier run on these ranks
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # offloaded weights meet on the CPU
                init_method=init_method,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout_s),
            )
        assert dist.get_world_size() == num_ranks
        self._saver = Saver(rank=rank, device=self._device, timeout_s=timeout_s)
        torch.manual_seed(settings.seed)
        train = settings.train
        mesh = make_mesh(settings.cluster.device, num_ranks, train.shards)
        found = find_model(
            settings.path_of(None),
            attn=settings.model.attn,
            packing=train.packing,
            head_dtype=settings.head_dtype,
            max_length=settings.max_length,
            device=self._device,
            mesh=mesh,
            cpu_offload=train.cpu_offload,
        )
        lora = settings.model.lora
        if lora is not None:
            adapt(found.lm, lora)
            on = torch.device("cpu") if train.cpu_offload else self._device
            own, shards = shard_of(mesh)
            found.weights.update(initial_adapters(found.lm, seed=settings.seed, rank=own, num_ranks=shards, device=on))
        model = found.scoring_model(train.logprob_chunk_tokens)
        self._packing: Packing = "padded"
        if model.is_packed:
            self._packing = "shared" if train.packing == "auto" else train.packing
        self._config = model.lm.config
        self._model = shard(
            model,
            mesh,
            weights=found.weights,
            compute_dtype=settings.dtype,
            gradient_checkpointing=train.gradient_checkpointing,
            compile_layers=train.compile,
            cpu_offload=train.cpu_offload,
            forward_prefetch=train.forward_prefetch,
            units=train.fsdp_units,
        )
        self._objective = settings.objective
        self._reference: ScoringModel | None = None
        # Without its adapter, the policy is the model that training started from.
        self._refers_to_base = lora is not None and settings.reference_path is None and self._objective.needs_reference
        if self._objective.needs_reference and not self._refers_to_base:
            path = settings.path_of(settings.reference_path)
            self._reference = load_reference(path, settings, mesh, device=self._device)
            check_vocabulary("algorithm.reference_path", path, self._reference.lm, policy=self._model.lm)
            if not self._reference.is_packed:  # both score the same passes
                self._packing = "padded"
        self._optimizer = make_optimizer(
            self._model.parameters(), settings.optimizer, embeddings=embedding_ids(self._model)
        )
        self._loss_scale = LossScale(enabled=settings.dtype is torch.float16)
        self._stepper = Stepper(
            self._optimizer,
            settings.optimizer,
            total_steps=settings.total_steps,
            loss_scale=self._loss_scale,
            moments=Offload([], [self._optimizer], self._device) if train.cpu_offload_optimizer else None,
        )
        weights = settings.param_server
        gatherer = functools.partial(
            Gatherer, self._model, dtype=settings.dtype, bucket_bytes=weights.bucket_mb * 2**20, timeout_s=timeout_s
        )
        self._published = saved_tensors if lora is None else adapter_tensors
        self._gatherer = gatherer(tensors_of=self._published)
        self._base = None if lora is None else gatherer(tensors_of=base_tensors)
        self._base_digest: str | None = None
        self._reference_digest: str | None = None
        self._exported: Gatherer | MergedWeights = self._gatherer
        if lora is not None and self._base is not None:
            self._exported = MergedWeights(self._base, self._gatherer, lora, base_path=settings.path_of(None))
        self._publisher = Publisher(
            self._gatherer, transport=self._transport, checksum=weights.checked_with, timeout_s=timeout_s
        )
        self.policy_version = 0
        self._gradient: _Gradient | None = None  # of the step under way
        self._tokens_of_step: float | None = None  # that went through the model, of all ranks
        self._tokens_in_pass = 0  # of the last passes of this rank
        self._offload: Offload | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    def forward_backward(
        self,
        batch: TrainBatch,
        *,
        proximal_logprobs: torch.Tensor | None = None,
        logprobs_out: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """Add this step's gradient; returns metrics of the whole step (the same on every rank).

        `batch` is this rank's share; `proximal_logprobs` [S]: the result of `token_logprobs` for it when it was taken
        (None: it was taken under the current weights). `logprobs_out` [S], on this device: filled with the logprobs of
        this rank's response tokens in this pass. Raises `StalenessError` if a token breaks the bound, before any
        computation.
        """
        self.add_part(batch, proximal_logprobs=proximal_logprobs, logprobs_out=logprobs_out)
        gradient, self._gradient = self._gradient, None
        assert gradient is not None, "it has a part"
        objective = self._objective
        if gradient.num_parts > 1:
            self._rescale(gradient)
        sums = self._reduce(gradient.sums, dist.ReduceOp.SUM)
        maxima = self._reduce(gradient.maxima, dist.ReduceOp.MAX)
        num_tokens = gradient.num_tokens
        tokens_in_passes = self._tokens_of_step = self._reduced_sum(gradient.tokens_in_passes)
        metrics = objective.metrics(sums, maxima)
        self._objective = objective.after_step(metrics)
        return {
            **metrics,
            "step/forward_backward_s": gradient.elapsed_s,
            "train/tokens_per_s": num_tokens / gradient.elapsed_s,
            "train/tokens_in_pass": tokens_in_passes,
        }

    def add_part(
        self,
        batch: TrainBatch,
        *,
        proximal_logprobs: torch.Tensor | None = None,
        logprobs_out: torch.Tensor | None = None,
    ) -> None:
        """Add the gradient of a part of the step; `forward_backward` adds the last one (a collective).

        Arguments and errors as there. What an objective compares over a whole step (`needs_step_values`) it sees in one
        part alone.
        """
        self._check_versions(batch)
        started = time.monotonic()
        reference_logprobs = self._reference_logprobs(batch)
        objective, proximal_logprobs = self._of_step(batch, proximal_logprobs, reference_logprobs)
        gradient = self._gradient = self._gradient or _Gradient.before(batch, objective, self._device)
        current_is_proximal = objective.needs_proximal and proximal_logprobs is None
        for microbatch in self._passes(batch, proximal_logprobs, reference_logprobs):
            logprobs, loss = self._loss(
                objective, microbatch, batch, gradient.divided_by, current_is_proximal=current_is_proximal
            )
            if logprobs_out is not None:
                logprobs_out[microbatch.batch_positions] = logprobs
            # FSDP averages gradients over ranks; losses are divided by the step's counts, so the parts must add up.
            (self._loss_scale * (loss.total * self._settings.train.num_ranks)).backward()
            gradient.sums += loss.sums
            gradient.maxima = torch.maximum(gradient.maxima, loss.maxima)
        gradient.num_parts += 1
        gradient.num_sequences += int(batch.num_sequences)
        gradient.num_tokens += int(batch.num_tokens)
        gradient.tokens_in_passes += self._tokens_in_pass
        gradient.elapsed_s += time.monotonic() - started

    def _rescale(self, gradient: _Gradient) -> None:
        """To what the whole step counts; its parts were divided by what the first one does."""
        objective = self._objective
        whole = objective.divisor(num_sequences=gradient.num_sequences, num_tokens=gradient.num_tokens)
        factor = objective.divisor(**gradient.divided_by) / whole
        gradient.sums[: objective.num_divided] *= factor
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor

    def token_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Logprobs [S] of this rank's response tokens under the current weights, on the CPU (a collective)."""
        return self._score(self._model, batch)

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """Evaluate the objective on this share of data under the current weights (a collective); nothing is learned."""
        reference_logprobs = self._reference_logprobs(batch)
        objective, proximal_logprobs = self._of_step(batch, None, reference_logprobs)
        current_is_proximal = objective.needs_proximal and proximal_logprobs is None
        losses = [
            self._loss(objective, microbatch, batch, counts_of(batch), current_is_proximal=current_is_proximal)[1]
            for microbatch in self._passes(batch, proximal_logprobs, reference_logprobs)
        ]
        sums = self._reduce(torch.stack([loss.sums for loss in losses]).sum(0), dist.ReduceOp.SUM)
        maxima = torch.stack([loss.maxima for loss in losses]).amax(0)
        return self._objective.metrics(sums, self._reduce(maxima, dist.ReduceOp.MAX))

    def _of_step(
        self, batch: TrainBatch, proximal_logprobs: torch.Tensor | None, reference_logprobs: torch.Tensor | None
    ) -> tuple[Objective, torch.Tensor | None]:
        """The objective of this step, and the logprobs that it corrects to, if they had to be computed for that."""
        objective = self._objective
        if not objective.needs_step_values:
            return objective, proximal_logprobs
        if proximal_logprobs is None:
            proximal_logprobs = self.token_logprobs(batch)
        values = objective.step_values(batch, proximal_logprobs, reference_logprobs)
        return objective.for_step(self._gathered(values)), proximal_logprobs

    def _reference_logprobs(self, batch: TrainBatch) -> torch.Tensor | None:
        if self._refers_to_base:
            with adapters_off(self._model):
                return self._score(self._model, batch)
        return self._score(self._reference, batch) if self._reference is not None else None

    @torch.no_grad()
    def _score(self, model: ScoringModel, batch: TrainBatch) -> torch.Tensor:
        logprobs = torch.zeros(len(batch.response_tokens))
        for microbatch in self._passes(batch):
            scored, _ = score_microbatch(model, microbatch)
            logprobs[microbatch.batch_positions.cpu()] = scored.cpu()
        return logprobs

    @torch.no_grad()
    def audit(self, batch: TrainBatch, manifest: Manifest, buckets: Sequence[np.ndarray]) -> dict[str, float]:
        """How far engine and trainer differ on tokens of an older version, under the weights of that version.

        `batch` is this rank's share, `manifest` and `buckets` a kept publication (a collective). Returns the `sum`,
        `max` and number (`tokens`) of |trainer - engine| in nats over all ranks. The weights do not change.
        """
        names = self._gatherer.names
        with published_weights(self._model, names, manifest, buckets, tensors_of=self._published):
            logprobs = self.token_logprobs(batch)
        chosen = batch.loss_mask & (batch.policy_versions == manifest.policy_version)
        gaps = (logprobs - batch.behavior_logprobs)[chosen].abs().double()
        total = self._reduce(torch.stack([gaps.sum(), torch.tensor(float(len(gaps)))]), dist.ReduceOp.SUM)
        largest = self._reduce(gaps.max()[None] if len(gaps) else torch.zeros(1).double(), dist.ReduceOp.MAX)
        return {"sum": total[0].item(), "tokens": total[1].item(), "max": largest.item()}

    def optim_step(self) -> dict[str, float]:
        """One optimizer step, empty if the gradient is not finite (`Stepper`); `policy_version` grows by one."""
        started = time.monotonic()
        reshard(self._model)  # else what a pass without a backward pass computed with would be used again
        metrics = self._stepper.step(self.policy_version)
        self.policy_version += 1
        peak = self._reduce(torch.tensor([peak_memory_gib(self._device)]), dist.ReduceOp.MAX).item()
        return {**metrics, "train/peak_memory_gib": peak, "step/optim_s": time.monotonic() - started}

    def begin_publish(self) -> dict[str, float]:
        """Copy the weights aside, and send them while training continues (a collective); see `Publisher`.

        `score_canary` follows, before the weights change.
        """
        self._publisher.begin(self.policy_version, base=self._digest_of_base() or "")
        return {"train/publish_memory_gib": self._publisher.memory_bytes / 2**30}

    @torch.no_grad()
    def score_canary(self) -> None:
        """One pass with the weights of the last `begin_publish` (a collective). Its failure is the publication's."""
        with spans.span("canary", version=self.policy_version):
            self._publisher.score(lambda: score_canary(self._model, self._canary_prompts(), self._device))

    def publish(self) -> None:
        """Both (a collective)."""
        self.begin_publish()
        self.score_canary()

    def claim_publication(self) -> Future[Publication | None]:
        """The last `publish`, once it has been uploaded during the next step; see `Publisher.claim`."""
        return self._publisher.claim()

    def publication(self) -> Publication:
        """Rank 0: the last `publish`, complete."""
        publication = self.claim_publication().result(self._settings.cluster.step_timeout_s)
        assert publication is not None, "rank 0 has it"
        return publication

    def begin_save(self, *, state: str | None = None, hf: str | None = None) -> dict[str, float]:
        """Save into `state` (to resume from) and `hf` (to export), in the background (a collective).

        One at a time: `finish_save` comes before the next. Returns the seconds that training was blocked.
        """
        seconds = self._saver.begin(
            self._settings,
            modules=self._saved_modules(),
            weights=self._exported,
            adapts=self._adapts(),
            reference=self._digest_of_reference(),
            policy_version=self.policy_version,
            objective=self._objective.state_dict(),
            loss_scale=self._loss_scale.state_dict(),
            state=None if state is None else Path(state),
            hf=None if hf is None else Path(hf),
        )
        return {"checkpoint/copy_s": seconds}

    def finish_save(self) -> dict[str, float]:
        """Wait, in any thread, until the begun save is on disk; raises `CheckpointWriteError` if it fails."""
        return {"checkpoint/write_s": self._saver.finish()}

    def save(self, directory: str) -> None:
        """Write the weights as a Hugging Face directory, and wait for it (a collective)."""
        self.begin_save(hf=directory)
        self.finish_save()

    def save_state(self, directory: str) -> None:
        """Write everything to resume from, and wait for it (a collective); see `checkpoint`."""
        self.begin_save(state=directory)
        self.finish_save()

    def load_state(self, directory: str) -> int:
        """Resume from what `save_state` wrote, on any number of ranks; returns the policy version.

        A reference policy does not change: it was read from its own files, which have to be those of before.
        """
        state = load_state(
            Path(directory),
            modules=self._saved_modules(),
            device=self._device,
            rank=self._rank,
            num_ranks=self._settings.train.num_ranks,
            adapts=self._adapts(),
            reference=self._digest_of_reference(),
        )
        self.policy_version = int(state["policy_version"])
        self._objective = self._objective.with_state(state["objective"])
        self._loss_scale.load_state_dict(state.get("loss_scale", {}))
        return self.policy_version

    def measure(self, batch: TrainBatch) -> dict[str, float]:
        """Seconds of one step on this batch, with nothing else running; weights, optimizer and version do not change.

        A temporary optimizer steps with a learning rate of 0: the real one may have been loaded from a checkpoint.
        """
        passes, objective = [], self._objective
        # The first one warms up allocators, kernels and caches: with 135 million weights it takes twice as long.
        while len(passes) < 2 or (sum(passes) < 3.0 and len(passes) < 10):
            started = time.monotonic()
            self.forward_backward(batch)
            passes.append(self._reduce(torch.tensor([time.monotonic() - started]), dist.ReduceOp.MAX).item())
        self._objective = objective
        times = {"forward_backward_s": min(passes), "tokens_in_pass": self._reduced_tokens_in_pass()}
        spare = make_optimizer(self._model.parameters(), self._settings.optimizer)
        for group in spare.param_groups:
            group["lr"] = 0.0
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # one that is not finite would move weights all the same
        spare.step()  # it makes its states: of 135 million weights that took 1.1 s, where a step takes 0.15
        started = time.monotonic()
        spare.step()
        times["optim_s"] = time.monotonic() - started
        spare.zero_grad(set_to_none=True)
        return times

    def offload(self) -> float:
        """Give the device's memory back until `onload`; returns GiB. See `Offload`."""
        if self._offload is None:
            saved = self._saved_modules().values()
            models = [model for model, _ in saved] + ([] if self._reference is None else [self._reference])
            self._offload = Offload(models, [optimizer for _, optimizer in saved], self._device)
        return self._offload.leave() / 2**30

    def onload(self) -> None:
        """Before anything is computed again."""
        if self._offload is not None:
            self._offload.come_back()

    def retire(self) -> None:
        """Another trainer of these ranks takes its place: groups that nobody destroys keep threads and descriptors."""
        self._publisher.close()
        self._saver.close()
        for gatherer in (self._gatherer, self._base):
            if gatherer is not None:
                gatherer.close()

    def close(self) -> None:
        self.retire()
        dist.destroy_process_group()

    def _canary_prompts(self) -> CanaryPrompts:
        """Those that are worth their share of the last step; all of them before the first."""
        prompts, step_tokens = self._settings.canary, self._tokens_of_step
        if step_tokens is None:
            return prompts
        # Every rank scores all of them. A token that is trained on costs three that are scored.
        own_tokens = step_tokens / self._settings.train.num_ranks
        return prompts.within(3 * own_tokens * self._settings.param_server.canary_frac)

    def _saved_modules(self) -> SavedModules:
        """What checkpoints hold."""
        return {"": (self._model, self._optimizer)}

    def _digest_of_base(self) -> str | None:
        """Of what adapters are added to, made once; rank 0 alone has it, and None where all weights are trained."""
        if self._base is not None and self._base_digest is None:
            self._base_digest = self._base.digest() or ""
        return self._base_digest

    def _digest_of_reference(self) -> str | None:
        """Made once, by all ranks; rank 0 alone has it, and None where there is no reference of its own."""
        if self._reference is not None and self._reference_digest is None:
            settings = self._settings
            gatherer = Gatherer(
                self._reference,
                dtype=torch.float32,
                bucket_bytes=settings.param_server.bucket_mb * 2**20,
                timeout_s=settings.cluster.step_timeout_s,
            )
            self._reference_digest = gatherer.digest() or ""
            gatherer.close()
        return self._reference_digest

    def _adapts(self) -> dict[str, str | float] | None:
        """What a checkpoint of adapters belongs to; None where all weights are trained."""
        lora, digest = self._settings.model.lora, self._digest_of_base()
        return None if lora is None else {"base": digest or "", "scaling": lora.scaling}

    def _check_versions(self, batch: TrainBatch) -> None:
        check_versions(
            batch,
            policy_version=self.policy_version,
            bound=self._settings.max_policy_lag,
            num_buffers=self._objective.num_buffers,
        )

    def _passes(
        self,
        batch: TrainBatch,
        proximal_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
    ) -> Iterator[Microbatch]:
        """This rank's microbatches on its device, then empty ones, because each pass is a collective of all ranks."""
        own = []
        if len(batch.prompt_lengths):
            own = split_into_microbatches(
                batch,
                max_tokens=self._settings.train.microbatch_tokens(self._settings.cluster.device),
                packing=self._packing,
                proximal_logprobs=proximal_logprobs,
                reference_logprobs=reference_logprobs,
                unit=self._objective.sequences_per_unit,
                few_lengths=self._device.type == "cpu" and self._settings.dtype is torch.bfloat16,
            )
        self._tokens_in_pass = sum(microbatch.input_ids.numel() for microbatch in own)
        num_passes = int(self._reduce(torch.tensor([float(len(own))]), dist.ReduceOp.MAX).item())
        for i in range(num_passes):
            yield (own[i] if i < len(own) else empty_microbatch(packed=self._packing != "padded")).to(self._device)

    def _reduced_tokens_in_pass(self) -> float:
        """Of all ranks' last passes: what went through the model, padding included (a collective)."""
        return self._reduced_sum(self._tokens_in_pass)

    def _reduced_sum(self, number: float) -> float:
        return self._reduce(torch.tensor([float(number)]), dist.ReduceOp.SUM).item()

    def _loss(
        self,
        objective: Objective,
        microbatch: Microbatch,
        batch: TrainBatch,
        counts: Counts,
        *,
        current_is_proximal: bool = False,
    ) -> tuple[torch.Tensor, Loss]:
        """(logprobs [S] of the microbatch's tokens, detached; their loss)."""
        logprobs, entropy = score_microbatch(self._model, microbatch, entropy_gradient=objective.needs_entropy_gradient)
        if current_is_proximal:
            microbatch = replace(microbatch, proximal_logprobs=logprobs.detach())
        return logprobs.detach(), objective.loss(
            logprobs,
            entropy,
            microbatch,
            policy_version=self.policy_version,
            **counts,
            **({"buffer_counts": self._counts_of_buffers(batch)} if objective.num_buffers else {}),
        )

    @staticmethod
    def _counts_of_buffers(batch: TrainBatch) -> list[tuple[int, int]]:
        counts = [] if batch.buffer_counts is None else batch.buffer_counts.tolist()
        return [(num_sequences, num_tokens) for num_sequences, num_tokens in counts]

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Values [K] of every rank, end to end; K may differ from rank to rank."""
        if self._settings.train.num_ranks == 1:
            return values
        shares: list[torch.Tensor | None] = [None] * self._settings.train.num_ranks
        dist.all_gather_object(shares, values.cpu())
        return torch.cat([share for share in shares if share is not None])

    def _reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self._settings.train.num_ranks > 1 and tensor.numel():
            tensor = tensor.to(self._device)
            dist.all_reduce(tensor, op=op)
        return tensor
