"""What vLLM's worker gives back while it sleeps, on a GPU by vLLM's own sleep mode.

On a CPU vLLM has none. There the blocks of the KV cache and the weights become empty, and the packed weights of linear
layers go with the functions that hold them: a load makes new ones.
"""

from __future__ import annotations

import ctypes
from typing import Any

import psutil
import torch
from vllm.platforms import current_platform

from .released import Released


class WorkerMemory:
    """Of one worker. `release` twice gives nothing more back."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._released = Released()
        self.is_away = False

    def release(self, level: int) -> int:
        """`level`: see `Engine.sleep`. Returns the bytes that the device has more of than before."""
        if self.is_away:
            return 0
        before, self.is_away = self._taken(), True
        if current_platform.is_cpu():
            self._release_on_cpu(level)
        else:
            self._worker.sleep(level)
        return max(0, before - self._taken())

    def reclaim(self) -> None:
        """Whatever was in it is lost: all weights must be loaded, and no block of the cache is known to hold a key."""
        if not self.is_away:
            return
        if current_platform.is_cpu():
            self._released.reclaim()
        else:
            self._worker.wake_up()
        self.is_away = False

    def _release_on_cpu(self, level: int) -> None:
        runner = self._worker.model_runner
        self._released.release(runner.kv_caches)
        if level == 2:
            for module in runner.model.modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None
            self._released.release(runner.model.parameters())
        ctypes.CDLL(None).malloc_trim(0)  # else what was small stays this process's

    def _taken(self) -> int:
        """Bytes of the device that this process has, or on a GPU all processes together."""
        if current_platform.is_cpu():
            return psutil.Process().memory_info().rss
        free, total = torch.cuda.mem_get_info()
        return total - free
