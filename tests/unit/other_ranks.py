"""Other ranks of a process group, for tests: processes that do one test's work after another.

A test gives each of them a script and a tuple `work` to do it with.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..forked import Forked


class OtherRanks:
    """A process keeps its rank: torch remembers, per process, which rows of a tensor are its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: dict[int, Forked] = {}
        self._busy: dict[int, Forked] = {}

    def begin(self, script: str, works: Mapping[int, tuple[Any, ...]]) -> None:
        """Each rank of `works` runs `script` with its own; what that calls `result` is the rank's answer."""
        assert not self._busy, "the test before this one did not wait for its ranks"
        for rank, work in works.items():
            process = self._busy[rank] = self._idle.pop(rank, None) or self._start()
            assert process.stdin is not None
            pickle.dump((script, work), process.stdin)
            process.stdin.flush()

    def results(self, timeout_s: float = 200) -> list[Any]:
        """Of each rank, in order; an AssertionError with its traceback if one failed."""
        answers = []
        for rank, process in self._busy.items():
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], timeout_s)
            assert ready, f"rank {rank} was not done after {timeout_s:g} s"
            try:
                failure, result = pickle.load(process.stdout)  # from a process that this test started itself
            except EOFError:
                failure, result = "it died:\n" + (self._folder / "stderr").read_text(errors="replace")[-2000:], None
            assert failure is None, f"rank {rank}: {failure}"
            answers.append(result)
        self._idle |= self._busy
        self._busy = {}
        return answers

    def end_busy(self) -> None:
        for process in self._busy.values():
            process.kill()
            process.wait()
        self._busy = {}

    def end(self) -> None:
        self._busy |= self._idle
        self._idle = {}
        self.end_busy()

    def _start(self) -> Forked:
        with (self._folder / "stderr").open("ab") as stderr:
            code = f"from {__name__} import serve; serve()"
            return Forked(code, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=stderr)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        try:
            script, work = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        names: dict[str, Any] = {"work": work}
        try:
            exec(script, names)
            answer = None, names.get("result")
        except BaseException:
            answer = traceback.format_exc(), None
        pickle.dump(answer, answers)
        answers.flush()
