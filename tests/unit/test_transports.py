"""Each weight transport against the contract; what is the files' own; how one is chosen."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leeway.config import ConfigError
from leeway.config.transports import TRANSPORTS, check_transport, transport_options
from leeway.transports.broadcast import Broadcast
from leeway.transports.delta import Delta
from leeway.transports.device_ipc import DeviceIpc
from leeway.transports.device_memory import HostMemory
from leeway.transports.files import Files, newest_publication
from leeway.transports.ipc import Ipc
from leeway.transports.object_store import ObjectStore
from leeway.transports.shared_memory import SharedFolder, bucket_name
from leeway.transports.transport import Place, TransportSettings, WeightTransport, fetch_whole, open_transport
from leeway.weights import Manifest, Publication, WeightSyncError

from ..transport_contract import SIZES, Synced, TransportContract, received, send, version


class TestObjectStore(TransportContract):
    """Over a store like Ray's: references and read-only memory."""

    @pytest.fixture
    def ends(self) -> tuple[WeightTransport, WeightTransport]:
        return self.stores()

    def stores(self) -> tuple[WeightTransport, WeightTransport]:
        self.stored: dict[int, np.ndarray] = {}

        def put(bucket: np.ndarray) -> int:
            memory = bucket.copy()
            memory.flags.writeable = False
            self.stored[len(self.stored)] = memory
            return len(self.stored) - 1

        async def get(ref: int) -> np.ndarray:
            return self.stored[ref]

        return ObjectStore(put, get), ObjectStore(put, get)

    def damage(self, publication: Publication, fault: str) -> Callable[[], None]:
        return self.damage_ref(publication.bucket_refs[0 if fault == "flip" else 1], fault)

    def damage_ref(self, ref: int, fault: str) -> Callable[[], None]:
        whole = self.stored.pop(ref)
        if fault == "flip":
            self.stored[ref] = whole.copy()
            self.stored[ref][-1] ^= 1
        elif fault == "short":
            self.stored[ref] = whole[:-1]
        return lambda: self.stored.update({ref: whole})


class TestFiles(TransportContract):
    @pytest.fixture
    def ends(self, tmp_path: Path) -> tuple[WeightTransport, WeightTransport]:
        settings = TransportSettings(name="files", folder=tmp_path, options={"keep": 3})
        return open_transport(settings), open_transport(settings)

    def damage(self, publication: Publication, fault: str) -> Callable[[], None]:
        path = Path(publication.bucket_refs[0 if fault == "flip" else 1])
        whole = path.read_bytes()
        path.unlink()
        if fault == "flip":
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        elif fault == "short":
            path.write_bytes(whole[:-1])
        return lambda: [path.write_bytes(whole), None][1]


class TestDeltaOverObjectStore(TestObjectStore):
    @pytest.fixture
    def ends(self) -> tuple[WeightTransport, WeightTransport]:
        here, there = self.stores()
        return Delta(here), Delta(there)

    def damage(self, publication: Publication, fault: str) -> Callable[[], None]:
        """Of the last thing that a receiver fetches, a difference where there is one."""
        chain = publication.bucket_refs[0 if fault == "flip" else 1]
        piece = (chain.since_whole() or [chain.whole])[-1]
        return self.damage_ref(piece.publication.bucket_refs[piece.index], fault)


class TestDeltaOverFiles(TestFiles):
    @pytest.fixture
    def ends(self, tmp_path: Path) -> tuple[WeightTransport, WeightTransport]:
        settings = TransportSettings(name="files", folder=tmp_path, options={"keep": 3}, delta=True)
        return open_transport(settings), open_transport(settings)

    def damage(self, publication: Publication, fault: str) -> Callable[[], None]:
        pieces = [(chain.since_whole() or [chain.whole])[-1] for chain in publication.bucket_refs]
        refs = [piece.publication.bucket_refs[piece.index] for piece in pieces]
        return super().damage(Publication(publication.manifest, refs), fault)


class TestIpc(TestFiles):
    @pytest.fixture
    def ends(self, tmp_path: Path) -> tuple[WeightTransport, WeightTransport]:
        return Ipc(keep=3, parent=tmp_path), Ipc(keep=3, parent=tmp_path)

    test_a_link_that_stalls_is_named_at_the_deadline = None  # type: ignore[assignment]  # nothing is fetched

    def test_a_fault_that_passes_costs_another_fetch(self, ends: tuple[WeightTransport, WeightTransport]) -> None:
        here, there = ends
        publication = send(here, 1)
        undo, places = self.damage(publication, "flip"), there.places

        def mended(publication: Publication) -> Sequence[Place]:
            if synced.sync.num_refused:
                undo()
            return places(publication)

        there.places = mended  # type: ignore[method-assign]
        synced = Synced(there)
        asyncio.run(synced.serve(publication))
        assert synced.holds(1)
        assert synced.sync.num_refused == 1


