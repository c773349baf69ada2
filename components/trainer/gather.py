"""A sharded model's weights on rank 0, one bucket at a time: no rank ever holds more of the whole than that.

Each rank casts its own shards to the type they travel in and sends them to rank 0, which receives them in their place
in the bucket. No other rank sees more than its shards.
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


class Gatherer:
    """Made by all ranks of a sharded model alike. `dtype`: what every weight is cast to."""

    def __init__(self, model: ScoringModel, *, dtype: torch.dtype, bucket_bytes: int) -> None:
        self._model = model
        self._names = PublishedNames(model.lm)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        reshard(model)
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in model.lm.named_parameters(remove_duplicate=False):
            # Tied: an engine may keep a packed copy of it under the other name, so that is named, not left out.
            names.setdefault(parameter, []).append(name)
        self.plans = plan_buckets(((n, dtype, p.shape) for p, n in names.items()), bucket_bytes)
        if self._num_ranks > 1:
            dist.barrier()  # NCCL: messages between two ranks may not be the first that a group hears

    @torch.no_grad()
    def buckets(self) -> Iterator[tuple[BucketPlan, torch.Tensor | None]]:
        """Every bucket in turn (a collective): uint8 on the CPU of rank 0, None elsewhere.

        Each is made when it is asked for. Whoever still holds the last one by then holds two.
        """
        reshard(self._model)
        parameters = dict(self._model.lm.named_parameters(remove_duplicate=False))
        for plan in self.plans:
            # Not kept in a variable: it would live on while the next one is gathered.
            yield plan, self._gather(plan, parameters)

    def as_published(self, plan: BucketPlan, memory: torch.Tensor) -> tuple[BucketPlan, torch.Tensor]:
        """The same weights under the names of the model's files: a layer's experts apart, which costs another copy."""
        if not self._names.differ:
            return plan, memory
        tensors: list[tuple[tuple[str, ...], torch.Tensor]] = []
        for place in plan.places:
            parts = self._names.split(place.names[0], place.tensor(memory))
            is_whole = set(parts) == {place.names[0]}
            tensors += [(place.names if is_whole else (name,), tensor) for name, tensor in parts.items()]
        (renamed,) = plan_buckets(((n, t.dtype, t.shape) for n, t in tensors), bucket_bytes=2 * plan.num_bytes + 2**20)
        renamed = replace(renamed, index=plan.index)
        copy = renamed.empty()
        for place, (_, tensor) in zip(renamed.places, tensors, strict=True):
            place.tensor(copy).copy_(tensor)
        return renamed, copy

    def _gather(self, plan: BucketPlan, parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor | None:
        # On a GPU shards meet on rank 0's GPU, and cross to its main memory a bucket at a time.
        device = parameters[plan.places[0].names[0]].device
        memory = plan.empty(device) if self._rank == 0 else None
        messages: list[dist.P2POp] = []
        for place in plan.places:
            parameter = parameters[place.names[0]]
            if memory is not None:
                messages += self._receive(parameter, place.tensor(memory))
            elif isinstance(parameter, DTensor):
                shard = _bytes(parameter.to_local().to(place.dtype))
                if len(shard):
                    messages.append(dist.P2POp(dist.isend, shard, 0))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return None if memory is None else memory.cpu()

    def _receive(self, parameter: torch.Tensor, whole: torch.Tensor) -> Iterator[dist.P2POp]:
        """Put rank 0's own shard in its place in `whole`, and say which messages bring the others'."""
        if not isinstance(parameter, DTensor):
            whole.copy_(parameter)
            return
        assert parameter.placements == (Shard(0),), f"sharded in a way that is not known here: {parameter.placements}"
        rows = -(-parameter.shape[0] // self._num_ranks)  # as torch.chunk cuts: the last ranks may have fewer, or none
        for rank, shard in enumerate(whole.split(rows)):
            if rank == 0:
                shard.copy_(parameter.to_local())
            else:
                yield dist.P2POp(dist.irecv, _bytes(shard), rank)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
