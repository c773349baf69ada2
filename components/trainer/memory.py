"""Peak memory of a rank."""

from __future__ import annotations

import resource

import torch


def peak_memory_gib(device: torch.device) -> float:
    """CUDA: peak GiB of tensors since the last call. CPU: peak resident GiB of the process, ever."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    return peak / 2**30
