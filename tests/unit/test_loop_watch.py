"""An event loop that does not turn: the code that blocks it is named, whatever that code calls."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from leeway.collector.loop_watch import LoopWatch


def watched(block: Callable[[], None], *, warn_s: float) -> None:
    """Run `block` in an event loop that is watched."""

    async def main() -> None:
        LoopWatch(warn_s=warn_s)
        await asyncio.sleep(0.05)
        block()

    asyncio.run(main())


def test_what_blocks_is_named_by_the_users_own_line(caplog: pytest.LogCaptureFixture) -> None:
    def waits_in_a_library() -> None:
        begun = time.monotonic()
        while not caplog.records and time.monotonic() - begun < 200:
            subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(0.3)"], check=True)

    with caplog.at_level(logging.ERROR):
        watched(waits_in_a_library, warn_s=0.1)
    said = caplog.records[0].getMessage()
    named = r"blocked for \d+ s by .*test_loop_watch\.py:\d+ in waits_in_a_library: (subprocess\.run|while)"
    assert re.search(named, said)
    assert "must not block: await, or use asyncio.to_thread" in said
    assert "in watched" in said, "the whole stack"
