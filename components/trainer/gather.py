"""Gather a sharded model's weights on rank 0, one bucket at a time, so that no rank ever holds the whole of them.

A rank's part of a bucket is its rows of every tensor in it, cast to the published dtype, end to end in main memory.
Rank 0 receives the others' rows at their place in the bucket. Buffers are whole on every rank, keep their own dtype,
and are part of rank 0's part only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..weights import BucketPlan, TensorEntry, checksum_of, digest_of, plan_buckets
from .names import PublishedNames
from .scoring import ScoringModel
from .sharding import reshard
from .shards import is_of_first_copy, local_rows, num_shards
from .tensors import TensorsOf, by_tensor, saved_tensors


class Gatherer:
    """Made by all ranks of a sharded model. `dtype`: what every parameter is cast to.

    `gather` may run beside the model's own collectives: it has a process group of its own, because those of two threads
    must not share one. It is gloo, from main memory, on GPUs too: two NCCL communicators at work on one GPU may wait
    for each other for ever.
    """

    def __init__(
        self,
        model: ScoringModel,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        timeout_s: float,
        tensors_of: TensorsOf = saved_tensors,
    ) -> None:
        """`tensors_of`: which of the model's tensors, by name, as the live objects."""
        self._model, self._tensors_of = model, tensors_of
        self.names = PublishedNames(model.lm)
        self._rank = dist.get_rank()
        reshard(model)
        # Tied: an engine may keep a packed copy under the other name, so both names are published.
        tensors = by_tensor(tensors_of(model.lm))
        self.plans = plan_buckets(
            ((n, dtype if isinstance(t, torch.nn.Parameter) else t.dtype, t.shape) for t, n in tensors.items()),
            bucket_bytes,
        )
        live = {names[0]: tensor for tensor, names in tensors.items()}
        self._sharded = {name for name, tensor in live.items() if isinstance(tensor, DTensor)}
        # Of several copies the first one is published: it is on the first ranks, in their order.
        self._num_shards = max(map(num_shards, live.values()))
        self._parts = [self._part_of(plan, live) for plan in self.plans]
        self._on_gpu = any(tensor.is_cuda for tensor in live.values())
        beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(beside, dist.ProcessGroup)
        self._beside = beside

    def close(self) -> None:
        dist.destroy_process_group(self._beside)

    def new_parts(self) -> list[torch.Tensor]:
        """Memory for this rank's part of every bucket, for `copy_parts`; pinned, so that a GPU copies by itself."""
        return [part.empty(pinned=self._on_gpu) for part in self._parts]

    def new_bucket(self) -> torch.Tensor:
        """Memory for each bucket in turn, for `gather`: of no bytes, but on rank 0 of several."""
        largest = max(plan.num_bytes for plan in self.plans)
        return torch.empty(largest if self._rank == 0 and self._num_shards > 1 else 0, dtype=torch.uint8)

    @torch.no_grad()
    def copy_parts(self, into: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Copy this rank's part of every bucket aside, as it is now.

        The weights may be changed as soon as this returns. A GPU is still copying then, in the order of its own work:
        the returned function waits, in any thread, until the copy can be read.
        """
        tensors = self._live()
        for part, memory in zip(self._parts, into, strict=True):
            self._copy_part(part, tensors, memory)
        return _when_copied()

    def gather(self, index: int, part: torch.Tensor, into: torch.Tensor) -> tuple[BucketPlan, torch.Tensor | None]:
        """One bucket (uint8) on rank 0, None elsewhere, of all ranks' parts of it (a collective), in any one thread.

        It lies in `into`. A rank that is alone has the bucket in its part already, and gets that very memory.
        """
        return self._gather(index, part, into, self._beside)

    @torch.no_grad()
    def buckets(self) -> Iterator[tuple[BucketPlan, torch.Tensor | None]]:
        """Every bucket of the current weights in turn (a collective, as those of the model); each is made on demand."""
        tensors = self._live()
        for index, part in enumerate(self._parts):
            # Not kept in a variable, which would keep it alive while the next one is gathered.
            yield self._gather(index, self._part_now(part, tensors), self.new_bucket(), None)

    def digest(self) -> str | None:
        """On rank 0, one hash over all of it as it is published (a collective)."""
        entries: list[TensorEntry] = []
        for plan, memory in self.buckets():
            if memory is not None:
                plan, memory = self.as_published(plan, memory)
                entries += plan.entries(checksum_of(span.data(memory).numpy(), "xxh3_128") for span in plan.spans)
            del memory  # before the next one is gathered
        return digest_of(entries) if entries else None

    def as_published(self, plan: BucketPlan, memory: torch.Tensor) -> tuple[BucketPlan, torch.Tensor]:
        """The same weights under the names of the model's files: a layer's experts apart, which costs another copy."""
        renamed = self.names.renamed
        if all(name in renamed for span in plan.spans for name in span.names):
            spans = [replace(span, names=tuple(renamed[name] for name in span.names)) for span in plan.spans]
            return replace(plan, spans=spans), memory
        tensors: list[tuple[tuple[str, ...], torch.Tensor]] = []
        for span in plan.spans:
            if all(name in renamed for name in span.names):
                tensors.append((tuple(renamed[name] for name in span.names), span.tensor(memory)))
            else:
                parts = self.names.split(span.names[0], span.tensor(memory))
                tensors += [((name,), tensor) for name, tensor in parts.items()]
        (split,) = plan_buckets(((n, t.dtype, t.shape) for n, t in tensors), bucket_bytes=2 * plan.num_bytes + 2**20)
        split = replace(split, index=plan.index)
        copy = split.empty()
        for span, (_, tensor) in zip(split.spans, tensors, strict=True):
            span.tensor(copy).copy_(tensor)
        return split, copy

    def _live(self) -> dict[str, torch.Tensor]:
        reshard(self._model)
        return self._tensors_of(self._model.lm)

    def _part_of(self, plan: BucketPlan, tensors: dict[str, torch.Tensor]) -> BucketPlan:
        """How this rank's part of a bucket lies in memory."""
        own: list[tuple[tuple[str, ...], torch.dtype, tuple[int, ...]]] = []
        for span in plan.spans:
            tensor = tensors[span.names[0]]
            _, rows = local_rows(tensor)
            is_own = self._rank == 0 or (isinstance(tensor, DTensor) and is_of_first_copy(tensor))
            own.append((span.names, span.dtype, tuple(rows.shape) if is_own else (0,)))
        (part,) = plan_buckets(own, bucket_bytes=plan.num_bytes)
        return part

    def _part_now(self, part: BucketPlan, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        memory = part.empty()
        self._copy_part(part, tensors, memory)
        _when_copied()()
        return memory

    def _copy_part(self, part: BucketPlan, tensors: dict[str, torch.Tensor], into: torch.Tensor) -> None:
        for span in part.spans:
            if span.num_bytes:
                _, rows = local_rows(tensors[span.names[0]])
                # Cast where the weights are: between devices torch would cast on the CPU, and wait for it.
                rows = rows.to(span.dtype) if rows.is_cuda else rows
                span.tensor(into).copy_(rows, non_blocking=True)

    def _gather(
        self, index: int, part: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup | None
    ) -> tuple[BucketPlan, torch.Tensor | None]:
        plan = self.plans[index]
        if self._num_shards == 1:
            return plan, part if self._rank == 0 else None
        memory = plan.lay_out(into) if self._rank == 0 else None
        messages: list[dist.P2POp] = []
        for span, own in zip(plan.spans, self._parts[index].spans, strict=True):
            if memory is not None:
                messages += self._receive(own.tensor(part), span.tensor(memory), span.names[0], group)
            elif own.num_bytes:
                messages.append(dist.P2POp(dist.isend, own.data(part), 0, group))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return plan, memory

    def _receive(
        self, own: torch.Tensor, whole: torch.Tensor, name: str, group: dist.ProcessGroup | None
    ) -> Iterator[dist.P2POp]:
        """Copy rank 0's own rows into `whole`, and return the messages that bring the others."""
        if name not in self._sharded:
            whole.copy_(own)
            return
        rows = -(-whole.shape[0] // self._num_shards)  # as torch.chunk cuts: the last ranks may have fewer, or none
        for rank, shard in enumerate(whole.split(rows)):
            if rank == 0:
                shard.copy_(own)
            else:
                yield dist.P2POp(dist.irecv, shard.view(-1).view(torch.uint8), rank, group)


def _when_copied() -> Callable[[], None]:
    if not torch.cuda.is_initialized():
        return lambda: None
    copied = torch.cuda.Event()
    copied.record()
    return copied.synchronize
