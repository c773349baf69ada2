"""Parts of a run on other machines: where they go, what is brought to them, and what is refused before they start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RpcError

from leeway.config import Config, find_recipe
from leeway.failures import InputRefused, PartFailed
from leeway.runtime import cluster, hosts
from leeway.runtime.cluster import ClusterError
from leeway.runtime.footprint import MARK_ENV
from leeway.runtime.hosts import Cluster, CorePool, Host, HostActor, HostFacts, Hosts, checksums

OWN, OTHER = "a" * 56, "b" * 56


class Remote:
    """A handle of an actor that is in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, method))


class Elsewhere(HostActor):
    """A machine on whose disk nothing is that is on the driver's, but what was brought to it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mended = asyncio.Event()
        self.mended.set()
        self.silent: list[str] = []
        self.leeway = hosts.__version__

    async def lines(self, known: Any) -> dict[str, tuple[int, bytes]]:
        await self.mended.wait()
        return await super().lines(known)

    async def facts(self, run_dir: Path, token: str) -> HostFacts:
        found = await super().facts(run_dir, token)
        own = {"sees_run": False, "machine": "another", "cores": [4, 5, 6], "leeway": self.leeway}
        return HostFacts(**{**vars(found), **own})

    async def has(self, folder: str, sums: Any) -> bool:
        return Path(folder).is_relative_to(self._footprint.scratch) and await super().has(folder, sums)

    async def sees(self, folder: str, token: str) -> bool:
        return False


def watch(part: str, work: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(work)


@contextlib.asynccontextmanager
async def two_machines(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> AsyncIterator[tuple[Hosts, Elsewhere]]:
    """`Hosts` of a run on this machine and another one."""
    monkeypatch.delenv(MARK_ENV, raising=False)
    monkeypatch.setattr(hosts, "log_to_file", lambda file, level: file.parent.mkdir(parents=True))
    there = Elsewhere(role="host-other", log_level="INFO", address="127.0.0.1")
    making = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: Remote(there)))
    monkeypatch.setattr(hosts, "HostRemote", making)
    context = SimpleNamespace(get_node_id=lambda: OWN)
    nodes = [{"NodeID": node, "NodeManagerAddress": "127.0.0.1"} for node in (OWN, OTHER)]
    for name, value in {
        "get_runtime_context": lambda: context,
        "nodes": lambda: nodes,
        "kill": lambda actor: None,
    }.items():
        monkeypatch.setattr(hosts.ray, name, value)
    monkeypatch.setattr(hosts.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    found = Hosts(
        run_dir,
        whole_run=run_dir,
        log_level="INFO",
        silent_s=600.0,
        silent=lambda host: there.silent.append(host.name),
        watch=watch,
    )
    try:
        yield found, there
    finally:
        await found.close(60.0)
        await there.clean_up()


def play(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, scenario: Callable[[Hosts, Elsewhere], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with two_machines(monkeypatch, run_dir) as (found, there):
            await scenario(found, there)

    asyncio.run(main())


def test_a_model_is_brought_whole_to_a_machine_that_lacks_it_and_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    contents = {"config.json": b"{}", "empty.txt": b"", "more/weights.bin": bytes(range(256)) * 5000}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    monkeypatch.setattr(hosts, "CHUNK_BYTES", 1000 * 256)

    async def scenario(found: Hosts, there: Elsewhere) -> None:
        host = await found.at(OTHER)
        places = await asyncio.gather(*(found.model(host, str(folder)) for _ in range(3)))
        assert len(set(places)) == 1
        assert places[0] != str(folder)
        assert {name: (Path(places[0]) / name).read_bytes() for name in contents} == contents
        assert await found.model(host, "org/name") == "org/name", "of the hub: each machine fetches it"
        own = await found.at(OWN)
        assert await found.model(own, str(folder)) == str(folder)

    play(monkeypatch, tmp_path / "run", scenario)


def test_a_model_that_lies_there_already_is_taken_and_another_of_that_name_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"1234")
    sums = checksums(folder)

    async def has() -> bool:
        return await HostActor.has(SimpleNamespace(role="host"), str(folder), sums)  # type: ignore[arg-type]

    assert asyncio.run(has())
    (folder / "weights.bin").write_bytes(b"1235")
    assert not asyncio.run(has())


def test_logs_of_another_machine_appear_in_the_run_and_it_is_left_clean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scratch: list[Path] = []

    async def scenario(found: Hosts, there: Elsewhere) -> None:
        host = await found.at(OTHER)
        scratch.append(host.folder.parent)
        assert not host.folder.is_relative_to(tmp_path)
        log = host.folder / "logs/there/generator-1.log"
        log.parent.mkdir()
        log.write_text("first\n")
        (host.folder / "spans").mkdir()
        (host.folder / "spans/generator-1.jsonl").write_text('{"id": 1}\n')
        await found._bring_lines(host)
        with log.open("a") as file:
            file.write("last words\n")

    play(monkeypatch, tmp_path / "run", scenario)
    assert (tmp_path / "run/logs/there/generator-1.log").read_text() == "first\nlast words\n"
    assert (tmp_path / "run/spans/generator-1.jsonl").read_text() == '{"id": 1}\n'
    assert not scratch[0].exists()
    assert not (tmp_path / "run" / hosts.MARKER).exists()


@pytest.mark.slow
def test_a_machine_that_is_silent_is_told_of_and_its_logs_come_when_it_answers_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts, "LOGS_EVERY_S", 0.01)
    log = tmp_path / "run/logs/generator-1.log"

    async def until(holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(200):
            while not holds():
                await asyncio.sleep(0.01)

    async def scenario(found: Hosts, there: Elsewhere) -> None:
        there.mended.clear()
        found._silent_s = 0.05
        host = await found.at(OTHER)
        (host.folder / "logs/generator-1.log").write_text("while it was cut off\n")
        await until(lambda: there.silent)
        assert not log.exists()
        assert found.is_silent(OTHER), "so nothing is placed there"
        there.mended.set()
        await until(lambda: log.exists() and log.read_text() == "while it was cut off\n")
        assert there.silent == [host.name], "once"
        await until(lambda: not found.is_silent(OTHER))

    play(monkeypatch, tmp_path / "run", scenario)


@pytest.mark.slow
def test_what_a_lost_generator_leaves_there_is_killed_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(found: Hosts, there: Elsewhere) -> None:
        mark = {MARK_ENV: there._footprint.mark}
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        own = subprocess.Popen(sleep, env={**os.environ, **mark})
        strangers = subprocess.Popen(sleep)
        try:
            await there.kill([own.pid, strangers.pid])
            assert await asyncio.to_thread(own.wait, 200) == -9
            assert strangers.poll() is None
        finally:
            strangers.kill()
            strangers.wait()

    play(monkeypatch, tmp_path / "run", scenario)


def test_another_version_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scenario(found: Hosts, there: Elsewhere) -> None:
        there.leeway = "0.0.9"
        with pytest.raises(InputRefused, match=r"^cluster.address: .* has Leeway 0.0.9, expected .* as here"):
            await found.at(OTHER)

    play(monkeypatch, tmp_path / "run", scenario)


# ------------------------------------------------------------------------------------------------------------- places


def config_of(tmp_path: Path, **sections: Any) -> Config:
    tree = {
        "model": {"path": "org/name"},
        "task": {"path": "tasks.jsonl"},
        "output_dir": str(tmp_path),
        "rollout": {"num_generators": 2},
        "train": {"steps": 4},
        "cluster": {"device": "cpu", "address": "10.0.0.1:6379"},
    }
    return Config.model_validate(
        {name: {**tree.get(name, {}), **own} for name, own in sections.items()}
        | {name: value for name, value in tree.items() if name not in sections}
    )


class Groups:
    """Ray's placement groups, on the nodes that it is told; `asked`: what for, and where rather."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
        self.asked: list[tuple[dict[str, float], str | None]] = []
        self.removed: list[int] = []
        self._nodes = nodes
        self.waits = 0

        def make(bundles: Any, strategy: str, _soft_target_node_id: str | None) -> int:
            self.asked.append((bundles[0], _soft_target_node_id))
            return len(self.asked) - 1

        def table(group: int) -> dict[str, Any]:
            self.waits -= 1
            state = "PENDING" if self.waits >= 0 else "CREATED"
            return {"state": state, "bundles_to_node_id": {0: self._nodes[group]}}

        monkeypatch.setattr(hosts, "placement_group", make)
        monkeypatch.setattr(hosts, "placement_group_table", table)
        monkeypatch.setattr(hosts, "remove_placement_group", self.removed.append)
        where = lambda group, placement_group_bundle_index: group  # noqa: E731
        monkeypatch.setattr(hosts, "PlacementGroupSchedulingStrategy", where)


