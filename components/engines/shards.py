"""Which part of a published tensor each rank of an engine takes, as its loaders show, and that no part is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..weights import TensorEntry

Part = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(offset from the tensor's first element, size, stride), in elements."""


class PartsTaken(TorchDispatchMode):
    """Notes what is copied from a published tensor while a loader has it: a view of the tensor's own memory.

    A loader that computes something from it first (another dtype, a sum) takes nothing that could be noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, set[Part]] = {}
        self._name, self._tensor = "", torch.empty(0)

    @contextmanager
    def of(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        self._name, self._tensor = name, tensor
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._is_of_tensor(args[1]):
            source = args[1]
            offset = source.storage_offset() - self._tensor.storage_offset()
            self.parts.setdefault(self._name, set()).add((offset, tuple(source.shape), source.stride()))
        return func(*args, **(kwargs or {}))

    def _is_of_tensor(self, source: torch.Tensor) -> bool:
        """Loaders keep what they had before and copy it again: only the tensor at hand counts."""
        tensor = self._tensor
        return (
            source.device == tensor.device
            and source.dtype == tensor.dtype
            and source.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and 0 <= source.storage_offset() - tensor.storage_offset() < max(1, tensor.numel())
        )


def left_out(entries: Iterable[TensorEntry], of_ranks: Sequence[dict[str, list[Any]]]) -> list[str]:
    """Names of tensors of which some rank takes a part, and all ranks together not every element.

    Parts that differ do not overlap: ranks take equal shares, or the same.
    """
    names = []
    for entry in entries:
        parts = {(offset, *size) for parts in of_ranks for offset, size, _ in parts.get(entry.name, ())}
        if parts and sum(math.prod(size) for _, *size in parts) < math.prod(entry.shape):
            names.append(entry.name)
    return names
