"""The parameter server: pull-based, newest only, in order."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from leeway.param_server.server import ParameterServer
from leeway.weights import Canary, CanaryPrompts, Manifest, Publication, digest_of

from .virtual_clock import VirtualClock


class Bucket:
    """Stands for a reference into an object store: its memory goes when nobody holds it."""


def publication(version: int, buckets: int = 1) -> Publication:
    canary = Canary(CanaryPrompts(scored=[], cached=[]), [], [], [])
    return Publication(Manifest(version, [], [0] * buckets, canary, digest_of([])), [Bucket() for _ in range(buckets)])


async def pull(server: ParameterServer, newer_than: int, timeout_s: float = 200.0) -> int | None:
    found = await server.pull(newer_than=newer_than, timeout_s=timeout_s)
    return None if found is None else found.manifest.policy_version


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_is_there_is_handed_out_at_once_even_without_any_patience():
    async def scenario():
        server = ParameterServer()
        given = publication(0)
        await server.publish(given)
        assert await server.pull(newer_than=-1, timeout_s=0.0) is given
        assert await pull(server, -1) == 0  # pulling takes nothing away

    asyncio.run(scenario())


def test_a_pull_waits_for_something_newer_and_goes_on():
    async def scenario():
        server = ParameterServer()
        first = asyncio.create_task(pull(server, -1))
        await settle()
        assert not first.done()
        await server.publish(publication(0))
        assert await first == 0
        later = asyncio.create_task(pull(server, 1))
        await server.publish(publication(1))
        await settle()
        assert not later.done(), "version 1 is not newer than 1"
        await server.publish(publication(2))
        assert await later == 2

    asyncio.run(scenario())


def test_every_waiter_gets_the_newest_it_asked_for():
    async def scenario():
        server = ParameterServer()
        waiters = [asyncio.create_task(pull(server, newer_than)) for newer_than in (-1, 0, 3, 4)]
        await settle()
        await server.publish(publication(0))
        await server.publish(publication(4))
        await settle()
        assert [w.done() for w in waiters] == [True, True, True, False]
        assert [w.result() for w in waiters[1:3]] == [4, 4]
        await server.publish(publication(5))
        assert await waiters[3] == 5

    asyncio.run(scenario())


def test_nothing_newer_in_time_is_none_and_leaves_the_server_as_it_was():
    async def scenario():
        server = ParameterServer()
        loop = asyncio.get_running_loop()
        assert await pull(server, -1, timeout_s=0.05) is None
        assert loop.time() == pytest.approx(0.05)
        await server.publish(publication(0))
        assert await pull(server, 0, timeout_s=0.02) is None
        assert await pull(server, -1) == 0

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(scenario())


def test_a_collector_that_dies_while_it_waits_disturbs_nobody():
    async def scenario():
        server = ParameterServer()
        dying, living = (asyncio.create_task(pull(server, -1)) for _ in range(2))
        await settle()
        dying.cancel()
        await settle()
        await server.publish(publication(0))
        assert await living == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("version", [3, 2])
def test_versions_increase(version):
    async def scenario():
        server = ParameterServer()
        await server.publish(publication(3))
        with pytest.raises(ValueError, match=f"published version {version} after 3; versions must increase"):
            await server.publish(publication(version))
        assert await pull(server, -1) == 3

    asyncio.run(scenario())


def test_a_publication_without_all_of_its_buckets_is_refused_whole():
    async def scenario():
        server = ParameterServer()
        whole = publication(1, buckets=3)
        with pytest.raises(AssertionError, match="all of its buckets"):
            await server.publish(Publication(whole.manifest, whole.bucket_refs[:2]))
        assert await pull(server, -1, timeout_s=0.01) is None

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_older_version_lives_as_long_as_somebody_pulls_it_and_no_longer():
    async def scenario():
        server = ParameterServer()
        await server.publish(publication(0))
        pulled = await server.pull(newer_than=-1, timeout_s=200)
        assert pulled is not None
        bucket = weakref.ref(pulled.bucket_refs[0])
        await server.publish(publication(1))
        gc.collect()
        assert bucket() is not None
        del pulled
        gc.collect()
        assert bucket() is None

    asyncio.run(scenario())


def test_kept_versions_are_handed_out_oldest_first_where_asked_for():
    async def main() -> None:
        server = ParameterServer(keep=3)
        for version in range(5):
            await server.publish(publication(version))
        given = []
        for newer_than in (-1, 1, 2, 3):
            found = await server.pull(newer_than=newer_than, timeout_s=0.1, oldest=True)
            given.append(found.manifest.policy_version if found else None)
        assert given == [2, 2, 3, 4]  # 0 and 1 are no longer kept
        assert await server.pull(newer_than=4, timeout_s=0.01, oldest=True) is None
        assert await pull(server, 1) == 4  # and the newest for everybody else

    asyncio.run(main())
