"""The tensors of a model: all that its files hold, and all that a copy needs to compute the same results."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


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


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