def in_shared_memory(parent: Path, kind: str) -> Ipc | DeviceIpc:
    return Ipc(parent=parent) if kind == "host" else DeviceIpc(HostMemory, longest_s=200.0, parent=parent)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("at", ["put", "announced"])
def test_what_a_killed_sender_leaves_in_shared_memory_is_removed_by_the_next(
    tmp_path: Path, kind: str, at: str
) -> None:
    if (child := os.fork()) == 0:
        try:
            writer = in_shared_memory(tmp_path, kind)
            send(writer, 0)
            outgoing = writer.begin(1)
            for bucket in version(1)[1][: 1 if at == "put" else None]:
                outgoing.put(bucket)
            if at == "announced":
                outgoing.commit(version(1)[0])
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    after = in_shared_memory(tmp_path, kind)
    publication = send(after, 2)
    assert not left.exists()
    synced = Synced(after)
    asyncio.run(synced.serve(publication))
    assert synced.holds(2)
    after.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["files", "host", "device"])
def test_a_receiver_that_is_killed_in_the_middle_of_a_version_leaves_nothing(tmp_path: Path, kind: str) -> None:
    here = files(tmp_path, keep=1) if kind == "files" else in_shared_memory(tmp_path, kind)
    publication = send(here, 0)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            synced = Synced(here)

            async def killed(*_: Any, **__: Any) -> None:
                os.write(write, b".")
                signal.pause()

            synced.engine.load_weights = killed
            asyncio.run(synced.sync._sync(publication))
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 1), "it has staged and checked all of it"
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for number in range(1, 4):
        publication = send(here, number)
    synced = Synced(here)
    asyncio.run(synced.serve(publication))
    assert synced.holds(3)
    on_disk = [p.stat().st_size for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size in SIZES]
    assert sum(on_disk) <= (2 if kind == "device" else 1) * sum(SIZES), "of the versions that it keeps anyway"
    here.close()


def test_an_engine_maps_the_very_memory_that_the_trainer_wrote_and_keeps_it(tmp_path: Path) -> None:
    here, shared = Ipc(parent=tmp_path), SharedFolder(tmp_path)
    publication = send(here, 0)
    files = here.places(publication)
    name, buckets = shared.link_files(files)
    for index, (file, bucket) in enumerate(zip(files, buckets, strict=True)):
        assert file.stat().st_ino == (shared.path / name / bucket_name(index)).stat().st_ino
        bucket[:1] ^= 0
    buckets[1][:] = 0
    assert files[1].read_bytes() == version(0)[1][1].tobytes(), "what an engine writes there is its own"
    send(here, 1)
    assert not files[0].exists()
    here.close()
    assert np.array_equal(buckets[0], version(0)[1][0]), "it outlives the version, and the trainer"
    shared.remove_files(name)
    assert not list(tmp_path.glob("*/*/*"))


class TestBroadcast(TransportContract):
    backend: Any = "socket"

    @pytest.fixture
    def ends(self) -> Iterator[tuple[WeightTransport, WeightTransport]]:
        settings: dict[str, Any] = {"timeout_s": 60.0, "backend": self.backend, "keep": 3}
        self.ends_of_one = [Broadcast(host="127.0.0.1", **settings) for _ in range(2)]
        yield self.ends_of_one[0], self.ends_of_one[1]
        for end in self.ends_of_one:
            end.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "weights" and still_there(thread)]

    def damage(self, publication: Publication, fault: str) -> Callable[[], None]:
        sender = self.ends_of_one[0]._sender
        assert sender is not None
        ref = publication.bucket_refs[0 if fault == "flip" else 1]
        buckets = sender._versions[ref.number].buckets
        whole = buckets[ref.index]
        if fault == "flip":
            buckets[ref.index] = whole.copy()
            buckets[ref.index][-1] ^= 1
        elif fault == "short":
            buckets[ref.index] = whole[:-1]
        else:
            del buckets[ref.index :]
        return lambda: buckets.__setitem__(ref.index, whole)


class TestBroadcastOverGloo(TestBroadcast):
    backend = "gloo"


def still_there(thread: threading.Thread) -> bool:
    thread.join(200)
    return thread.is_alive()


def files(folder: Path, keep: int = 2) -> Files:
    return Files(folder, keep=keep)


