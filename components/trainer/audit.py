"""Temporarily load an older policy version into the trainer, from its publication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..weights import Manifest, check_bucket, read_bucket
from .names import PublishedNames
from .scoring import ScoringModel
from .sharding import reshard
from .tensors import TensorsOf, by_tensor, saved_tensors


@contextmanager
def published_weights(
    model: ScoringModel,
    names: PublishedNames,
    manifest: Manifest,
    buckets: Sequence[np.ndarray],
    *,
    tensors_of: TensorsOf = saved_tensors,
) -> Iterator[None]:
    """Inside, `model` (sharded or not) has the weights of `manifest`; outside, its own again, bit for bit.

    `tensors_of`: those that are published. Every rank reads the whole publication and keeps its own shards of it. Costs
    one more copy of the rank's shards.
    """
    reshard(model)
    tensors = {aliases[0]: tensor for tensor, aliases in by_tensor(tensors_of(model.lm)).items()}
    missing = {name: names.parts(name, t.shape) for name, t in tensors.items()}
    found: dict[str, torch.Tensor] = {}
    own = {name: _local(t).detach().clone() for name, t in tensors.items()}
    try:
        with torch.no_grad():
            for index, bucket in enumerate(buckets):
                check_bucket(manifest, index, bucket)
                found |= read_bucket(manifest, index, torch.from_numpy(bucket))
                for name in [name for name, parts in missing.items() if parts <= found.keys()]:
                    full = names.join(name, tensors[name].shape, found)
                    _local(tensors[name]).copy_(_shard_like(tensors[name], full))
                    for part in missing.pop(name):
                        del found[part]
        assert not missing, f"not in the publication: {sorted(missing)[:3]}"
        yield
    finally:
        reshard(model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                _local(tensor).copy_(own[name])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_like(tensor: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return full
    full = full.to(tensor.device, tensor.dtype)
    # No rank sends anything: each has read the same bytes.
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
