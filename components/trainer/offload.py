"""A rank's way out of its device: while engines have it, weights and optimizer lie in main memory; so may the moments
alone, between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from .memory import give_freed_back


class Offload:
    """Moves models, and the state of their optimizers, between `device` and main memory. On a CPU there is one memory:
    nothing moves, but what was freed is given back.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: torch.device
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._device = device
        self._moved_models: list[torch.nn.Module] = []
        self._moved: list[tuple[dict[str, torch.Tensor], str]] = []
        self._is_away = False

    @contextmanager
    def brought_back(self) -> Iterator[None]:
        """Here while the block runs, and in main memory afterwards."""
        self.come_back()
        try:
            yield
        finally:
            self.leave(for_others=False)

    @torch.no_grad()
    def leave(self, *, for_others: bool = True) -> int:
        """Returns the bytes that the device has free again; 0 if they have been moved already.

        `for_others`: other processes may have them; else they are this one's, for its next passes.
        """
        if self._device.type == "cpu":
            if for_others:
                give_freed_back()
            return 0
        if self._is_away:
            return 0
        self._is_away = True
        num_bytes = 0
        for model in self._models:
            there = [t for t in model.parameters() if t.device == self._device]
            if there:  # with train.cpu_offload they are in main memory, and stay there
                num_bytes += sum(map(_local_bytes, there))
                model.to("cpu")  # resharded first, by FSDP's own `_apply`
                self._moved_models.append(model)
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.device == self._device:
                        num_bytes += _local_bytes(value)
                        state[name] = value.to("cpu")
                        self._moved.append((state, name))
        if for_others:
            torch.cuda.empty_cache()  # else it is this process's still
        return num_bytes

    @torch.no_grad()
    def come_back(self) -> None:
        if not self._is_away:
            return
        for model in self._moved_models:
            model.to(self._device)
        for state, name in self._moved:
            state[name] = state[name].to(self._device)
        self._moved_models.clear()
        self._moved.clear()
        self._is_away = False


def _local_bytes(tensor: torch.Tensor) -> int:
    """Of a sharded tensor, this rank's shard alone."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
