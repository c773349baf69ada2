"""Groups on their way out of a collector: one call at a time, of all that came since the last one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from leeway.collector.outbox import Outbox


def test_what_is_added_while_a_call_is_under_way_goes_with_the_next_one_in_order() -> None:
    async def main() -> None:
        calls, answers = list[list[Any]](), [asyncio.Event() for _ in range(3)]

        async def send(groups: list[Any]) -> None:
            calls.append(groups)
            await answers[len(calls) - 1].wait()

        async def turns() -> None:
            for _ in range(9):
                await asyncio.sleep(0)

        outbox = Outbox(send)
        await outbox.emptied()
        running = asyncio.ensure_future(outbox.run())
        outbox.add(cast("Any", [1, 2]))
        await turns()
        outbox.add(cast("Any", [3]))
        outbox.add(cast("Any", [4, 5]))
        emptied = asyncio.ensure_future(outbox.emptied())
        await turns()
        assert calls == [[1, 2]], "one call at a time"
        answers[0].set()
        await turns()
        assert calls == [[1, 2], [3, 4, 5]]
        assert not emptied.done(), "the last call is not answered"
        answers[1].set()
        await emptied
        outbox.add(cast("Any", [6]))
        answers[2].set()
        await outbox.emptied()
        assert calls[2:] == [[6]]
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_that_is_made_anyway_takes_along_what_has_just_been_added() -> None:
    async def main() -> None:
        sent, answered = list[list[Any]](), asyncio.Event()

        async def send(groups: list[Any]) -> None:
            sent.append(groups)

        async def other() -> None:
            with outbox.taken() as groups:
                sent.append(["other", *groups])
                await answered.wait()

        outbox = Outbox(send)
        running = asyncio.ensure_future(outbox.run())
        await asyncio.sleep(0)
        outbox.add(cast("Any", [1, 2]))
        asked = asyncio.ensure_future(other())
        emptied = asyncio.ensure_future(outbox.emptied())
        for _ in range(9):
            await asyncio.sleep(0)
        assert sent == [["other", 1, 2]]
        outbox.add(cast("Any", [3]))
        for _ in range(9):
            await asyncio.sleep(0)
        assert sent[1:] == [[3]], "what comes while that call waits does not wait for it"
        assert not emptied.done(), "the other call is not answered"
        answered.set()
        await asyncio.gather(asked, emptied)
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_sending_raises_ends_it() -> None:
    async def main() -> None:
        async def send(groups: list[Any]) -> None:
            raise ConnectionError("nobody is there")

        outbox = Outbox(send)
        outbox.add(cast("Any", [1]))
        with pytest.raises(ConnectionError, match="nobody is there"):
            await outbox.run()

    asyncio.run(asyncio.wait_for(main(), 60))
