"""The tensors of a model: all that its files hold, and all that a copy needs to compute the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

TensorsOf = Callable[[nn.Module], dict[str, torch.Tensor]]
"""Some of a model's `saved_tensors`."""


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, then every persistent buffer, as the live objects; tied ones under each of their names.

    Buffers are not trained, but models compute with them: a router's correction of its scores, a layer's scale.
    """
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(_persistent_buffers(model))}


def by_tensor(named: dict[str, torch.Tensor]) -> dict[torch.Tensor, list[str]]:
    """The names of each tensor: several where it is tied."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(tensor, []).append(name)
    return names


@torch.no_grad()
def fill(lm: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give a `skeleton` its weights, which leave `weights`: whole, or its rows if it has been sharded since."""
    for tensor, names in by_tensor(saved_tensors(lm)).items():
        rows = weights.pop(names[0])
        if isinstance(tensor, DTensor):
            sharded = torch.empty_like(tensor, device=rows.device)
            assert isinstance(sharded, DTensor)
            sharded.to_local().set_(rows)  # type: ignore[call-overload]  # not copied
            rows = sharded
        filled = nn.Parameter(rows, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else rows
        for name in names:
            set_tensor(lm, name, filled)


def taken_back(lm: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a filled model, for `fill` to give to another one."""
    return {
        names[0]: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for tensor, names in by_tensor(saved_tensors(lm)).items()
    }


def set_tensor(lm: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, _, own_name = name.rpartition(".")
    setattr(lm.get_submodule(module), own_name, tensor)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
