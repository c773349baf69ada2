"""FSDP2: one sharding unit per decoder layer (or what is asked for), one for the rest; over all ranks, or in several
copies (HSDP).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

from ..failures import Refused
from .linear import use_onednn
from .shards import shard_of
from .tensors import fill
from .working_copies import ComputesWithCopies, use_working_copies

if TYPE_CHECKING:  # the driver reads checkpoints, and has no use for transformers
    from .scoring import ScoringModel

MAX_PROGRAMS = 32


def make_mesh(device_type: str, num_ranks: int, shards: int | None = None) -> DeviceMesh:
    """All ranks; `shards`: how many neighbours have a copy of the weights together (None: all of them have one).

    With several copies it has two dimensions, and FSDP adds up gradients over both (HSDP).
    """
    if shards is None or shards == num_ranks:
        return init_device_mesh(device_type, (num_ranks,))
    return init_device_mesh(device_type, (num_ranks // shards, shards), mesh_dim_names=("copy", "shard"))


def shard(
    model: ScoringModel,
    mesh: DeviceMesh,
    *,
    weights: dict[str, torch.Tensor],
    compute_dtype: torch.dtype,
    gradient_checkpointing: bool,
    compile_layers: bool = False,
    cpu_offload: bool = False,
    forward_prefetch: int = 0,
    units: Sequence[str] | int | None = None,
) -> ScoringModel:
    """Shard a skeleton in place, and fill it with this rank's `weights`; see `pretrained`.

    A CPU rank that is alone is not sharded: its parameters are plain tensors, with `working_copies` in another type.
    Computes in `compute_dtype`; master weights, gradient reduction and optimizer are in float32. `compile_layers`: each
    decoder layer by torch.compile, except its packed attention. `cpu_offload`: master weights, gradients and optimizer
    live in the CPU's memory, and a layer's weights come to the device while it computes.
    `forward_prefetch`: weights of so many further units are gathered while one computes its forward pass. `units`: see
    `sharding_units`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype is torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    # One rank already has everything: gathering again for the backward pass would only save a copy in the compute
    # dtype. Frozen weights have no backward pass, and offloaded weights must leave the device.
    again = shard_of(mesh)[1] > 1 or cpu_offload or not any(p.requires_grad for p in model.parameters())
    if compile_layers:
        # Training, scoring and the canary compile to separate programs, for each kind of layer. Programs beyond the
        # limit would run uncompiled.
        torch._dynamo.config.recompile_limit = max(MAX_PROGRAMS, torch._dynamo.config.recompile_limit)
    elif mesh.device_type == "cpu":
        use_onednn(model.lm)
    modules = sharding_units(model.lm, units)
    for layer in decoder_layers(model.lm):
        if gradient_checkpointing:
            checkpoint_activations(layer)
        if compile_layers:
            # Microbatches differ only in length: the first two compile one program for all of them. If every size were
            # marked as dynamic, torch would divide every index by the size of a head.
            layer.compile()
    # A CPU rank that is alone has nothing to gather or to reduce. FSDP would only copy all weights and all gradients,
    # in every pass.
    exchanges = mesh.size() > 1 or mesh.device_type != "cpu"
    is_sharded = exchanges or cpu_offload or units is not None or forward_prefetch > 0
    if is_sharded:
        for module in reversed(modules):  # those inside of others first
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=again)
        # Tokens' temperatures reach the root as numbers, and would be rounded.
        exact = dataclasses.replace(policy, cast_forward_inputs=False)
        fully_shard(model, mesh=mesh, mp_policy=exact, offload_policy=offload)
    if forward_prefetch:
        for i, module in enumerate(modules):
            assert isinstance(module, FSDPModule), "sharded above"
            module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + forward_prefetch])  # type: ignore[arg-type]
    fill(model.lm, weights)
    if not is_sharded and policy.param_dtype is not None:
        use_working_copies(model, policy.param_dtype, layers=decoder_layers(model.lm))
    elif is_sharded and hasattr(model, "plain_logits"):
        register_fsdp_forward_method(model, "plain_logits")
    return model


def reshard(model: nn.Module) -> None:
    """Release what passes compute with, so that every parameter is this rank's own shard of its master weights.

    FSDP keeps what a forward without a backward gathered for the outermost layers, and would use it again.
    """
    if isinstance(model, ComputesWithCopies):
        model.copies.take_away()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """The model's stack of decoder layers: of its lists of modules, the one with the most weights."""
    stacks = [m for m in lm.modules() if isinstance(m, nn.ModuleList)]
    return list(max(stacks, key=lambda m: sum(p.numel() for p in m.parameters()))) if stacks else []


def sharding_units(lm: nn.Module, wanted: Sequence[str] | int | None) -> list[nn.Module]:
    """The modules whose weights are gathered and given up together, in forward order, a module before those inside it.

    `wanted` None: each decoder layer. Names: every module of these classes. A number: the smallest modules that have so
    many weights, besides those of units inside. All of them within decoder layers: head and embeddings may be one
    tensor, which is gathered once for the whole pass. Raises `Refused` where there is none.
    """
    layers = decoder_layers(lm)
    if wanted is None:
        return layers
    inside = [m for layer in layers for m in layer.modules() if type(m).forward is not nn.Module.forward]
    if isinstance(wanted, int):
        found, taken = set[nn.Module](), set[nn.Parameter]()
        for module in reversed(inside):
            own = set(module.parameters()) - taken
            if sum(p.numel() for p in own) >= wanted:
                found.add(module)
                taken |= own
    else:
        found = {m for m in inside if type(m).__name__ in wanted}
    known = {
        type(m).__name__: sum(p.numel() for p in m.parameters())
        for m in inside
        if next(m.parameters(), None) is not None
    }
    missing = [name for name in ([] if isinstance(wanted, int) else wanted) if name not in known]
    if missing or not found:
        said = ", ".join(f"{name} ({number})" for name, number in list(known.items())[:20])
        raise Refused(
            f"train.fsdp_units: got {missing[0] if missing else wanted}, expected classes of modules within the "
            f"decoder layers of {type(lm).__name__}, or at most the weights of one: {said}; change it, or leave it out "
            "for whole layers"
        )
    return [m for m in inside if m in found]


class _Checkpointed:
    """Keeps a layer's inputs instead of its activations, and computes it again in the backward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]  # the layer's own
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        # Our models are without noise, so there is no random-generator state to keep.
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def checkpoint_activations(layer: nn.Module) -> None:
    """Gradient checkpointing of one layer, outside of its hooks and of what is compiled.

    The one in transformers works only in training mode, which has dropout and router noise. Like FSDP, this changes the
    layer's class: a wrapper module would change the names of its weights.
    """
    layer.__class__ = type(f"Checkpointed{type(layer).__name__}", (_Checkpointed, type(layer)), {})
