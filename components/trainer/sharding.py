"""FSDP2: one sharding unit per decoder layer, one for the rest."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .scoring import ScoringModel


def make_mesh(device_type: str, num_ranks: int) -> DeviceMesh:
    return init_device_mesh(device_type, (num_ranks,))


def shard(
    model: ScoringModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype, gradient_checkpointing: bool
) -> ScoringModel:
    """Shard in place: compute in `compute_dtype`; master weights, gradient reduction and optimizer in float32."""
    if gradient_checkpointing:
        model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype is torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    for layer in decoder_layers(model.lm):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights, so that every parameter is this rank's own shard of its master weights.

    FSDP keeps what a forward without a backward has gathered for the outermost layers, and would use it again.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """The longest `nn.ModuleList` of the model: its stack of decoder layers."""
    stacks = [m for m in lm.modules() if isinstance(m, nn.ModuleList)]
    return list(max(stacks, key=len)) if stacks else []
