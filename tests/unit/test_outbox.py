"""Groups on their way out of a collector: one call at a time, of all that came since the last one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from leeway.collector.outbox import Outbox

from .virtual_clock import VirtualClock


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


def test_a_call_that_is_made_anyway_takes_along_what_waits_and_what_comes_soon_after_waits_for_the_next() -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        sent, answered = list[tuple[float, list[Any]]](), asyncio.Event()

        async def send(groups: list[Any]) -> None:
            sent.append((now(), groups))

        async def other() -> None:
            with outbox.taken() as groups:
                sent.append((now(), ["other", *groups]))
                await answered.wait()

        outbox = Outbox(send, hold_s=1.0)
        running = asyncio.ensure_future(outbox.run())
        await asyncio.sleep(10)
        outbox.add(cast("Any", [1]))
        await asyncio.sleep(0.1)
        assert sent == [(10.0, [1])], "nobody has asked: it is sent at once"

        outbox.add(cast("Any", [2, 3]))
        asked = asyncio.ensure_future(other())
        emptied = asyncio.ensure_future(outbox.emptied())
        await asyncio.sleep(0.25)
        assert sent[1:] == [(10.1, ["other", 2, 3])]
        assert not emptied.done(), "that call is not answered"
        outbox.add(cast("Any", [4]))
        await asyncio.sleep(0.5)
        assert sent[2:] == [], "another call may follow"
        await asyncio.sleep(1)
        assert sent[2:] == [(11.1, [4])], "what comes while a call waits does not wait for its answer"

        outbox.add(cast("Any", [6]))
        asked_too = asyncio.ensure_future(other())
        await asyncio.sleep(0.25)
        outbox.add(cast("Any", [7]))
        await asyncio.sleep(0.25)
        assert sent[3:] == [(11.85, ["other", 6])], "7 waits for another call"
        outbox.add(cast("Any", [8]), are_last=True)
        await asyncio.sleep(0.25)
        assert sent[4:] == [(12.35, [7, 8])], "nothing else is under way: no call can follow"
        del sent[3:]

        answered.set()
        await asyncio.gather(asked, asked_too, emptied)
        outbox.add(cast("Any", [5]))
        await asyncio.sleep(0.75)
        asked = asyncio.ensure_future(other())
        await asyncio.sleep(10)
        assert sent[3:] == [(13.35, ["other", 5])], "held for a while after an answer too: then more begins"
        await asked
        running.cancel()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(asyncio.wait_for(main(), 600))


def test_what_sending_raises_ends_it() -> None:
    async def main() -> None:
        async def send(groups: list[Any]) -> None:
            raise ConnectionError("nobody is there")

        outbox = Outbox(send)
        outbox.add(cast("Any", [1]))
        with pytest.raises(ConnectionError, match="nobody is there"):
            await outbox.run()

    asyncio.run(asyncio.wait_for(main(), 60))
