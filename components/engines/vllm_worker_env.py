"""What the engine's processes need in their environment, set before vllm is imported anywhere in this process."""

from __future__ import annotations

import os

from ..config.engines import vllm_variables

MANIFEST = "manifest.json"
PLACES = "places.json"
"""Of buckets in memory of a device."""
WORKER_EXTENSION = "leeway.engines.vllm_worker.WorkerExtension"
SCHEDULER = "leeway.engines.vllm_scheduler.scheduler"
PARENT_ENV = "LEEWAY_ENGINE_PARENT"
CORES_ENV = "LEEWAY_ENGINE_CORES"
MEMORY_ENV = "LEEWAY_ENGINE_MEMORY"


def prepare(*, device: str, cores: list[int], num_ranks: int, eager: bool) -> None:
    os.environ[PARENT_ENV] = str(os.getpid())
    os.environ.update(vllm_variables(os.environ, device=device, eager=eager))
    if device != "cpu":
        return
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would hold instead of what the engine is told
    if num_ranks > 1:
        # "auto" wants a NUMA node for each rank. The ranks share the cores, or one if they are fewer.
        each = max(1, len(cores) // num_ranks)
        own = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(num_ranks) if cores]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, c)) for c in own) or "nobind"
        if not cores:
            os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    elif cores:
        # vLLM binds threads in its multi-process executor only; the worker module pins the engine's process itself.
        os.environ[CORES_ENV] = ",".join(map(str, cores))
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
