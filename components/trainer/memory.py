"""The most memory that a rank has taken."""

from __future__ import annotations

import resource

import torch


def peak_memory_gib(device: torch.device) -> float:
    """CUDA: most GiB that tensors took since the last call. CPU: most that the process has had resident, ever."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    return peak / 2**30