def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scenario: Any, **sections: Any) -> None:
    async def main() -> None:
        made = Cluster(
            config_of(tmp_path, **sections),
            find_recipe("async_rl"),
            run_dir=tmp_path / "run",
            silent=lambda *_: None,
            watch=watch,
        )
        async with two_machines(monkeypatch, tmp_path / "run") as (made.hosts, _):
            await scenario(made)

    asyncio.run(main())


def test_each_engine_has_a_group_of_its_own_and_cores_of_its_own_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts.os, "sched_getaffinity", lambda pid: {0, 1})
    groups = Groups(monkeypatch, OWN, OWN, OTHER, OTHER, OTHER)

    async def scenario(made: Cluster) -> None:
        trainer = await made.trainer(0)
        first, second, third = [await made.generator(i, {"num_gpus": 0}) for i in range(3)]
        assert groups.asked == [({"CPU": 1.0}, OWN), *[({"CPU": 1.0}, None)] * 3], "ranks rather where the driver is"
        assert (trainer.cores, first.cores, second.cores, third.cores) == ([1], [0], [4], [5])
        assert third.options["scheduling_strategy"] == 3
        assert second.options["runtime_env"]["env_vars"]["TMPDIR"] == str(second.folder.parent)
        assert second.machine == "another" != trainer.machine
        second.leave([])
        await asyncio.to_thread(lambda: None)
        assert (await made.generator(1, {"num_gpus": 0})).cores == [4], "it has left"

        await made.close(60.0)

    places(monkeypatch, tmp_path, scenario)
    assert groups.removed[0] == 2
    assert sorted(groups.removed) == [0, 1, 2, 3, 4], "each once, at the latest when the stage has ended"


