"""Weight transports by name: where each one is, what it needs, and the options that it takes.

A transport more is a file in `transports/` and a `TransportKind` in `TRANSPORTS`. A user's own is named as
"pkg.module:Class".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..weights import Checksum
from .engines import engine_kind
from .errors import ConfigError
from .names import check_name, nearest

if TYPE_CHECKING:
    from .schema import Config


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """`target`: its class, "module:Class". `needs`: what `leeway validate` says that it needs.

    `options`: those that it takes, each with what its value must be (None: any option, which is its own affair).
    `checksum`: what its bytes are checked with unless `param_server.checksum` says otherwise.
    """

    target: str
    needs: Callable[[Config], str]
    options: Mapping[str, str] | None = field(default_factory=dict)
    checksum: Checksum = "xxh3_128"


def _files_need(config: Config) -> str:
    options = config.param_server.transport_options
    folder = options.get("folder", config.run_dir / "weights")
    return f"{folder}, on a disk that all hosts of this run share, with room for {options.get('keep', 2) + 1} versions"


def can_use_nccl(config: Config) -> bool:
    """Each end of a link of NCCL needs a GPU of its own."""
    return config.cluster.device == "cuda" and not config.cluster.shares_devices


def can_share_device(config: Config) -> bool:
    """Whether every engine can open the memory of the device that rank 0 publishes from."""
    if not engine_kind(config.rollout.engine_name).device_memory:
        return False
    return config.cluster.device == "cpu" or (config.cluster.shares_devices and config.train.num_ranks == 1)


def transport_options(config: Config) -> Mapping[str, Any]:
    """`param_server.transport_options`, with what is chosen where nothing is said."""
    options = config.param_server.transport_options
    if config.param_server.transport == "broadcast":
        return {**options, "backend": _backend(config)}
    if config.param_server.transport == "ipc":
        return {**options, "memory": _memory(config)}
    return options


def versions_are_on_gpu(config: Config) -> bool:
    """Whether versions wait for engines in the memory of the GPU that they share with the trainer."""
    p = config.param_server
    return p.transport == "ipc" and config.cluster.device == "cuda" and _memory(config) == "device"


def _memory(config: Config) -> str:
    on_gpu = config.cluster.device == "cuda" and can_share_device(config)
    return config.param_server.transport_options.get("memory", "device" if on_gpu else "host")


def _ipc_needs(config: Config) -> str:
    if _memory(config) == "host":
        return "trainer and engines on one machine, with room for 2 versions in /dev/shm"
    return f"room for 2 versions in memory of the {_DEVICES[config.cluster.device]}, for 3 while an engine is slow"


_DEVICES = {
    "cuda": "GPU that trainer and engine share, which must be a whole one (no MIG)",
    "cpu": "machine (/dev/shm)",
}


def _backend(config: Config) -> str:
    return config.param_server.transport_options.get("backend", "nccl" if can_use_nccl(config) else "socket")


def _broadcast_needs(config: Config) -> str:
    backend = _backend(config)
    gpu = ", and a GPU in the process of each collector" if backend == "nccl" else ""
    return f"a port of rank 0's host that every engine's host can reach ({backend}{gpu}), 2 versions in rank 0's memory"


TRANSPORTS = {
    "object_store": TransportKind(
        target="leeway.transports.object_store:ObjectStore",
        needs=lambda config: "room for 2 versions in Ray's object store, on the trainer's host and on every engine's",
    ),
    "files": TransportKind(
        target="leeway.transports.files:Files",
        needs=_files_need,
        options={"folder": "a path", "keep": "a whole number from 1", "fsync": "true or false"},
        checksum="sha256",
    ),
    "broadcast": TransportKind(
        target="leeway.transports.broadcast:Broadcast",
        needs=_broadcast_needs,
        options={"backend": "one of socket, gloo, nccl"},
    ),
    "ipc": TransportKind(
        target="leeway.transports.ipc:Ipc",
        needs=_ipc_needs,
        options={"memory": "one of host, device"},
    ),
}
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "a path": lambda value: isinstance(value, str) and bool(value),
    "a whole number from 1": lambda value: type(value) is int and value >= 1,
    "one of host, device": lambda value: value in ("host", "device"),
    "one of socket, gloo, nccl": lambda value: value in ("socket", "gloo", "nccl"),
    "true or false": lambda value: isinstance(value, bool),
}


def transport_kind(name: str) -> TransportKind:
    """Of a name that is in `TRANSPORTS`, or of a user's own "pkg.module:Class"."""
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    return TransportKind(target=name, needs=lambda config: "what its class says", options=None)


def transport_needs(config: Config) -> str:
    """What `leeway validate` says that the chosen transport needs."""
    delta = "; for differences, one more copy of the weights in rank 0 and in each collector"
    return transport_kind(config.param_server.transport).needs(config) + (delta if config.param_server.delta else "")


def check_transport(
    name: str,
    options: Mapping[str, Any],
    *,
    nccl: bool = False,
    on_one_machine: bool = True,
    shared_device: bool = True,
) -> None:
    """Raise ConfigError for a transport that does not exist, or cannot be here, or an option that it does not take.

    `nccl`: whether that can be used. `shared_device`: see `can_share_device`.
    """
    check_name("param_server.transport", name, TRANSPORTS, kind="Transport")
    if name == "ipc" and not on_one_machine:
        raise ConfigError(
            "param_server.transport",
            got=name,
            expected="another one where cluster.address is set: trainer and engines may be on several machines",
            fix="take object_store or broadcast",
        )
    known = transport_kind(name).options
    if known is None:
        return
    for option, value in options.items():
        key = f"param_server.transport_options.{option}"
        if option not in known:
            guess = nearest(option, known)
            raise ConfigError(
                key,
                got=value,
                expected=f"one of {', '.join(known)}" if known else f"no option: {name} takes none",
                fix=f"nearest: {guess}" if guess else "leave it out",
            )
        if not _FITS[known[option]](value):
            raise ConfigError(key, got=value, expected=known[option], fix="change it, or leave it out")
        if value == "nccl" and not nccl:
            raise ConfigError(
                key,
                got=value,
                expected="socket or gloo, unless trainer and engines have GPUs of their own",
                fix="leave it out",
            )
        if value == "device" and not shared_device:
            raise ConfigError(
                key,
                got=value,
                expected="host, unless trainer and engine (vllm or hf) compute on one and the same GPU: "
                "cluster.placement together or turns, train.num_ranks 1",
                fix="leave it out",
            )
