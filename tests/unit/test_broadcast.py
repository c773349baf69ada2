"""What happens to one end of a broadcast when the other is killed, stands still, or is a stranger."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leeway.transports import broadcast
from leeway.transports.broadcast import Broadcast
from leeway.transports.delta import Delta
from leeway.transports.transport import NotKept, WeightTransport
from leeway.weights import Publication, WeightSyncError

from ..forked import Forked
from ..transport_contract import SIZES, Synced, received, send, version

WHOLE, LARGE = sum(SIZES), 1 << 26
"""Bytes; `LARGE` is more than sockets hold."""
OTHER_END = """
import asyncio, pickle, sys
import numpy as np
from leeway.transports.broadcast import Broadcast
from leeway.transports.delta import Delta
from tests.transport_contract import received, send, version
def read(): return pickle.loads(bytes.fromhex(sys.stdin.readline()))
def write(value): print(pickle.dumps(value).hex(), flush=True)
backend, delta, timeout_s = read()
end = Broadcast(host="127.0.0.1", timeout_s=timeout_s, backend=backend, keep=2)
end = Delta(end) if delta else end
while True:
    verb, given = read()
    if verb == "send":
        write(send(end, given))
    elif verb == "fetch":
        write([bucket.tobytes() for bucket in asyncio.run(received(end, given))])
    else:
        outgoing = end.begin(0)
        outgoing.put(np.zeros(given, dtype=np.uint8))
        write(outgoing.commit(version(0)[0]))
