"""A Ray cluster for one run: started on this machine, or joined by address.

The run's own cluster keeps everything in the run's scratch folder (see `footprint`), which only the user may enter:
Ray gives its own folders below, user code among them, to everybody. All its sockets are on loopback, and Ray answers
only those who know a token that is drawn for each driver.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.worker as ray_worker
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

from ..config import Config, Recipe, Stage, derive
from ..config.derived import Derived
from ..config.names import user_names
from ..config.plugins import modules_in
from ..failures import Kind, PartFailed
from .footprint import MARK_ENV, PREFIX_ENV
from .fork_server import ForkServer, can_fork, modules_of
from .pages import in_large_pages
from .threads import yielding
from .watch import RunWatch

logger = logging.getLogger(__name__)


class ClusterError(PartFailed):
    """The cluster is too small for the run; raised before any part starts."""

    exit_code = 2


LOOPBACK = "127.0.0.1"
ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": LOOPBACK,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's processes: this machine's address is loopback's
}
"""Where the libraries of a run's own cluster listen; a setting of the user's stands."""
_TOKEN = secrets.token_hex(32)
OF_THE_RUN = (MARK_ENV, PREFIX_ENV, "SPT_NOENV")
"""What marks processes of the run that it does not start itself; see `footprint`."""
REACH_S = 20.0

START_LOCK = "\0leeway-ray-start"
"""An address, bound while Ray starts: several concurrent starts take longer than Ray waits for one (30 s)."""
NUM_STARTS = 3
UNUSED_SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node; no setting of Ray leaves them out. Each starts a process: autoscaler, logs, dashboard."""
AGENT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); signal.pause()"
"""Stands in for the agent that serves metrics and the dashboard, without which the raylet does not start: it waits, and
dies with the raylet.
"""
WORKER_COMMAND = "python_worker_command"
RAYLET_OPTIONS = {
    "dashboard_agent_command": subprocess.list2cmdline([sys.executable, "-IS", "-c", AGENT]),
    "metrics-agent-port": "-1",  # as where `ray[default]` is not installed; of a port 0 the raylet waits to be told
    "metrics_export_port": "-1",
    "dashboard_agent_listen_port": "-1",
    "num_prestart_python_workers": "0",  # they are of no job
}


def begin(stages: Sequence[Stage], *, scratch: Path) -> ForkServer | None:
    """What can be done for `connect` beside other work: import, once, what the workers on this machine need.

    Not where workers compute on GPUs: a fork cannot use what another process has opened there, and nobody has tried.
    """
    cluster = stages[0].config.cluster
    if cluster.address is not None or cluster.device != "cpu" or not can_fork():
        return None
    _prepare(stages[0].config)
    return ForkServer(scratch, modules_of(stages))


def _prepare(config: Config) -> None:
    """Set what the processes of a cluster on this machine inherit."""
    # Ray lowers its workers' priority by default; here they are the job itself.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _keep_to_this_machine()
    if config.cluster.device == "cpu":
        os.environ.update(yielding(os.environ) | in_large_pages(os.environ))


def connect(
    stages: Sequence[Stage], *, scratch: Path, watch: RunWatch | None = None, fork_server: ForkServer | None = None
) -> None:
    """Start or join Ray for `stages`, which run one after the other; register the started processes with `watch`.

    `fork_server`: starts the workers of a cluster on this machine.

    Raises `ClusterError` when a joined cluster lacks what the run needs, `PartFailed` when no cluster comes up.
    """
    config = stages[0].config
    user_modules = list(dict.fromkeys(str(p) for s in stages for p in user_module_paths(s.config, s.recipe)))
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    ray_worker.print_to_stdstream = _print_to_log
    if user_modules:
        options["runtime_env"] = {"py_modules": user_modules}
    if config.cluster.address is None:
        _prepare(config)
        options |= {
            # CPUs are placed by core, not counted by Ray: a small machine may hold more processes than cores.
            "num_cpus": max(os.cpu_count() or 1, *(derive(stage.config, stage.recipe).cpus_needed for stage in stages)),
            "include_dashboard": False,
            "object_store_memory": store_mb * 2**20 if (store_mb := config.cluster.object_store_mb) else None,
            "_temp_dir": str(scratch / "ray"),
        }
        _start(options, timeout_s=config.cluster.start_timeout_s, fork_server=fork_server)
        if watch is not None:
            for kind, pid in ray_processes():
                watch.add("ray", [pid], what=f"{kind} process", kind=Kind.CLUSTER)
        return
    runtime_env = options.setdefault("runtime_env", {})
    runtime_env["env_vars"] = {name: os.environ[name] for name in OF_THE_RUN if name in os.environ}
    if config.cluster.device == "cpu":
        runtime_env["env_vars"] |= yielding(os.environ) | in_large_pages(os.environ)
    _join(config.cluster.address, options)
    check_room(stages, [node["Resources"] for node in ray.nodes() if node["Alive"]])


