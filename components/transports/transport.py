"""The door for weight transports.

    trainer's rank 0:   begin(version) -> put(bucket 0) ... put(bucket n) -> commit(manifest) = Publication
                                                                                                    |  parameter server
    engine's side:      fetch(publication, 0, memory) ... fetch(publication, n, memory)  <----------+

A transport moves bytes and knows nothing of tensors. The checks, deadlines and retries are outside it, in
`collector/weight_sync.py`, and are the same for all: a transport may lose, delay and change bytes, and no engine will
serve them. `tests/transport_contract.py` is what each one is held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..weights import Manifest, Publication


@dataclass(frozen=True, kw_only=True)
class TransportSettings:
    """`name`, `options` and `delta`: `param_server.transport`, `.transport_options` and `.delta`. `folder`: of the run,
    for what it keeps in files. `keep`: versions that can still be asked for. `timeout_s`: `cluster.step_timeout_s`.
    `host`: at which others reach a sender.
    """

    name: str
    folder: Path
    keep: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    delta: bool = False
    timeout_s: float = 600.0
    host: str = "127.0.0.1"


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

    def files(self, publication: Publication) -> Sequence[Path]:
        """Where its buckets lie as they are, in this machine's shared memory, to be mapped; none: they are fetched."""
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


def open_transport(settings: TransportSettings) -> WeightTransport:
    from ..config.transports import transport_kind  # here: a trainer alone goes without the settings' packages
    from ..importing import import_user_object
    from .delta import Delta

    expected = "a class like leeway's WeightTransport"
    cls = import_user_object(transport_kind(settings.name).target, key="param_server.transport", expected=expected)
    transport = cls.open(settings)
    return Delta(transport) if settings.delta else transport
