"""The random generators of a rank's process as tensors, so that a checkpoint holds them without pickling anything."""

from __future__ import annotations

import random

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's (on CPU and `device`), Python's and NumPy's generators, by name.

    Dropout draws from torch's; a user's own loss may draw from any of them.
    """
    _, python, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the states from `rng_state`; a generator that is not in it is unchanged.

    Raises ValueError, TypeError, OverflowError or RuntimeError for numbers that are no state.
    """
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "python" in state:
        has_gauss, gauss = state["python_gauss"].tolist()
        random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    if "numpy" in state:
        *keys, position, has_gauss = state["numpy"].tolist()
        if not 0 <= position <= len(keys):  # NumPy would read beyond them
            raise ValueError(f"got {position} as the position in NumPy's {len(keys)} random numbers")
        cached = state["numpy_gauss"].item()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
