"""The reference policy: the weights that training started from, frozen and sharded like the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from .families import find_model
from .scoring import ScoringModel
from .sharding import shard

if TYPE_CHECKING:
    from .settings import TrainerSettings


def load_reference(path: str, settings: TrainerSettings, mesh: DeviceMesh, *, device: torch.device) -> ScoringModel:
    """A second, frozen copy of the model at `path`; costs its weights in float32, sharded over all ranks.

    And one copy of them in half precision where `shard` does not shard.
    """
    found = find_model(
        path,
        attn=settings.model.attn,
        packing=settings.train.packing,
        head_dtype=settings.head_dtype,
        max_length=settings.max_length,
        device=device,
        mesh=mesh,
        cpu_offload=settings.train.cpu_offload_reference,
    )
    model = found.scoring_model(settings.train.logprob_chunk_tokens)
    model.requires_grad_(False)
    return shard(
        model,
        mesh,
        weights=found.weights,
        compute_dtype=settings.dtype,
        gradient_checkpointing=False,
        cpu_offload=settings.train.cpu_offload_reference,
        units=settings.train.fsdp_units,
    )
