"""One rank of the trainer. Every public method is called on all ranks alike, between which FSDP2 exchanges shards.

    forward_backward(batch) -> optim_step() -> publish()      token_logprobs(batch)
    begin_save(state=dir, hf=dir), finish_save(), load_state(dir)

`policy_version` is the number of optimizer steps in the weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..algorithms.objective import Objective
from ..weights import BucketWriter, Canary, CanaryPrompts, Manifest, digest_of
from .audit import published_weights
from .bound import StalenessError as StalenessError
from .bound import check_versions
from .canary import score_canary
from .checkpoint import load_state
from .microbatch import Microbatch, Packing, cut, empty_microbatch
from .optimizer import OptimizerSettings, learning_rate, make_optimizer
from .reference import load_reference
from .saver import Saver
from .scoring import ScoringModel, load_model
from .sharding import make_mesh, shard

if TYPE_CHECKING:  # the benchmark runs where tensordict is not installed
    from ..types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What a rank is started with; the same for all of them.

    `max_policy_lag` None: batches carry no policy tokens (supervised training). `publish_dtype`: what engines get.
    `packing`: how sequences lie in a pass, see `Packing`; "auto" is shared where the model's attention allows it.
    `reference_path` None: where an objective needs a reference policy, it is the weights at `model_path`.
    `logprob_chunk_tokens`: most rows of logits that exist at a time. `save_in_background`: checkpoints are written from
    a copy while training goes on, by at most `max_writers` ranks at once (0: all).
    """

    model_path: str
    objective: Objective
    optimizer: OptimizerSettings
    num_ranks: int
    device: str
    compute_dtype: str
    publish_dtype: str
    attn: str
    temperature: float
    max_policy_lag: int | None
    max_tokens_per_microbatch: int
    gradient_checkpointing: bool
    bucket_bytes: int
    canary: CanaryPrompts
    num_threads: int
    seed: int
    timeout_s: float
    trust_remote_code: bool = False
    packing: Packing | Literal["auto"] = "auto"
    reference_path: str | None = None
    logprob_chunk_tokens: int = 512
    save_in_background: bool = True
    max_writers: int = 0


