"""An older policy version back in the trainer for a moment, from its own publication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..weights import Manifest, read_bucket
from .names import PublishedNames
from .scoring import ScoringModel
from .sharding import reshard


@contextmanager
def published_weights(model: ScoringModel, manifest: Manifest, buckets: Sequence[np.ndarray]) -> Iterator[None]:
    """Inside, `model` (sharded or not) has the weights of `manifest`; outside, its own again, bit for bit.

    Every rank reads the whole publication and keeps its own shards of it. Costs one more copy of the rank's shards.
    """
    reshard(model)
    parameters, names = dict(model.lm.named_parameters()), PublishedNames(model.lm)
    missing = {name: names.parts(name, p.shape) for name, p in parameters.items()}
    found: dict[str, torch.Tensor] = {}
    own = {name: _local(p).detach().clone() for name, p in parameters.items()}
    try:
        with torch.no_grad():
            for index, bucket in enumerate(buckets):
                entries = [e for e in manifest.entries if e.bucket == index]
                # A copy, because what comes out of an object store is read-only.
                memory = torch.from_numpy(np.array(bucket))
                found |= read_bucket(memory, entries, policy_version=manifest.policy_version)
                for name in [name for name, parts in missing.items() if parts <= found.keys()]:
                    full = names.join(name, parameters[name].shape, found)
                    _local(parameters[name]).copy_(_shard_like(parameters[name], full))
                    for part in missing.pop(name):
                        del found[part]
        assert not missing, f"not in the publication: {sorted(missing)[:3]}"
        yield
    finally:
        reshard(model)
        with torch.no_grad():
            for name, parameter in parameters.items():
                _local(parameter).copy_(own[name])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _shard_like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return full
    full = full.to(parameter.device, parameter.dtype)
    # No rank sends anything: each has read the same bytes.
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
