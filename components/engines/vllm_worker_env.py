"""What the engine's processes need in their environment, set before vllm is imported anywhere in this process."""

from __future__ import annotations

import os

BACKEND = "leeway"
MANIFEST = "manifest.json"
WORKER_EXTENSION = "leeway.engines.vllm_worker.WorkerExtension"
PARENT_ENV = "LEEWAY_ENGINE_PARENT"
CORES_ENV = "LEEWAY_ENGINE_CORES"
MEMORY_ENV = "LEEWAY_ENGINE_MEMORY"


def prepare(*, device: str, cores: list[int], kv_cache_gib: float, eager: bool) -> None:
    os.environ[PARENT_ENV] = str(os.getpid())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if eager:
        # "eager" still compiles a few small functions, which costs 16 s at the first request on a CPU and gains
        # nothing.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    if device != "cpu":
        return
    # Without this, the "uni" executor silently becomes "mp" on CPU, whose worker process spins on a core even when
    # idle.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib)))
    if cores:
        # vLLM binds threads in its multi-process executor only; the worker module pins the engine's process itself.
        os.environ[CORES_ENV] = ",".join(map(str, cores))
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
