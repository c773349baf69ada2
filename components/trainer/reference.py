"""The reference policy: the weights that training started from, frozen and sharded like the policy."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from .families import load_model
from .scoring import ScoringModel
from .sharding import shard


def load_reference(
    path: str,
    mesh: DeviceMesh,
    *,
    attn: str,
    packing: str,
    chunk_tokens: int | None,
    compute_dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    max_length: int | None,
) -> ScoringModel:
    """A second copy of the model at `path` that no gradient reaches; costs its weights in float32 over all ranks."""
    model = load_model(
        path,
        attn=attn,
        packing=packing,
        chunk_tokens=chunk_tokens,
        trust_remote_code=trust_remote_code,
        max_length=max_length,
        device=device,
    )
    model.requires_grad_(False)
    return shard(model, mesh, compute_dtype=compute_dtype, gradient_checkpointing=False)