def _print_to_log(data: dict[str, Any], ignore_prefix: bool = False) -> None:
    """Ray's own lines on a worker's end, else on the terminal: what it means for the run, the run says."""
    print(*data["lines"], sep="\n", file=sys.stderr, flush=True)


def _join(address: str, options: Mapping[str, Any]) -> None:
    """Raises `ClusterError` in one line where there is no cluster, or this process may not join it."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except OSError as error:
            raise ClusterError(
                "cluster.address",
                f"got {address}, where nothing answers ({error.strerror or error}); expected the address that "
                "`ray start --head` has printed; start the cluster, or correct it",
            ) from None
    ray_constants.ENABLE_RAY_CLUSTER = True
    # Ray does so by itself for a cluster that it finds, and not for one that it is told of.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        if port.isdigit():
            GcsClient(address=address)  # raises after 40 s without an answer; `ray.init` asks twenty times
        ray.init(address=address, **options)
    except (AuthenticationError, ConnectionError, RpcError, RuntimeError) as error:
        said = " ".join(str(error).split())
        how = "; see docs/cluster.md"
        if "oken" in said:
            how = (
                "; the cluster wants its token: copy ~/.ray/auth_token from the machine of `ray start --head` (or set "
                "RAY_AUTH_TOKEN), and set RAY_AUTH_MODE=token for every `ray start` and here"
            )
        raise ClusterError("cluster.address", f"got {address}, which cannot be joined: {said[:300]}{how}") from None


def check_room(stages: Sequence[Stage], hosts: Sequence[Mapping[str, float]]) -> None:
    """Raise `ClusterError` for the first stage that needs more GPUs or CPUs than these machines have together, or more
    for one of its processes than any has left beside the others.
    """
    gpus, cpus = (sum(host.get(kind, 0) for host in hosts) for kind in ("GPU", "CPU"))
    for stage in stages:
        need = derive(stage.config, stage.recipe)
        if gpus >= need.gpus_needed and cpus >= need.cpus_needed and _fits(need, hosts):
            continue
        roles = {"generator": "rollout.num_generators", "trainer": "train.num_ranks"}
        keys = " or ".join(key for role, key in roles.items() if need.processes[role])
        raise ClusterError(
            "cluster.address",
            f"the cluster has {gpus:g} GPUs and {cpus:g} CPUs, expected {need.gpus_needed} and {need.cpus_needed} "
            f"for the stage {stage.name}, those of each process on one machine; lower {keys}, or add machines",
        )


def _fits(need: Derived, hosts: Sequence[Mapping[str, float]]) -> bool:
    """Whether each process finds a machine if the largest ones are placed first."""
    left = [(host.get("GPU", 0), host.get("CPU", 0)) for host in hosts]
    roles = [role for role in need.processes if not (need.shares_devices and role == "generator")]
    each = [
        (need.gpus[role] // number, need.cpus[role] // number)
        for role in roles
        if (number := need.processes[role])
        for _ in range(number)
    ]
    for process in sorted(each, reverse=True):
        room = next((i for i, own in enumerate(left) if all(a >= b for a, b in zip(own, process, strict=True))), None)
        if room is None:
            return False
        left[room] = (left[room][0] - process[0], left[room][1] - process[1])
    return True


def _keep_to_this_machine() -> None:
    """Everything that starts from here on listens on loopback, and Ray wants the token.

    Ray's servers listen on every interface unless the address of their node is loopback's. `_node_ip_address` does not
    do that: Ray replaces loopback by an address that others can reach.
    """
    for name, value in ON_LOOPBACK.items():
        os.environ.setdefault(name, value)
    ray_constants.ENABLE_RAY_CLUSTER = False  # read when Ray was imported, before the variable was set
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # otherwise Ray takes one from a file in the home folder
        os.environ.setdefault("RAY_AUTH_TOKEN", _TOKEN)
        AuthenticationTokenLoader.instance().reset_cache()


def _start(options: dict[str, Any], *, timeout_s: float, fork_server: ForkServer | None = None) -> None:
    """Start the run's own cluster, one start at a time on this machine; retry if Ray gives up."""
    deadline = time.monotonic() + timeout_s
    for attempt in range(1, NUM_STARTS + 1):
        with _alone(deadline):
            before = {child.pid for child in psutil.Process().children()}
            try:
                with _own_way(fork_server):
                    ray.init(address="local", **options)
                return
            except (ValueError, TypeError):  # bad arguments: a retry would not help
                raise
            except Exception as error:  # Ray has no specific type for it
                started = [child for child in psutil.Process().children() if child.pid not in before]
                for process in [p for child in started for p in (child, *child.children(recursive=True))]:
                    process.kill()
                ray.shutdown()
                if attempt == NUM_STARTS or time.monotonic() > deadline:
                    cause = f"it did not start, in {attempt} attempts: {' '.join(str(error).split())}"
                    raise PartFailed("ray", f"{cause}; is the machine overloaded?", traceback.format_exc()) from None
                logger.warning("Ray did not start (attempt %d of %d): %s", attempt, NUM_STARTS, error)


