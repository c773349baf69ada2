"""Memory that an engine gives back while others have its device, and takes again before the next load."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Released:
    """Tensors without memory for now. They stay the same objects, so that nothing that refers to them has to be told;
    what they held is lost.
    """

    def __init__(self) -> None:
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        tensors = sum(like.numel() * like.itemsize for _, like in self._tensors)
        return sum(size for _, size in self._storages) + tensors

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not (size := storage.nbytes()):
                continue
            if storage.resizable():  # with every view of it
                self._storages.append((storage, size))
                storage.resize_(0)
            else:  # numpy has seen it, or it is a mapped file
                self._tensors.append((tensor, tensor.to("meta")))
                tensor.data = tensor.new_empty(0)

    def reclaim(self) -> None:
        """As large as before, with anything inside."""
        for storage, size in self._storages:
            storage.resize_(size)
        for tensor, like in self._tensors:
            tensor.data = torch.empty_like(like, device=tensor.device)
        self._storages.clear()
        self._tensors.clear()