def test_a_place_that_is_given_up_while_it_waits_for_room_leaves_no_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = Groups(monkeypatch, OTHER)
    groups.waits = 10**9
    monkeypatch.setattr(hosts, "POLL_S", 0.001)
    monkeypatch.setattr(hosts, "SAY_AFTER_S", 0.002)

    async def scenario(made: Cluster) -> None:
        waiting = asyncio.ensure_future(made.generator(0, {"num_gpus": 2}))
        while "waits" not in capsys.readouterr().out:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])

    places(monkeypatch, tmp_path, scenario)
    assert groups.asked == [({"CPU": 1.0, "GPU": 2.0}, None)]
    assert groups.removed == [0]


def test_room_on_a_machine_that_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray gives it out until it has noticed, which takes it longer than us; then it moves the group."""
    groups = Groups(monkeypatch, OTHER, OTHER)
    monkeypatch.setattr(hosts, "POLL_S", 0.001)

    async def scenario(made: Cluster) -> None:
        host = await made.hosts.at(OTHER)
        host.is_silent = True
        waiting = asyncio.ensure_future(made.generator(0, {"num_gpus": 0}))
        looks = groups.waits
        while groups.waits > looks - 3:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        host.is_silent = False
        assert (await waiting).machine == host.machine

    places(monkeypatch, tmp_path, scenario)
    assert len(groups.asked) == 1


def test_ranks_save_where_the_run_is_or_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    groups = Groups(monkeypatch, OTHER)

    async def scenario(made: Cluster) -> None:
        with pytest.raises(InputRefused, match=r"^output_dir: got .*run, which .* does not see, where trainer-0 would"):
            await made.trainer(0)

    places(monkeypatch, tmp_path, scenario)
    assert groups.removed == [0]


def test_files_as_transport_need_a_folder_that_engines_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    groups = Groups(monkeypatch, OTHER)

    async def scenario(made: Cluster) -> None:
        with pytest.raises(InputRefused, match=r"^param_server.transport: got files in .*weights, which .* not see"):
            await made.generator(0, {"num_gpus": 0})

    places(monkeypatch, tmp_path, scenario, param_server={"transport": "files"})
    assert groups.removed == [0]


def test_every_path_of_a_model_is_one_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def there(self: Hosts, host: Host, path: str) -> str:
        return f"/there{path}"

    monkeypatch.setattr(Hosts, "model", there)
    Groups(monkeypatch, OTHER)

    async def scenario(made: Cluster) -> None:
        place = await made.generator(0, {"num_gpus": 0})
        config = await place.localize(made._config)
        assert config.model.path == "/there/m"
        assert config.algorithm.reference_path == "/there/r"
        assert config.critic.path == "/there/c"
        assert config.env.models["judge"].path == "/there/j"

    judge = {"models": {"judge": {"path": "/j"}}}
    kl = {"reference_path": "/r", "kl": {"coef": 0.1}}
    places(monkeypatch, tmp_path, scenario, model={"path": "/m"}, algorithm=kl, critic={"path": "/c"}, env=judge)


def test_cores_go_to_those_who_have_none() -> None:
    pool = CorePool([3, 5, 7, 9])
    assert [pool.take(1), pool.take(2), pool.take(1, from_the_end=True)] == [[3], [5, 7], [9]]
    assert pool.take(1) == [3], "too few: they share"
    pool.give_back([5, 7])
    assert pool.take(1) == [5]
    assert CorePool(range(4)).take(2, among=[1, 3]) == [1, 3]
    assert CorePool([0]).take(1) == CorePool([]).take(1) == []


# ------------------------------------------------------------------------------------------------------------ joining


def test_an_address_where_nothing_is_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ClusterError, match=rf"^cluster.address: got {address}, where nothing answers .*ray start"):
        cluster._join(address, {})


def test_an_address_that_takes_a_connection_and_says_nothing_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(*, address: str) -> None:
        raise RpcError("Timed out while waiting for GCS to become available.", 14)

    monkeypatch.setattr(cluster, "GcsClient", client)
    monkeypatch.setattr(cluster, "maybe_enable_token_auth_if_token_available", lambda **_: False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"^cluster.address: got {address}, which cannot be joined: Timed out"):
            cluster._join(address, {})


def test_a_missing_token_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("Ray said: InvalidAuthToken")

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster, "maybe_enable_token_auth_if_token_available", lambda **_: False)
    with pytest.raises(ClusterError, match=r"cannot be joined: .*InvalidAuthToken.*copy ~/.ray/auth_token .*RAY_AUTH"):
        cluster._join("auto", {})


def test_a_token_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an address that it is told, Ray itself does not look for one."""
    done: list[str] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **options: done.append(options["address"]))
    monkeypatch.setattr(cluster, "maybe_enable_token_auth_if_token_available", lambda **_: done.append("token"))
    cluster._join("ray.example", {})
    assert done == ["token", "ray.example"]


def test_an_engine_must_fit_on_one_machine(tmp_path: Path) -> None:
    config = config_of(tmp_path, cluster={"cpus_per_generator": 3})
    stage: Any = SimpleNamespace(config=config, recipe=find_recipe("async_rl"), name="async_rl")
    cluster.check_room([stage], [{"CPU": 4.0}, {"CPU": 3.0}])
    with pytest.raises(ClusterError, match=r"has 0 GPUs and 8 CPUs, expected 0 and 7 .* each process on one machine"):
        cluster.check_room([stage], [{"CPU": 5.0}, {"CPU": 2.0}, {"CPU": 1.0}])


def test_a_part_that_fails_there_says_so() -> None:
    async def fails() -> None:
        await HostActor.write(SimpleNamespace(role="host-b"), "f", b"")  # type: ignore[arg-type]

    with pytest.raises(PartFailed, match=r"^host-b: AttributeError"):
        asyncio.run(fails())


def test_an_actors_class_answers_what_the_driver_asks_of_every_part() -> None:
    for asked in ("wait_until_death", "answer", "clock", "open_spans", "close_spans"):
        assert asyncio.iscoroutinefunction(getattr(HostActor, asked)), asked