class Trainer:
    def __init__(self, settings: TrainerSettings, *, rank: int, init_method: str) -> None:
        self._settings = settings
        self._rank = rank
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else torch.device("cpu")
        )
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        dist.init_process_group(
            "nccl" if settings.device == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=settings.num_ranks,
            timeout=timedelta(seconds=settings.timeout_s),
        )
        self._saver = Saver(rank=rank, device=self._device, timeout_s=settings.timeout_s)
        self.begin(settings)

    def begin(self, settings: TrainerSettings) -> None:
        """Start over at version 0 from `settings.model_path`; the ranks and their device stay what they were."""
        assert (settings.num_ranks, settings.device) == (self._settings.num_ranks, self._settings.device)
        self._settings = settings
        torch.manual_seed(settings.seed)
        model = load_model(
            settings.model_path,
            attn=settings.attn,
            packing=settings.packing,
            chunk_tokens=settings.logprob_chunk_tokens,
            trust_remote_code=settings.trust_remote_code,
        ).to(self._device)
        self._packing: Packing = "padded"
        if model.is_packed:
            self._packing = "shared" if settings.packing == "auto" else settings.packing
        self._config = model.lm.config
        mesh, compute_dtype = make_mesh(settings.device, settings.num_ranks), getattr(torch, settings.compute_dtype)
        self._model = shard(
            model, mesh, compute_dtype=compute_dtype, gradient_checkpointing=settings.gradient_checkpointing
        )
        self._objective = settings.objective
        self._reference: ScoringModel | None = None
        if self._objective.needs_reference:
            self._reference = load_reference(
                settings.reference_path or settings.model_path,
                mesh,
                attn=settings.attn,
                packing=settings.packing,
                chunk_tokens=settings.logprob_chunk_tokens,
                compute_dtype=compute_dtype,
                device=self._device,
                trust_remote_code=settings.trust_remote_code,
            )
            if not self._reference.is_packed:  # both score the same passes
                self._packing = "padded"
        self._optimizer = make_optimizer(self._model.parameters(), settings.optimizer)
        self._pending_writer: tuple[int, BucketWriter, Canary] | None = None
        self.policy_version = 0

    def forward_backward(self, batch: TrainBatch, *, proximal_logprobs: torch.Tensor | None = None) -> dict[str, float]:
        """Add this step's gradient; returns metrics of the whole step (the same on every rank).

        `batch` is this rank's share; `proximal_logprobs` [S] what `token_logprobs` said of it when it was taken (None:
        it was taken under the weights of now). Raises `StalenessError` when a token breaks the bound, before any
        computing.
        """
        check_versions(
            batch,
            policy_version=self.policy_version,
            bound=self._settings.max_policy_lag,
            with_expert_tokens=self._objective.takes_expert_tokens,
        )
        started = time.monotonic()
        objective = self._objective
        if objective.needs_step_values:
            if proximal_logprobs is None:
                proximal_logprobs = self.token_logprobs(batch)
            objective = objective.for_step(self._gathered(objective.step_values(batch, proximal_logprobs)))
        reference_logprobs = self._score(self._reference, batch) if self._reference is not None else None
        sums = torch.zeros(objective.num_sums, dtype=torch.float64, device=self._device)
        maxima = torch.full((objective.num_maxima,), float("-inf"), dtype=torch.float64, device=self._device)
        current_is_proximal = objective.needs_proximal and proximal_logprobs is None
        for microbatch in self._passes(batch, proximal_logprobs, reference_logprobs):
            loss_sums, loss_maxima = self._backward(
                objective, microbatch, batch, current_is_proximal=current_is_proximal
            )
            sums += loss_sums
            maxima = torch.maximum(maxima, loss_maxima)
        sums = self._reduce(sums, dist.ReduceOp.SUM)
        maxima = self._reduce(maxima, dist.ReduceOp.MAX)
        elapsed = time.monotonic() - started
        num_tokens = int(batch.num_tokens)
        metrics = objective.metrics(sums, maxima)
        self._objective = self._objective.after_step(metrics)
        return {
            **metrics,
            "step/forward_backward_s": elapsed,
            "train/tokens_per_s": num_tokens / elapsed,
        }

    def token_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Logprobs [S] of this rank's response tokens under the weights of now, on the CPU (a collective)."""
        return self._score(self._model, batch)

    @torch.no_grad()
    def _score(self, model: ScoringModel, batch: TrainBatch) -> torch.Tensor:
        logprobs = torch.zeros(len(batch.response_tokens))
        for microbatch in self._passes(batch):
            scored, _ = self._run(model, microbatch)
            logprobs[microbatch.places.cpu()] = scored.cpu()
        return logprobs

    @torch.no_grad()
    def audit(self, batch: TrainBatch, manifest: Manifest, buckets: Sequence[np.ndarray]) -> dict[str, float]:
        """How far engine and trainer are apart on tokens of an older version, under the weights of that version.

        `batch` is this rank's share, `manifest` and `buckets` a kept publication (a collective). Returns the `sum`,
        `max` and number (`tokens`) of |trainer - engine| in nats over all ranks. The weights stay as they were.
        """
        with published_weights(self._model, manifest, buckets):
            logprobs = self.token_logprobs(batch)
        chosen = batch.loss_mask & (batch.policy_versions == manifest.policy_version)
        gaps = (logprobs - batch.behavior_logprobs)[chosen].abs().double()
        total = self._reduce(torch.stack([gaps.sum(), torch.tensor(float(len(gaps)))]), dist.ReduceOp.SUM)
        largest = self._reduce(gaps.max()[None] if len(gaps) else torch.zeros(1).double(), dist.ReduceOp.MAX)
        return {"sum": total[0].item(), "tokens": total[1].item(), "max": largest.item()}

    def optim_step(self) -> dict[str, float]:
        """One optimizer step; `policy_version` grows by one.

        A gradient that is not finite raises before any weight changes.
        """
        started = time.monotonic()
        parameters = list(self._model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.optimizer.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"gradient norm is {norm.item()} at policy version {self.policy_version}; "
                "lower optimizer.lr or check rewards"
            )
        lr = learning_rate(self._settings.optimizer, self.policy_version)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.policy_version += 1
        return {"train/grad_norm": norm.item(), "train/lr": lr, "step/optim_s": time.monotonic() - started}

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the weights tensor by tensor (a collective) and score the canary with them.

        Rank 0 keeps the copy for `publication`.
        """
        writer = BucketWriter(self._settings.bucket_bytes)
        dtype = getattr(torch, self._settings.publish_dtype)
        names: dict[int, str] = {}
        for name, parameter in self._model.lm.named_parameters(remove_duplicate=False):
            if id(parameter) in names:
                # Tied: the engine may keep a packed copy of it under this other name, so it is named, not left out.
                writer.add_alias(name, alias_of=names[id(parameter)])
                continue
            names[id(parameter)] = name
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self._rank == 0:
                writer.add(name, full.to(dtype))
        canary = score_canary(self._model, self._settings.canary, self._device)
        if self._rank == 0:
            self._pending_writer = (self.policy_version, writer, canary)

    def publication(self) -> tuple[Manifest, list[np.ndarray]]:
        """Rank 0: the manifest and buckets of the last `publish`.

        Hashing happens here; it may run beside the next step.
        """
        assert self._pending_writer is not None, "publication() is for rank 0, after publish()"
        (policy_version, writer, canary), self._pending_writer = self._pending_writer, None
        entries, buckets = writer.finish()
        num_bytes = sum(b.numel() for b in buckets)
        manifest = Manifest(policy_version, entries, len(buckets), num_bytes, canary, digest_of(entries))
        return manifest, [b.numpy() for b in buckets]

    def begin_save(self, *, state: str | None = None, hf: str | None = None) -> dict[str, float]:
        """Save into `state` (to go on from) and `hf` (for others to load), beside what comes next (a collective).

        One at a time: `finish_save` comes before the next. Returns the seconds that training was held up.
        """
        seconds = self._saver.begin(
            self._settings,
            model=self._model,
            lm=self._model.lm,
            optimizer=self._optimizer,
            policy_version=self.policy_version,
            objective=self._objective.state_dict(),
            state=None if state is None else Path(state),
            hf=None if hf is None else Path(hf),
        )
        return {"checkpoint/copy_s": seconds}

    def finish_save(self) -> dict[str, float]:
        """Wait, in any thread, until what was begun is on disk; raises `CheckpointWriteError` if it cannot be."""
        return {"checkpoint/write_s": self._saver.finish()}

    def save(self, directory: str) -> None:
        """Write the weights as a Hugging Face directory, and wait for it (a collective)."""
        self.begin_save(hf=directory)
        self.finish_save()

    def save_state(self, directory: str) -> None:
        """Write everything to go on from, and wait for it (a collective); see `checkpoint`."""
        self.begin_save(state=directory)
        self.finish_save()

    def load_state(self, directory: str) -> int:
        """Go on from what `save_state` wrote, on any number of ranks (a collective); returns the policy version.

        A reference policy stays what it is: the weights that training started from, not those of the checkpoint.
        """
        state = load_state(
            Path(directory), model=self._model, optimizer=self._optimizer, device=self._device, rank=self._rank
        )
        self.policy_version = int(state["policy_version"])
        self._objective = self._objective.with_state(state["objective"])
        return self.policy_version

    def measure(self, batch: TrainBatch) -> dict[str, float]:
        """Seconds of one step on this batch, nothing else running; weights, optimizer and version stay as they were.

        A spare optimizer steps with a learning rate of 0: the real one may have been loaded, and starts as it is.
        """
        passes, objective = [], self._objective
        for _ in range(3):  # the first one warms allocators and kernels
            started = time.monotonic()
            self.forward_backward(batch)
            passes.append(time.monotonic() - started)
        self._objective = objective
        times = {"forward_backward_s": min(passes)}
        spare = make_optimizer(self._model.parameters(), self._settings.optimizer)
        for group in spare.param_groups:
            group["lr"] = 0.0
        started = time.monotonic()
        spare.step()
        times["optim_s"] = time.monotonic() - started
        spare.zero_grad(set_to_none=True)
        return times

    def close(self) -> None:
        self._saver.close()
        dist.destroy_process_group()

    def _passes(
        self,
        batch: TrainBatch,
        proximal_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
    ) -> Iterator[Microbatch]:
        """This rank's microbatches on its device, then empty ones: each pass is a collective of all ranks."""
        own = []
        if len(batch.prompt_lengths):
            own = cut(
                batch,
                max_tokens=self._settings.max_tokens_per_microbatch,
                packing=self._packing,
                proximal_logprobs=proximal_logprobs,
                reference_logprobs=reference_logprobs,
                unit=self._objective.sequences_per_unit,
            )
        num_passes = int(self._reduce(torch.tensor([float(len(own))]), dist.ReduceOp.MAX).item())
        for i in range(num_passes):
            yield (own[i] if i < len(own) else empty_microbatch(packed=self._packing != "padded")).to(self._device)

    def _run(
        self, model: ScoringModel, microbatch: Microbatch, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies [S] of a microbatch's tokens (a collective)."""
        return model(
            microbatch.input_ids,
            microbatch.rows,
            microbatch.targets,
            self._settings.temperature,
            position_ids=microbatch.position_ids,
            layout=microbatch.layout,
            entropy_gradient=entropy_gradient,
        )

    def _backward(
        self, objective: Objective, microbatch: Microbatch, batch: TrainBatch, *, current_is_proximal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = self._run(self._model, microbatch, entropy_gradient=objective.needs_entropy_gradient)
        if current_is_proximal:
            microbatch = replace(microbatch, proximal_logprobs=logprobs.detach())
        loss = objective.loss(
            logprobs,
            entropy,
            microbatch,
            policy_version=self.policy_version,
            num_sequences=int(batch.num_sequences),
            num_tokens=int(batch.num_tokens),
        )
        # FSDP averages gradients over ranks; losses are divided by the whole step's counts, so the parts must add up.
        (loss.total * self._settings.num_ranks).backward()
        return loss.sums, loss.maxima

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Values [K] of every rank, end to end; K may differ from rank to rank."""
        if self._settings.num_ranks == 1:
            return values
        shares: list[torch.Tensor | None] = [None] * self._settings.num_ranks
        dist.all_gather_object(shares, values.cpu())
        return torch.cat([share for share in shares if share is not None])

    def _reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self._settings.num_ranks > 1 and tensor.numel():
            tensor = tensor.to(self._device)
            dist.all_reduce(tensor, op=op)
        return tensor
