"""torchrl's storage, writer and sampler, made to hold groups that are written once, read once and never overwritten."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import LazyStackStorage
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.writers import Writer


class FreeSlotWriter(Writer):
    """Writes into free places only. torchrl's own writers wrap around and silently overwrite unread data."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._free: list[int] = []
        self._num_used = 0

    def add(self, data: Any) -> int:
        if not self._free and self._num_used == self._capacity:
            raise RuntimeError(
                f"replay buffer: all {self._capacity} places hold groups nobody has taken; admission must stop before"
            )
        index = self._free.pop() if self._free else self._num_used
        self._num_used = max(self._num_used, index + 1)
        self._storage.set(index, data)
        return index

    def extend(self, data: Any) -> torch.Tensor:
        return torch.tensor([self.add(item) for item in data], dtype=torch.long)

    def release(self, indices: list[int]) -> None:
        """The groups at these places were read: drop them and free the places."""
        for index in indices:
            self._storage.set(index, None)
            self._free.append(index)

    def _empty(self, empty_write_count: bool = True) -> None:
        self._free, self._num_used = [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"free": list(self._free), "num_used": self._num_used}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._free, self._num_used = list(state_dict["free"]), state_dict["num_used"]

    def dumps(self, path: Any) -> None:
        raise NotImplementedError("groups in memory are not written to files; the ledger says what to generate again")

    def loads(self, path: Any) -> None:
        raise NotImplementedError("groups in memory are not written to files; the ledger says what to generate again")


class ChosenSampler(Sampler):
    """Samples exactly the places that the admission window chose, in that order."""

    def __init__(self) -> None:
        self.chosen: list[int] = []

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict]:
        assert len(self.chosen) == batch_size, f"{len(self.chosen)} places chosen for a take of {batch_size}"
        return torch.tensor(self.chosen, dtype=torch.long), {}

    def _empty(self) -> None:
        self.chosen = []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def dumps(self, path: Any) -> None:
        pass

    def loads(self, path: Any) -> None:
        pass


def make_storage(capacity: int) -> LazyStackStorage:
    """A list of TensorDicts: torchrl's other storages of tensors reject ragged ones."""
    return LazyStackStorage(max_size=capacity)
