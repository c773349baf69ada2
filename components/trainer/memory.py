"""The memory of a rank: how it is kept, and its peak."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Makes this process keep the memory that its tensors free, for the next ones.

    A pass makes and frees gigabytes of activations. glibc gives large blocks back to the kernel each time, which hands
    them out anew, filled with zeros: a tenth of a small model's step. Blocks over 64 MiB still go back where the thread
    has a heap of its own, as a rank's has; at that size arithmetic takes far longer. Without glibc, and where the user
    has told its malloc something, nothing changes.
    """
    libc = ctypes.CDLL(None)
    is_set_by_user = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if hasattr(libc, "mallopt") and not is_set_by_user:
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_TOP_PAD, 1 << 27)  # twice a thread's heap; with less, a heap goes back as soon as it is empty


def give_freed_back() -> None:
    """To the kernel, for other processes, what this one keeps and does not use, but for the ends of threads' heaps."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def peak_memory_gib(device: torch.device) -> float:
    """CUDA: peak GiB of tensors since the last call. CPU: peak resident GiB of the process, ever."""
    if device.type == "cuda":
        import torch

        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    return peak / 2**30
