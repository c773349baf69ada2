"""Weights straight from the memory of trainer rank 0, over one link to each receiver.

    rank 0                                      a receiver
    put, commit: kept in main memory
    a thread for this receiver   <-- request -- which version, which bucket
                                 -- size  -->
                                 <-- ready --
                                 -- bytes  -->

A receiver asks, and rank 0 answers from what it keeps: neither waits for the other, a receiver that never asks costs
nothing, and one that dies or stalls takes down its own link only. The address, and a token without which nothing is
answered, travel in the publication. What a receiver has begun to fetch stays until it has all of it.

Requests go over a socket. Bytes take the same one (`backend` socket, on CPUs), or a process group of torch.distributed
with two ranks: gloo, or nccl from GPU to GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import numpy as np

from ..weights import Manifest, Publication
from .transport import Held, NotKept, TransportSettings

logger = logging.getLogger(__name__)

Backend = Literal["socket", "gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = "socket", "gloo", "nccl"
TOKEN_BYTES = 32
REQUEST = struct.Struct("<QI")
"""Number of a version, index of a bucket."""
ANSWER = struct.Struct("<q")
"""Bytes of the bucket, which follow; -1: that version is not kept."""
READY = b"."
"""Of a receiver that has the memory for them. Bytes that nobody takes would hold a process group until its deadline."""
PORT = struct.Struct("<I")
MOST_LINKS = 1024
ACCEPT_AGAIN_S = 1.0


@dataclass(frozen=True)
class _Ref:
    """One bucket of the `number`th version that the end at this address has kept."""

    host: str
    port: int
    token: bytes = field(repr=False)
    number: int
    index: int


class Broadcast:
    """Both ends. `host`: of this end, if it sends. `timeout_s`: how long one bucket may take on its way."""

    uses_held = False

    def __init__(self, *, host: str, timeout_s: float, backend: Backend = "socket", keep: int = 1) -> None:
        self.keep = keep
        self._host = host
        self._timeout_s = timeout_s
        self._backend: Backend = backend
        self._sender: _Sender | None = None
        self._link: _Link | None = None
        self._fetching = asyncio.Lock()

    @classmethod
    def open(cls, settings: TransportSettings) -> Broadcast:
        backend = settings.options.get("backend", "socket")
        return cls(host=settings.host, timeout_s=settings.timeout_s, backend=backend, keep=settings.keep)

    @property
    def memory_bytes(self) -> int:
        return self._sender.memory_bytes if self._sender is not None else 0

    def places(self, publication: Publication) -> tuple[()]:
        return ()

    def begin(self, policy_version: int) -> _Outgoing:
        if self._sender is None:
            self._sender = _Sender(self._host, timeout_s=self._timeout_s, backend=self._backend)
        return _Outgoing(self, self._sender)

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Held | None = None) -> int:
        ref: _Ref = publication.bucket_refs[index]
        async with self._fetching:
            try:
                if self._link is None or not self._link.leads_to(ref):
                    self._drop_link()
                    connected = await _connected(ref.host, ref.port)
                    connected.settimeout(self._timeout_s)
                    self._link = _Link(connected, ref, timeout_s=self._timeout_s, backend=self._backend)
                await asyncio.to_thread(self._link.fetch, ref, into)
            except BaseException:
                self._drop_link()  # which also ends the thread that waits in it
                raise
        return into.nbytes

    def close(self) -> None:
        self._drop_link()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class _Outgoing:
    def __init__(self, transport: Broadcast, sender: _Sender) -> None:
        self._transport = transport
        self._sender = sender
        self._buckets: list[np.ndarray] = []

    def put(self, bucket: np.ndarray) -> None:
        memory = self._sender.memory(bucket.nbytes)
        self._buckets.append(memory)
        np.copyto(memory, bucket)

    def commit(self, manifest: Manifest) -> Publication:
        s = self._sender
        number = s.keep(self._buckets, newest=self._transport.keep)
        return Publication(manifest, [_Ref(s.host, s.port, s.token, number, i) for i in range(len(self._buckets))])

    def discard(self) -> None:
        self._sender.give_back(self._buckets)
        self._buckets = []


@dataclass
class _Version:
    number: int
    buckets: list[np.ndarray]
    num_readers: int = 0


class _Sender:
    """Keeps versions, and answers requests for them: one thread for each receiver, and one that lets receivers in."""

    def __init__(self, host: str, *, timeout_s: float, backend: Backend) -> None:
        self._timeout_s = timeout_s
        self._backend: Backend = backend
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._lock = threading.Lock()
        self._versions: dict[int, _Version] = {}
        self._num_versions = 0
        self._spare: list[np.ndarray] = []
        self._memory_bytes = 0
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listening = socket.create_server((host, 0))
        self.host, self.port = self._listening.getsockname()[:2]
        threading.Thread(target=self._let_in, name="weights", daemon=True).start()

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def memory(self, num_bytes: int) -> np.ndarray:
        """Of a version that nobody needs any more, if there is any: new pages cost more than the copy."""
        with self._lock:
            for index, memory in enumerate(self._spare):
                if memory.nbytes == num_bytes:
                    return self._spare.pop(index)
            self._memory_bytes += num_bytes
        return np.empty(num_bytes, dtype=np.uint8)

    def keep(self, buckets: list[np.ndarray], *, newest: int) -> int:
        with self._lock:
            number, self._num_versions = self._num_versions, self._num_versions + 1
            self._versions[number] = _Version(number, buckets)
            self._free_spare()
            for old in list(self._versions)[:-newest]:
                self._free(self._versions.pop(old))
        return number

    def give_back(self, buckets: list[np.ndarray]) -> None:
        with self._lock:
            self._spare += buckets

    def close(self) -> None:
        """Whoever waits for bytes is told at once: its connection ends."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _shut(connection)

    def _free_spare(self) -> None:
        """What the version that is now complete did not need, the next one will hardly need."""
        self._memory_bytes -= sum(memory.nbytes for memory in self._spare)
        self._spare = []

    def _let_in(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                logger.warning("no receiver of weights can be let in: %s; trying again", error)  # no descriptor is left
                continue
            with self._lock:
                if len(self._connections) >= MOST_LINKS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        way: _Way | None = None
        try:
            connection.settimeout(self._timeout_s)
            if not hmac.compare_digest(_received(connection, TOKEN_BYTES), self.token):
                raise ConnectionError("it does not know the token of this run")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            way = _way(connection, self._backend, rank=0, timeout_s=self._timeout_s)
            self._answer(connection, way)
        except Exception as error:
            logger.warning("a receiver of weights is gone: %s: %s", type(error).__name__, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            if way is not None:
                way.close()

    def _answer(self, connection: socket.socket, way: _Way) -> None:
        """Until the receiver ends the connection. If it stops in the middle of a version, it may lose that version."""
        reading: _Version | None = None
        try:
            while True:
                connection.settimeout(self._timeout_s if reading is not None else None)
                try:
                    if not connection.recv(1, socket.MSG_PEEK):
                        return
                except TimeoutError:
                    reading = self._turn_to(None, reading)
                    continue
                connection.settimeout(self._timeout_s)
                number, index = REQUEST.unpack(_received(connection, REQUEST.size))
                reading = self._turn_to(number, reading)
                if reading is None or index >= len(reading.buckets):
                    connection.sendall(ANSWER.pack(-1))
                    continue
                connection.sendall(ANSWER.pack(reading.buckets[index].nbytes))
                _received(connection, len(READY))
                way.send(reading.buckets[index])
                if index == len(reading.buckets) - 1:
                    reading = self._turn_to(None, reading)
        finally:
            self._turn_to(None, reading)

    def _turn_to(self, number: int | None, reading: _Version | None) -> _Version | None:
        """From one version to another (None: to none), which then stays while it is read."""
        if reading is not None and reading.number == number:
            return reading
        with self._lock:
            if reading is not None:
                reading.num_readers -= 1
                self._free(reading)
            version = self._versions.get(number) if number is not None else None
            if version is not None:
                version.num_readers += 1
            return version

    def _free(self, version: _Version) -> None:
        if version.number not in self._versions and not version.num_readers:
            self._spare += version.buckets


class _Link:
    """A receiver's end of a connection. `close` ends a `fetch` that another thread waits in."""

    def __init__(self, connection: socket.socket, to: _Ref, *, timeout_s: float, backend: Backend) -> None:
        self._connection = connection
        self._to = to
        self._timeout_s = timeout_s
        self._backend: Backend = backend
        self._way: _Way | None = None

    def leads_to(self, ref: _Ref) -> bool:
        return (self._to.host, self._to.port, self._to.token) == (ref.host, ref.port, ref.token)

    def fetch(self, ref: _Ref, into: np.ndarray) -> None:
        connection = self._connection
        if self._way is None:
            connection.sendall(ref.token)
            self._way = _way(connection, self._backend, rank=1, timeout_s=self._timeout_s)
        connection.sendall(REQUEST.pack(ref.number, ref.index))
        (num_bytes,) = ANSWER.unpack(_received(connection, ANSWER.size))
        if num_bytes < 0:
            raise NotKept("the trainer does not keep this version any more")
        if num_bytes != into.nbytes:
            raise ValueError(f"the bucket has {num_bytes} bytes, expected {into.nbytes}")
        connection.sendall(READY)
        self._way.receive(into)

    def close(self) -> None:
        _shut(self._connection)
        self._connection.close()
        if self._way is not None:
            self._way.close()


class _Way(Protocol):
    """How a bucket's bytes go from one end of a connection to the other."""

    def send(self, bucket: np.ndarray) -> None: ...

    def receive(self, into: np.ndarray) -> None: ...

    def close(self) -> None: ...


def _way(connection: socket.socket, backend: Backend, *, rank: int, timeout_s: float) -> _Way:
    if backend == "socket":
        return _OverSocket(connection)
    return _OverGroup(connection, backend, rank=rank, timeout_s=timeout_s)


class _OverSocket:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, bucket: np.ndarray) -> None:
        self._connection.sendall(bucket.data)

    def receive(self, into: np.ndarray) -> None:
        _receive_into(self._connection, memoryview(into.data))

    def close(self) -> None:
        """The connection is its owner's."""


class _OverGroup:
    """A process group of two ranks, in no default group: the sender is in one with each receiver.

    With nccl, bytes go from the sender's GPU to the receiver's, and in both from and to main memory, where they are
    checked. A wait ends at the deadline; with nccl, `close` ends it at once.
    """

    def __init__(self, connection: socket.socket, backend: Backend, *, rank: int, timeout_s: float) -> None:
        import torch

        dist = _distributed()
        self._timeout = timedelta(seconds=timeout_s)
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        store = _meeting_place(connection, rank=rank, timeout=self._timeout)
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(store, rank, 2, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._timeout = self._timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=connection.getsockname()[0])]
            self._group = dist.ProcessGroupGloo(store, rank, 2, gloo)

    def send(self, bucket: np.ndarray) -> None:
        import torch

        self._group.send([torch.from_numpy(bucket).to(self._device)], 1, 0).wait(self._timeout)

    def receive(self, into: np.ndarray) -> None:
        import torch

        memory = torch.from_numpy(into)
        there = memory if memory.device == self._device else torch.empty_like(memory, device=self._device)
        self._group.recv([there], 0, 0).wait(self._timeout)
        if there is not memory:
            memory.copy_(there)

    def close(self) -> None:
        self._group.abort()


def _distributed() -> Any:
    """Untyped: the stubs of torch.distributed leave out most of what is used here."""
    import torch.distributed

    return torch.distributed


def _meeting_place(connection: socket.socket, *, rank: int, timeout: timedelta) -> Any:
    """Where both ranks of a group find each other: at the sender, on the address that the receiver reached it at."""
    dist = _distributed()
    if rank == 0:
        host = connection.getsockname()[0]
        listening = socket.create_server((host, 0))  # torch's own would listen on every interface
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        connection.sendall(PORT.pack(port))
        return store
    (port,) = PORT.unpack(_received(connection, PORT.size))
    return dist.TCPStore(connection.getpeername()[0], port, is_master=False, timeout=timeout)


async def _connected(host: str, port: int) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return connection


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    memory = bytearray(num_bytes)
    _receive_into(connection, memoryview(memory))
    return bytes(memory)


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    filled = 0
    while filled < len(memory):
        if not (got := connection.recv_into(memory[filled:])):
            raise ConnectionError(f"the other end closed the connection after {filled} of {len(memory)} bytes")
        filled += got


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        connection.shutdown(socket.SHUT_RDWR)