@pytest.mark.slow
def test_another_job_reads_the_newest_version_from_the_folder_alone(tmp_path: Path) -> None:
    writer = files(tmp_path)
    assert newest_publication(tmp_path) is None
    for number in range(4):
        send(writer, number)
    program = (
        "import asyncio, sys; from pathlib import Path; import numpy as np\n"
        "from leeway.transports.files import Files, newest_publication\n"
        "from leeway.weights import check_bucket\n"
        "found = newest_publication(Path(sys.argv[1])); manifest = found.manifest\n"
        "for i, size in enumerate(manifest.bucket_bytes):\n"
        "    into = np.empty(size, dtype=np.uint8)\n"
        "    asyncio.run(Files(Path(sys.argv[1]), keep=1).fetch(found, i, into)); check_bucket(manifest, i, into)\n"
        "print(manifest.policy_version, manifest.canary.next_logprobs)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["3", "[-0.1]"], done.stderr
    assert newest_publication(tmp_path, newer_than=3) is None


@pytest.mark.slow
def test_the_last_versions_are_kept_and_no_others(tmp_path: Path) -> None:
    writer = files(tmp_path, keep=2)
    publications = [send(writer, number) for number in range(5)]
    assert sorted(p.name[:7] for p in tmp_path.iterdir() if p.is_dir()) == ["v000003", "v000004"]
    assert np.array_equal(asyncio.run(received(writer, publications[3]))[0], version(3)[1][0])
    with pytest.raises(FileNotFoundError):
        asyncio.run(received(writer, publications[2]))


@pytest.mark.slow
def test_a_run_may_ask_for_more_versions_than_the_folder_would_keep(tmp_path: Path) -> None:
    transport = open_transport(TransportSettings(name="files", folder=tmp_path, keep=4))
    for number in range(6):
        send(transport, number)
    assert len([p for p in (tmp_path / "weights").iterdir() if p.is_dir()]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("at", ["put", "commit"])
def test_a_writer_killed_at_any_moment_leaves_whole_versions_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Killed after its first bucket, or before its version is announced: what was announced before stays."""
    if (child := os.fork()) == 0:
        writer = files(tmp_path)
        send(writer, 7)
        outgoing = writer.begin(8)
        outgoing.put(version(8)[1][0])
        if at == "commit":
            monkeypatch.setattr(writer, "_announce", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            outgoing.commit(version(8)[0])
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    found = newest_publication(tmp_path)
    assert found is not None
    assert found.manifest.policy_version == 7
    assert np.array_equal(asyncio.run(received(files(tmp_path), found))[0], version(7)[1][0])
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 2, "what it left"
    send(files(tmp_path), 9)
    assert sorted(p.name[:7] for p in tmp_path.iterdir() if p.is_dir()) == ["v000007", "v000009"]


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    first, second = files(tmp_path), files(tmp_path)
    send(first, 0)
    with pytest.raises(RuntimeError, match=r"transport_options.folder: .* written by another run.*choose another"):
        second.begin(0)
    first.close()
    send(second, 1)


def test_a_resumed_run_may_make_a_version_again(tmp_path: Path) -> None:
    first = files(tmp_path)
    earlier = send(first, 5)
    first.close()
    again = send(files(tmp_path), 5)
    assert earlier.bucket_refs != again.bucket_refs
    newest = newest_publication(tmp_path)
    assert newest is not None
    assert newest.bucket_refs == again.bucket_refs


@pytest.mark.parametrize(
    "listed",
    [
        "nothing",
        "{}",
        '{"versions": 3}',
        '{"versions": [[1]]}',
        '{"versions": [["x", "v000001-00000000", ""]]}',
        '{"versions": [[1, "../../etc", ""]]}',
        "[" * 100_000,
    ],
)
def test_a_hostile_list_of_versions_is_refused_in_one_line(tmp_path: Path, listed: str) -> None:
    (tmp_path / "newest.json").write_text(listed)
    with pytest.raises(ValueError, match=r"newest\.json: "):
        newest_publication(tmp_path)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    publication = send(files(tmp_path), 0)
    bucket = Path(publication.bucket_refs[1])
    manifest = bucket.parent / "manifest.json"
    into = np.empty(4096, dtype=np.uint8)
    fetch = files(tmp_path).fetch
    bucket.unlink()
    bucket.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="bucket-00001"):
        asyncio.run(fetch(publication, 1, into))
    bucket.unlink()
    os.mkfifo(bucket)
    with pytest.raises(ValueError, match="is not a file"):
        asyncio.run(fetch(publication, 1, into))
    manifest.write_text(manifest.read_text().replace("uint8", "int8"))
    with pytest.raises(ValueError, match=r"manifest\.json does not match its SHA-256"):
        newest_publication(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": "1"},
        {"entries": [{}]},
        {"entries": [{"name": "a", "dtype": "uint8", "shape": ["1"], "bucket": 0, "offset": 0, "num_bytes": 1}]},
        {"bucket_bytes": [True]},
        {"canary": {}},
        {"digest": None},
        {"checksum": 3},
    ],
)
def test_a_manifest_that_is_none_is_refused(change: dict[str, Any]) -> None:
    text = json.dumps(json.loads(version(1)[0].to_json()) | change)
    with pytest.raises(ValueError, match="not a manifest of published weights"):
        Manifest.from_json(text)


def test_a_manifest_survives_the_way_through_a_file() -> None:
    manifest = version(3)[0]
    assert Manifest.from_json(manifest.to_json()) == manifest


class Damaging(Files):
    """Flips a byte, or never answers."""

    def __init__(self, below: Files, *, answers: bool) -> None:
        super().__init__(below.folder, keep=1)
        self._answers = answers

    async def fetch(self, publication: Publication, index: int, into: np.ndarray, held: Any = None) -> int:
        if not self._answers:
            await asyncio.Event().wait()
        num_bytes = await super().fetch(publication, index, into)
        into[-1] ^= index == 1
        return num_bytes


def test_what_an_audit_computes_with_was_checked_and_came_in_time(tmp_path: Path) -> None:
    writer = files(tmp_path)
    publication = send(writer, 0)
    assert np.array_equal(asyncio.run(fetch_whole(writer, publication, within_s=200))[2], version(0)[1][2])
    with pytest.raises(WeightSyncError, match="bytes check: tensor c does not match"):
        asyncio.run(fetch_whole(Damaging(writer, answers=True), publication, within_s=200))
    with pytest.raises(WeightSyncError, match=r"bucket 1 of 3 did not arrive within 0\.01 s"):
        asyncio.run(fetch_whole(Damaging(writer, answers=False), publication, within_s=0.01))
    Path(publication.bucket_refs[1]).unlink()
    with pytest.raises(WeightSyncError, match=r"bucket 2 of 3 did not arrive \(FileNotFoundError"):
        asyncio.run(fetch_whole(writer, publication, within_s=200))


class OfTheUser:
    @classmethod
    def open(cls, settings: TransportSettings) -> OfTheUser:
        made = cls()
        made.settings = settings  # type: ignore[attr-defined]
        return made


def test_a_transport_of_the_users_own_is_opened_with_its_options(tmp_path: Path) -> None:
    settings = TransportSettings(name=f"{__name__}:OfTheUser", folder=tmp_path, options={"any": 1})
    check_transport(settings.name, settings.options)
    assert open_transport(settings).settings is settings  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("file", {}, ["param_server.transport", "files", "object_store"]),
        ("object_store", {"folder": "/x"}, ["param_server.transport_options.folder", "takes none"]),
        ("files", {"fsnc": True}, ["transport_options.fsnc", "nearest: fsync"]),
        ("files", {"keep": 0}, ["transport_options.keep", "a whole number from 1"]),
        ("files", {"keep": True}, ["transport_options.keep"]),
        ("files", {"folder": 3}, ["transport_options.folder", "a path"]),
        ("broadcast", {"backend": "mpi"}, ["transport_options.backend", "one of socket, gloo, nccl"]),
        ("broadcast", {"backend": "nccl"}, ["transport_options.backend", "socket or gloo, unless"]),
    ],
)
def test_a_transport_takes_its_own_options_only(name: str, options: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_transport(name, options)
    assert all(part in str(refused.value) for part in names)


def test_where_nothing_travels_there_are_no_differences() -> None:
    from leeway.config import load_config

    with pytest.raises(ConfigError, match=r"param_server\.delta: got True, expected false with ipc"):
        load_config("quickstart", ["param_server.transport=ipc", "param_server.delta=true"])


def test_nccl_is_taken_where_each_end_has_a_gpu_of_its_own() -> None:
    """It refuses a communicator with two ranks on one GPU, which is where a shared one has trainer and engine."""
    from leeway.config import load_config

    on_gpus = ["cluster.device=cuda", "param_server.transport=broadcast"]
    shared, asked = "cluster.placement=together", "param_server.transport_options.backend=nccl"
    assert transport_options(load_config("quickstart", on_gpus))["backend"] == "nccl"
    assert transport_options(load_config("quickstart", [*on_gpus, shared]))["backend"] == "socket"
    with pytest.raises(ConfigError, match=r"transport_options\.backend: got 'nccl', expected socket or gloo, unless"):
        load_config("quickstart", [*on_gpus, shared, asked])


def test_memory_is_shared_on_one_machine_only() -> None:
    check_transport("ipc", {})
    with pytest.raises(
        ConfigError, match=r"param_server\.transport: got 'ipc', .*cluster\.address.*object_store or broadcast"
    ):
        check_transport("ipc", {}, on_one_machine=False)


def test_every_transport_says_what_it_needs() -> None:
    from leeway.config import load_config

    config = load_config("quickstart", ["param_server.transport=files", "param_server.transport_options.keep=5"])
    for kind in TRANSPORTS.values():
        assert kind.needs(config)
    assert "6 versions" in TRANSPORTS["files"].needs(config)
