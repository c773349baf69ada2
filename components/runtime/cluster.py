"""A Ray cluster for one run: started on this machine, or joined by address."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from ..config import Config, derive
from ..config.names import user_names
from ..config.plugins import modules_in
from ..failures import PartFailed


class ClusterError(PartFailed):
    """The cluster cannot hold the run; said before any part starts."""

    exit_code = 2


def connect(config: Config) -> None:
    """Start or join Ray. Raises `ClusterError` when a joined cluster lacks what the run needs."""
    need = derive(config)
    user_modules = [str(p) for p in user_module_paths(config)]
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if user_modules:
        options["runtime_env"] = {"py_modules": user_modules}
    if config.cluster.address is None:
        # Ray lowers its workers' priority by default; here they are the job itself.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # CPUs are placed by core, not counted by Ray: a small machine may hold more processes than cores.
        ray.init(
            num_cpus=max(os.cpu_count() or 1, need.cpus_needed),
            include_dashboard=False,
            object_store_memory=store_mb * 2**20 if (store_mb := config.cluster.object_store_mb) else None,
            **options,
        )
        return
    ray.init(address=config.cluster.address, **options)
    have = ray.cluster_resources()
    if have.get("GPU", 0) < need.gpus_needed or have.get("CPU", 0) < need.cpus_needed:
        raise ClusterError(
            "cluster.address",
            f"the cluster has {have.get('GPU', 0):g} GPUs and {have.get('CPU', 0):g} CPUs, expected "
            f"{need.gpus_needed} and {need.cpus_needed}; lower rollout.num_generators or train.num_ranks, or add nodes",
        )


def disconnect(processes: list[psutil.Process], *, grace_s: float = 10.0) -> None:
    """Leave Ray, then make sure that none of the run's processes on this machine is left."""
    ray.shutdown()
    deadline = time.monotonic() + grace_s
    left = [p for p in processes if p.is_running()]
    while left and time.monotonic() < deadline:
        _, left = psutil.wait_procs(left, timeout=0.2)
    for process in left:
        process.kill()


def user_module_paths(config: Config) -> list[Path]:
    """Files and packages of the user's own, to be sent to every worker.

    Those that the config names ("pkg.mod:Name"), what they have imported from beside them so far, and everything in the
    folders of `plugins`. Installed packages are expected on every node already.
    """
    sections = (config.env, config.task, config.replay, config.algorithm)
    found = user_names([section.model_dump() for section in sections])
    names = {name.split(":")[0].split(".")[0] for name in found}
    paths = [path for name in sorted(names) if (path := _own_source(name)) is not None]
    folders = {path.parent for path in paths}
    beside = (_own_source(name) for name in sorted(sys.modules) if "." not in name and name not in names)
    paths += [path for path in beside if path is not None and path.parent in folders]
    paths += [path for folder in config.plugins for path in modules_in(folder)]
    return list(dict.fromkeys(paths))


def _own_source(name: str) -> Path | None:
    """The file or package folder of a top-level module; None for what is installed, built in, or Leeway itself."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that is loaded but carries no spec
        return None
    origin = spec.origin if spec else None
    if not origin or not origin.endswith(".py") or "site-packages" in origin:
        return None
    path = Path(origin).resolve()
    if path.is_relative_to(Path(__file__).resolve().parents[1]):
        return None
    return path.parent if path.name == "__init__.py" else path