"""


class OtherEnd:
    """A broadcast's end in a process of its own, which does as it is told."""

    def __init__(self, backend: str, *, delta: bool = False, timeout_s: float = 200.0) -> None:
        self.process = Forked(OTHER_END)
        self._write((backend, delta, timeout_s))

    def ask(self, verb: str, given: Any) -> None:
        self._write((verb, given))

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return pickle.loads(bytes.fromhex(self.process.stdout.readline().decode()))

    def send(self, number: int) -> Publication:
        self.ask("send", number)
        return self.answer()

    def signal(self, which: signal.Signals) -> None:
        self.process.send_signal(which)

    def stop(self) -> None:
        """Returns when none of its threads runs."""
        self.signal(signal.SIGSTOP)
        until(lambda: {_state(task) for task in Path(f"/proc/{self.process.pid}/task").iterdir()} == {"T"})

    def _write(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{pickle.dumps(value).hex()}\n".encode())
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(200)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def other() -> Iterator[Callable[..., OtherEnd]]:
    ends: list[OtherEnd] = []

    def start(backend: str, **settings: Any) -> OtherEnd:
        ends.append(OtherEnd(backend, **settings))
        return ends[-1]

    yield start
    for end in ends:
        end.end()


@pytest.fixture
def run() -> Iterator[Callable[[Any], Any]]:
    """A weight sync belongs to one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


def here(backend: str, *, delta: bool = False, timeout_s: float = 200.0) -> WeightTransport:
    end = Broadcast(host="127.0.0.1", timeout_s=timeout_s, backend=backend, keep=2)  # type: ignore[arg-type]
    return Delta(end) if delta else end


def refused(run: Callable[[Any], Any], synced: Synced, publication: Publication) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as error:
        run(synced.serve(publication))
    return error.value


def links(end: Any) -> int:
    below: Any = end._below if isinstance(end, Delta) else end
    return len(below._sender._connections)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


pytestmark = pytest.mark.slow
over_each = pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])


@over_each
def test_a_sender_that_is_killed_is_named_and_the_engine_goes_on(
    other: Callable[..., OtherEnd], run: Callable[[Any], Any], delta: bool
) -> None:
    sender, receiver = other("socket", delta=delta), here("socket", delta=delta)
    synced = Synced(receiver, max_failures=0)
    run(synced.serve(sender.send(0)))
    publication = sender.send(1)
    sender.stop()  # so that the request is on its way when it dies
    threading.Timer(0.3, sender.signal, [signal.SIGKILL]).start()
    error = refused(run, synced, publication)
    assert (error.check, error.policy_version) == ("transfer", 1)
    assert "bucket 1 of 3 did not arrive: Connection" in str(error)
    assert synced.holds(0)
    receiver.close()


def test_a_sender_that_is_killed_in_the_middle_of_a_bucket_is_named(
    other: Callable[..., OtherEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = other("socket"), here("socket")
    sender.ask("send_large", LARGE)
    publication, into, whole = sender.answer(), np.empty(LARGE, dtype=np.uint8), broadcast._receive_into

    def killed_on_the_way(connection: socket.socket, memory: memoryview) -> None:
        if len(memory) == LARGE:
            whole(connection, memory[:1000])
            sender.signal(signal.SIGKILL)
            sender.process.wait()
            memory = memory[1000:]
        whole(connection, memory)

    monkeypatch.setattr(broadcast, "_receive_into", killed_on_the_way)
    with pytest.raises(ConnectionError):
        asyncio.run(receiver.fetch(publication, 0, into))
    receiver.close()


def test_a_process_group_in_which_the_other_end_stands_still_is_left_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    still = threading.Event()
    monkeypatch.setattr(broadcast._OverGroup, "send", lambda self, bucket: still.wait(200))
    sender, receiver = (Broadcast(host="127.0.0.1", timeout_s=5.0, backend="gloo") for _ in range(2))
    publication = send(sender, 0)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="Timed out"):
        asyncio.run(receiver.fetch(publication, 0, np.empty(SIZES[0], dtype=np.uint8)))
    still.set()
    sender.close()
    until(lambda: threading.active_count() <= before - 1)


def test_a_receiver_that_refuses_a_bucket_leaves_nobody_waiting_in_a_process_group() -> None:
    sender, receiver = (Broadcast(host="127.0.0.1", timeout_s=3000.0, backend="gloo") for _ in range(2))
    publication, before = send(sender, 0), threading.active_count()
    with pytest.raises(ValueError, match=f"the bucket has {SIZES[0]} bytes, expected {SIZES[0] + 1}"):
        asyncio.run(receiver.fetch(publication, 0, np.empty(SIZES[0] + 1, dtype=np.uint8)))
    until(lambda: links(sender) == 0 and threading.active_count() <= before)
    sender.close()


@over_each
def test_a_sender_that_stands_still_is_named_at_the_deadline_and_served_when_it_goes_on(
    other: Callable[..., OtherEnd], run: Callable[[Any], Any], delta: bool
) -> None:
    sender, receiver = other("socket", delta=delta), here("socket", delta=delta, timeout_s=5.0)
    synced = Synced(receiver, max_failures=0, deadline_s=200.0)
    run(synced.serve(sender.send(0)))
    publication = sender.send(1)
    sender.stop()
    error = refused(run, synced, publication)
    assert "transfer check: bucket 1 of 3 did not arrive" in str(error)
    assert synced.holds(0)
    sender.signal(signal.SIGCONT)
    run(synced.sync._sync(publication))
    assert synced.holds(1)
    receiver.close()


@over_each
def test_a_receiver_that_is_killed_or_stands_still_takes_down_its_own_link_only(
    other: Callable[..., OtherEnd], delta: bool
) -> None:
    """And the trainer waits for neither of them: it goes on publishing to the others."""
    timeout_s = 60.0
    sender = here("socket", delta=delta, timeout_s=timeout_s)
    first = send(sender, 0)
    killed, still, well = (other("socket", delta=delta) for _ in range(3))
    for receiver in (killed, still, well):
        receiver.ask("fetch", first)
        assert receiver.answer() == [bucket.tobytes() for bucket in version(0)[1]]
    assert links(sender) == 3
    killed.stop()
    still.stop()
    for receiver in (killed, still):  # each of them is in the middle of a request when its process is gone or still
        receiver.ask("fetch", send(sender, 1))
    killed.signal(signal.SIGKILL)
    until(lambda: links(sender) == 2)
    for number in range(2, 6):
        started = time.monotonic()
        publication = send(sender, number)
        assert time.monotonic() - started < timeout_s
        well.ask("fetch", publication)
        assert well.answer() == [bucket.tobytes() for bucket in version(number)[1]]
    assert sender.memory_bytes <= (5 if delta else 4) * WHOLE
    sender.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "weights"])


def test_a_receiver_that_takes_nothing_is_left_at_the_deadline() -> None:
    sender = Broadcast(host="127.0.0.1", timeout_s=0.3)
    outgoing = sender.begin(0)
    outgoing.put(np.zeros(LARGE, dtype=np.uint8))
    ref = outgoing.commit(version(0)[0]).bucket_refs[0]
    with socket.create_connection((ref.host, ref.port)) as receiver:
        receiver.sendall(ref.token + broadcast.REQUEST.pack(ref.number, 0))
        assert receiver.recv(1), "it was let in"
        until(lambda: links(sender) == 0)
    sender.close()


def test_what_a_receiver_has_begun_to_fetch_stays_until_it_has_all_of_it() -> None:
    sender, receiver = (Broadcast(host="127.0.0.1", timeout_s=200.0) for _ in range(2))
    publication = send(sender, 0)
    into = [np.empty(size, dtype=np.uint8) for size in SIZES]

    async def slowly() -> None:
        for index, memory in enumerate(into):
            await receiver.fetch(publication, index, memory)
            send(sender, index + 1)

    asyncio.run(slowly())
    assert all(np.array_equal(a, b) for a, b in zip(into, version(0)[1], strict=True))
    with pytest.raises(NotKept, match="does not keep this version any more"):
        asyncio.run(received(receiver, publication))
    assert sender.memory_bytes <= 3 * WHOLE
    sender.close()
    receiver.close()


def test_a_stranger_gets_nothing() -> None:
    sender = Broadcast(host="127.0.0.1", timeout_s=200.0)
    ref = send(sender, 0).bucket_refs[0]
    assert ref.token.hex() not in repr(ref)
    with socket.create_connection((ref.host, ref.port)) as stranger:
        stranger.sendall(bytes(broadcast.TOKEN_BYTES) + broadcast.REQUEST.pack(0, 0))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    sender.close()


def test_a_sender_that_cannot_let_anybody_in_for_a_moment_lets_them_in_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when this process has no file descriptor left."""
    monkeypatch.setattr(broadcast, "ACCEPT_AGAIN_S", 0.01)
    sender, first, second = (Broadcast(host="127.0.0.1", timeout_s=200.0) for _ in range(3))
    publication, accept, refused_once = send(sender, 0), socket.socket.accept, threading.Event()

    def accepted(listening: socket.socket) -> Any:
        if not refused_once.is_set():
            refused_once.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    asyncio.run(received(first, publication))  # let in by the call that was under way
    assert np.array_equal(asyncio.run(received(second, publication))[0], version(0)[1][0])
    assert refused_once.is_set()
    for end in (first, second, sender):
        end.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "weights"])


def test_cancelling_a_fetch_ends_the_thread_that_waits_in_it(other: Callable[..., OtherEnd]) -> None:
    sender, receiver = other("socket"), here("socket", timeout_s=600.0)
    publication = sender.send(0)
    sender.stop()
    before = threading.active_count()

    async def cancelled() -> None:
        fetch = asyncio.create_task(receiver.fetch(publication, 0, np.empty(SIZES[0], dtype=np.uint8)))
        await asyncio.sleep(0.3)
        fetch.cancel()
        await asyncio.wait([fetch])

    asyncio.run(cancelled())  # which waits for the threads of its executor
    assert threading.active_count() <= before
