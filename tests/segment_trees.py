"""What torchrl's prioritized sampler asks of its compiled trees, in NumPy: their extension does not load here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data.replay_buffers.samplers import prioritized


class Tree:
    def __init__(self, capacity: int, reduce: Callable[..., Any], neutral: float) -> None:
        self.values, self.reduce = np.full(capacity, neutral), reduce

    def __getitem__(self, index: Any) -> Any:
        return torch.as_tensor(self.values[np.asarray(index)], dtype=torch.float32)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[np.asarray(index)] = np.asarray(value)

    def query(self, start: int, stop: int) -> float:
        return float(self.reduce(self.values[start:stop]))

    def scan_lower_bound(self, mass: Any) -> Any:
        return np.searchsorted(np.cumsum(self.values), np.asarray(mass))


def provide_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchrl's own are missing."""
    if prioritized.SumSegmentTreeFp32 is None:
        for kind in ("Fp32", "Fp64"):
            monkeypatch.setattr(prioritized, f"SumSegmentTree{kind}", lambda n: Tree(n, np.sum, 0.0))
            monkeypatch.setattr(prioritized, f"MinSegmentTree{kind}", lambda n: Tree(n, np.min, np.inf))