@contextlib.contextmanager
def _own_way(fork_server: ForkServer | None) -> Iterator[None]:
    """Ray starts here only what runs actors: a quarter of what it would take, and 0.4 GiB less memory.

    Its workers start by `fork_server`.
    """
    start = services.start_ray_process
    kept = {name: getattr(Node, name) for name in UNUSED_SERVICES}

    def start_process(command: list[str], process_type: str, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            given = {option[2:].partition("=")[0]: option.partition("=")[2] for option in command[1:]}
            changed = dict(RAYLET_OPTIONS)
            if fork_server is not None:
                prefix = subprocess.list2cmdline(fork_server.command([]))
                changed[WORKER_COMMAND] = f"{prefix} {given[WORKER_COMMAND]}"
            command = [option for option in command if option[2:].partition("=")[0] not in changed]
            command += [f"--{name}={value}" for name, value in changed.items()]
        return start(command, process_type, **options)

    try:
        services.start_ray_process = start_process
        for name in UNUSED_SERVICES:
            setattr(Node, name, lambda *_, **__: None)
        yield
    finally:
        services.start_ray_process = start
        for name, method in kept.items():
            setattr(Node, name, method)


@contextlib.contextmanager
def _alone(deadline: float) -> Iterator[None]:
    """Wait for other starts on this machine, until `deadline`; then continue in parallel."""
    with socket.socket(socket.AF_UNIX) as lock:  # no file, so nothing is left, and a dead holder releases it
        while time.monotonic() < deadline:
            try:
                lock.bind(START_LOCK)
                break
            except OSError:
                time.sleep(0.2)
        yield


def ray_processes() -> list[tuple[str, int]]:
    """Kind and process id of Ray's own processes that a run needs, as far as this process has started them."""
    node: Any = ray_worker._global_node
    if node is None:
        return []
    return [
        (kind, info.process.pid)
        for kind, infos in node.all_processes.items()
        if kind in ("gcs_server", "raylet")
        for info in infos
    ]


def write_timeline(path: Path) -> None:
    """What Ray recorded of its calls, as events for a Chrome trace. It keeps about the last 100,000."""
    ray.timeline(filename=str(path))


def disconnect(pids: Sequence[int], *, grace_s: float = 10.0) -> None:
    """Disconnect from Ray, then make sure that none of these processes of the run is left."""
    ray.shutdown()
    deadline = time.monotonic() + grace_s
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    while left and time.monotonic() < deadline:
        _, left = psutil.wait_procs(left, timeout=0.2)
    for process in left:
        process.kill()


def user_module_paths(config: Config, recipe: Recipe | None = None) -> list[Path]:
    """The user's own files and packages, to send to every worker.

    These are the recipe, the ones that the config names ("pkg.mod:Name"), what they have so far imported from the same
    folder, and everything in the folders of `plugins`. Installed packages are expected to be on every node already.
    """
    sections = (config.env, config.task, config.replay, config.algorithm)
    found = user_names([section.model_dump() for section in sections])
    names = {name.split(":")[0].split(".")[0] for name in found}
    names |= {recipe.module.split(".")[0]} if recipe is not None and recipe.module else set()
    paths = [path for name in sorted(names) if (path := _own_source(name)) is not None]
    folders = {path.parent for path in paths}
    beside = (_own_source(name) for name in sorted(sys.modules) if "." not in name and name not in names)
    paths += [path for path in beside if path is not None and path.parent in folders]
    paths += [path for folder in config.plugins for path in modules_in(folder)]
    return list(dict.fromkeys(paths))


def _own_source(name: str) -> Path | None:
    """The file or package folder of a top-level module; None if it is installed, built in, or Leeway itself."""
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
