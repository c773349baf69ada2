"""torchrl's storage, writer and sampler, for groups that are written once, read once and never overwritten.

Each can be exchanged: any torchrl storage that takes ragged TensorDicts (`replay.storage`), any torchrl sampler
(`replay.sampler`). What a batch must hold and what it may hold is the window's to say; a sampler prefers among the
latter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from ..importing import import_user_object
from ..samples import by_path, nested

ROUNDS = 16
"""How often a sampler is asked for a batch. What it has not proposed then, the window's order fills."""


class SafetensorsCheckpointer(StorageCheckpointerBase):
    """All groups of a storage in one file, bit for bit; torchrl has none for ragged TensorDicts."""

    def dumps(self, storage: Any, path: str | Path) -> None:
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{index}/{name}": tensor.contiguous()
            for index in range(len(storage))
            for name, tensor in by_path(storage.get(index)).items()
        }
        safetensors.torch.save_file(tensors, path / "groups.safetensors", {"count": str(len(storage))})

    def loads(self, storage: Any, path: str | Path) -> None:
        with safetensors.safe_open(path := Path(path) / "groups.safetensors", "pt") as file:
            count = int((file.metadata() or {})["count"])
        tensors = nested(safetensors.torch.load_file(path))
        storage._empty()
        for index in range(count):
            storage.set(index, TensorDict(tensors.get(str(index), {}), batch_size=[]))


class FreeSlotWriter(Writer):
    """Writes at free indices only. torchrl's own writers wrap around and silently overwrite unread data."""

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

    def release(self, indices: Sequence[int]) -> None:
        """The groups at these indices were read: drop them and free the indices."""
        for index in indices:
            self._storage.set(index, _nothing())
            self._free.append(index)

    def _empty(self, empty_write_count: bool = True) -> None:
        self._free, self._num_used = [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"free": list(self._free), "num_used": self._num_used}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._free, self._num_used = list(state_dict["free"]), state_dict["num_used"]

    def dumps(self, path: str | Path) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "writer.json").write_text(json.dumps(self.state_dict()))

    def loads(self, path: str | Path) -> None:
        self.load_state_dict(json.loads((Path(path) / "writer.json").read_text()))


class WindowSampler(Sampler):
    """The indices of the groups that a batch must hold, and those that `inner` prefers of the ones that it may hold.

    `inner`: any torchrl sampler. What it proposes is passed over where the window does not allow it, and where it
    proposes too little, the window's own order fills the batch. None: that order, always.
    """

    def __init__(self, inner: Sampler | None = None) -> None:
        self.inner = inner
        self._must: list[int] = []
        self._may: list[int] = []

    def allow(self, must: Sequence[int], may: Sequence[int]) -> None:
        """What the next batch must hold, and what else it may, best first."""
        self._must, self._may = list(must), list(may)

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict]:
        count = batch_size - len(self._must)
        assert 0 <= count <= len(self._may), f"{len(self._must)} + {len(self._may)} groups for a batch of {batch_size}"
        chosen = dict.fromkeys(self._must)
        rest = dict.fromkeys(self._may)
        for _ in range(ROUNDS if self.inner is not None and 0 < count < len(rest) else 0):
            assert self.inner is not None
            proposed, _ = self.inner.sample(storage, batch_size)
            for index in proposed.tolist():
                if index in rest and len(chosen) < batch_size:
                    chosen[index] = None
        for index in rest:
            if len(chosen) < batch_size:
                chosen[index] = None
        return torch.tensor(list(chosen), dtype=torch.long), {}

    @property
    def is_prioritized(self) -> bool:
        return self.inner is not None and type(self.inner).update_priority is not Sampler.update_priority

    @property
    def default_priority(self) -> float:
        return 1.0 if self.inner is None else float(self.inner.default_priority)

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        if self.inner is not None and self.is_prioritized:
            self.inner.update_priority(index, priority, storage=storage)

    def add(self, index: Any) -> None:
        if self.inner is not None:
            self.inner.add(index)

    def extend(self, index: Any) -> None:
        if self.inner is not None:
            self.inner.extend(index)

    def _empty(self) -> None:
        self.allow([], [])
        if self.inner is not None:
            self.inner._empty()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.inner is None else self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.inner is not None:
            self.inner.load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        if self.inner is not None:
            self.inner.dumps(path)

    def loads(self, path: str | Path) -> None:
        if self.inner is not None:
            self.inner.loads(path)


P = TypeVar("P", Sampler, Storage)


def own_part(key: str, name: str | None, kind: type[P], capacity: int) -> P | None:
    """What the user's function `name` makes of the most groups that the buffer holds; None where there is no name.

    Raises a one-line ValueError for a function that is not there, fails, or makes something else.
    """
    if name is None:
        return None
    expected = f"a function (capacity) -> torchrl {kind.__name__}"
    function = import_user_object(name, key=key, expected=expected)
    try:
        part = function(capacity)
    except Exception as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{key}: {name}({capacity}) fails: {cause}; expected {expected}") from error
    if not isinstance(part, kind):
        raise ValueError(f"{key}: {name}({capacity}) made a {type(part).__name__}; expected {expected}")
    return part


def stacked(groups: Any) -> Any:
    """The groups of a batch as one lazy stack, also from a storage that gives a list."""
    return lazy_stack(groups) if isinstance(groups, list) else groups


def _nothing() -> TensorDict:
    """What is at an index that is free."""
    return TensorDict({}, batch_size=[])
