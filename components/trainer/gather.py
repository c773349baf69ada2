"""Gather a sharded model's weights on rank 0, one bucket at a time, so that no rank ever holds more than that.

Each rank casts its own shards to the published dtype and sends them to rank 0, which receives them at their place in
the bucket. No other rank sees more than its shards. Buffers are whole on every rank, and keep their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ..weights import BucketPlan, plan_buckets
from .names import PublishedNames
from .scoring import ScoringModel
from .sharding import reshard
from .tensors import by_tensor, saved_tensors


class Gatherer:
    """Made by all ranks of a sharded model. `dtype`: what every parameter is cast to."""

    def __init__(self, model: ScoringModel, *, dtype: torch.dtype, bucket_bytes: int) -> None:
        self._model = model
        self.names = PublishedNames(model.lm)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        reshard(model)
        # Tied: an engine may keep a packed copy under the other name, so both names are published.
        tensors = by_tensor(saved_tensors(model.lm))
        self.plans = plan_buckets(
            ((n, dtype if isinstance(t, torch.nn.Parameter) else t.dtype, t.shape) for t, n in tensors.items()),
            bucket_bytes,
        )
        if self._num_ranks > 1:
            dist.barrier()  # NCCL: messages between two ranks may not be the first that a group hears

    @torch.no_grad()
    def buckets(self) -> Iterator[tuple[BucketPlan, torch.Tensor | None]]:
        """Every bucket in turn (a collective): uint8 on the CPU of rank 0, None elsewhere.

        Each is made on demand. A caller that still holds the last one by then holds two.
        """
        reshard(self._model)
        tensors = saved_tensors(self._model.lm)
        for plan in self.plans:
            # Not kept in a variable, which would keep it alive while the next one is gathered.
            yield plan, self._gather(plan, tensors)

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

    def _gather(self, plan: BucketPlan, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        # On a GPU shards meet on rank 0's GPU, and cross to its main memory a bucket at a time. Where parameters are
        # offloaded they meet in main memory, though buffers are on the GPU.
        device = next(self._model.lm.parameters()).device
        memory = plan.empty(device) if self._rank == 0 else None
        messages: list[dist.P2POp] = []
        for span in plan.spans:
            tensor = tensors[span.names[0]]
            if memory is not None:
                messages += self._receive(tensor, span.tensor(memory))
            elif isinstance(tensor, DTensor):
                shard = _bytes(tensor.to_local().to(span.dtype))
                if len(shard):
                    messages.append(dist.P2POp(dist.isend, shard, 0))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return None if memory is None else memory.cpu()

    def _receive(self, tensor: torch.Tensor, whole: torch.Tensor) -> Iterator[dist.P2POp]:
        """Copy rank 0's own shard into `whole`, and return the messages that bring the others."""
        if not isinstance(tensor, DTensor):
            whole.copy_(tensor)
            return
        assert tensor.placements == (Shard(0),), f"sharded in an unsupported way: {tensor.placements}"
        rows = -(-tensor.shape[0] // self._num_ranks)  # as torch.chunk cuts: the last ranks may have fewer, or none
        for rank, shard in enumerate(whole.split(rows)):
            if rank == 0:
                shard.copy_(tensor.to_local())
            else:
                yield dist.P2POp(dist.irecv, _bytes(shard), rank)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
