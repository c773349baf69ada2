"""This machine's hardware, detected without torch so that `validate` stays fast."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Cores this process may use, GPUs it may see, and memory it may take."""

    cores: tuple[int, ...]
    num_gpus: int
    memory_gib: float

    @property
    def num_cpus(self) -> int:
        return len(self.cores)


def this_machine() -> Hardware:
    """The current machine, within the limits of its container."""
    return Hardware(cores=_cores(), num_gpus=_num_gpus(), memory_gib=_memory_gib())


@cache
def computes_bfloat16() -> bool:
    """Whether this machine's processor multiplies bfloat16. Where it does not, that is emulated, many times slower.

    False where the system does not say (there is no /proc/cpuinfo but on Linux).
    """
    try:
        return has_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return False


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the first processor in Linux's /proc/cpuinfo has AVX-512 BF16, AMX, or BF16 of ARM."""
    lines = cpuinfo.splitlines()
    listed = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(listed)


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _gpus_present()
    if visible is None:
        return present
    chosen = [d for d in visible.split(",") if d.strip() and d.strip() != "-1"]
    return min(present, len(chosen))


def _gpus_present() -> int:
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return len(list(driver.iterdir()))
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def _memory_gib() -> float:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no cgroup, or "max"
            continue
    return total / 2**30
