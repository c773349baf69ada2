"""The door for weight transports.

    trainer's rank 0:   begin(version) -> put(bucket 0) ... put(bucket n) -> commit(manifest) = Publication
                                                                                                    |  parameter server
    engine's side:      fetch(publication, 0, memory) ... fetch(publication, n, memory)  <----------+

A transport moves bytes and knows nothing of tensors. The checks, deadlines and retries are outside it, in
`collector/weight_sync.py`, and are the same for all: a transport may lose, delay and change bytes, and no engine will
serve them. `tests/transport_contract.py` is what each one is held to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..weights import Manifest, Publication, WeightSyncError, check_bucket


@dataclass(frozen=True, kw_only=True)
class TransportSettings:
    """`name`, `options` and `delta`: `param_server.transport`, `.transport_options` and `.delta`. `folder`: of the run,
    for what it keeps in files. `keep`: versions that can still be asked for. `timeout_s`: `cluster.step_timeout_s`.
    `host`: at which others reach a sender. `device`: `cluster.device`.
    """

    name: str
    folder: Path
    keep: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    delta: bool = False
    timeout_s: float = 600.0
    host: str = "127.0.0.1"
    device: str = "cpu"


@dataclass(frozen=True)
class DevicePlace:
    """A bucket in memory of a device, to be opened by other processes on it (`device_memory.py`).

    `device`: its UUID. `handle`, `offset`: of the memory, see `DeviceMemory.share`. `lease`, `number`: the file by
    which a reader says that it reads, and what stands in it for as long as the memory holds this bucket.
    """

    device: str
    handle: bytes = field(repr=False)
    num_bytes: int
    offset: int
    lease: str
    number: int


Place = Path | DevicePlace
"""Of a bucket: a file in this machine's shared memory, or memory of a device."""


class NotKept(LookupError):
    """What is fetched is kept no more: newer versions have taken its place. Who asked goes on with the newest."""


class Outgoing(Protocol):
    """One version on its way out of the trainer. Nobody can fetch it before `commit`. Called in one thread."""

    def put(self, bucket: np.ndarray) -> None:
        """Take over the next bucket (uint8); it may be changed or freed as soon as this returns."""
        ...

    def commit(self, manifest: Manifest) -> Publication:
        """The version is complete: from now on it can be fetched."""
        ...

    def discard(self) -> None:
        """It will not be committed: leave nothing of it."""
        ...


class Held(Protocol):
    """A version that a receiver has whole, every byte of it checked."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def buckets(self) -> Sequence[np.ndarray]: ...


class Fetches(Protocol):
    """The engine's side. `uses_held`: it is given the version that was verified last, which is kept for that."""

    uses_held: bool

    def places(self, publication: Publication) -> Sequence[Place]:
        """Where its buckets lie as they are, for the engine to open or map; none: they are fetched."""
        ...

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        """Copy one bucket into memory of its size (uint8). May raise anything; cancelling it ends it. NotKept, or
        FileNotFoundError, is no failure where there is a newer version by then.

        Returns how many bytes came from the trainer's end.
        """
        ...


class WeightTransport(Fetches, Protocol):
    """Trainer ranks and collectors make one each from the same settings, by the `open(settings)` of its class. A class
    of yours is "pkg.module:Class".

    `keep`: the newest so many versions can be fetched; who sends may change it between two versions. `memory_bytes`:
    main memory that the trainer's end holds.
    """

    keep: int

    @property
    def memory_bytes(self) -> int: ...

    def begin(self, policy_version: int) -> Outgoing: ...

    def close(self) -> None:
        """Nothing more is sent or fetched."""
        ...


async def fetch_whole(transport: Fetches, publication: Publication, *, within_s: float) -> list[np.ndarray]:
    """All buckets of a version in main memory, every byte checked. Raises WeightSyncError, naming what is wrong."""
    manifest = publication.manifest
    manifest.check()
    buckets = [np.empty(num_bytes, dtype=np.uint8) for num_bytes in manifest.bucket_bytes]
    limit = asyncio.timeout(within_s)
    index = 0
    try:
        async with limit:
            for index, bucket in enumerate(buckets):
                await transport.fetch(publication, index, bucket)
                await asyncio.to_thread(check_bucket, manifest, index, bucket)
    except WeightSyncError:
        raise
    except Exception as error:  # a transport's own
        why = f"within {within_s:g} s (cluster.step_timeout_s)" if limit.expired() else f"({_named(error)})"
        what = f"bucket {index + 1} of {len(buckets)} did not arrive {why}"
        raise manifest.error("transfer", what) from error
    return buckets


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def open_transport(settings: TransportSettings) -> WeightTransport:
    from ..config.transports import transport_kind  # here: a trainer alone goes without the settings' packages
    from ..importing import import_user_object
    from .delta import Delta

    expected = "a class like leeway's WeightTransport"
    cls = import_user_object(transport_kind(settings.name).target, key="param_server.transport", expected=expected)
    transport = cls.open(settings)
    return Delta(transport) if settings.delta else transport
