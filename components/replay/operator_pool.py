"""Operators in processes of their own (`replay.operator_processes`), so that a slow one does not hold up the buffer.

A group crosses as flat tensors, safetensors in a frame, and comes back only if it was changed. No pickle: what the
tensors hold was written by a model. Each group has a process to itself while its operators run; groups get one in the
order in which they were delivered. A process that dies is replaced, and its group done again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import spans
from ..group import Group
from ..jobs.group_bytes import group_bytes, group_of
from .operator_process import LENGTH_BYTES
from .operators import Applied, Counts, OperatorFailed

logger = logging.getLogger(__name__)

MOST_DEATHS = 3
"""A group that has ended so many processes would end every other too."""
START_S = 300.0
"""A process loads torch, and what the operators need."""
MOST_FRAME_BYTES = 2**36


class OperatorPool:
    """`apply` works for any number of groups at once; `num_processes` of them have a process.

    `steps`: `replay.operators`. `timeout_s`: what the operators may take for one group, without its wait for a process.
    `log_file`: of the part that owns the pool; each process has one beside it.
    """

    def __init__(
        self,
        steps: Sequence[str | dict[str, Any]],
        *,
        num_processes: int,
        timeout_s: float,
        log_file: Path,
        log_level: str = "INFO",
        start_s: float = START_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._counts = Counts(steps)
        self._workers = [
            _Worker(
                {
                    "steps": list(steps),
                    "path": sys.path,
                    "log_file": str(log_file.with_name(f"operators-{i}.log").absolute()),
                    "log_level": log_level,
                },
                start_s=start_s,
            )
            for i in range(num_processes)
        ]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._num_inside = self._num_replaced = self._num_done = 0
        self._busy_s = self._waited_s = 0.0

    async def start(self) -> None:
        """All processes are up. Raises `OperatorFailed` with the last words of one that cannot start."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    def process_ids(self) -> list[int]:
        return [worker.process_id for worker in self._workers if worker.process_id is not None]

    async def apply(self, group: Group) -> Group | str:
        """See `operators.Pipeline`. Raises `OperatorFailed` that names the operator which raised, took too long, or
        ended its process `MOST_DEATHS` times.
        """
        self._num_inside += 1
        began = time.monotonic()
        try:
            worker = await self._idle.get()
            has_worker = time.monotonic()
            try:
                with spans.span("operators", group=group.group_id):
                    applied = await self._applied(worker, group)
            finally:
                self._idle.put_nowait(worker)
        finally:
            self._num_inside -= 1
        self._waited_s += has_worker - began
        self._busy_s += time.monotonic() - has_worker
        self._num_done += 1
        self._counts.add(applied)
        return applied.result

    async def _applied(self, worker: _Worker, group: Group) -> Applied:
        data, what = group_bytes(group), f"group {group.group_id} of task {group.task_id}"
        for death in range(1, MOST_DEATHS + 1):
            try:
                return await worker.ask(data, group, timeout_s=self._timeout_s)
            except TimeoutError:
                raise OperatorFailed(
                    f"operator {worker.at} took longer than {self._timeout_s:g} s for {what} "
                    "(replay.operator_timeout_s)"
                ) from None
            except ConnectionError:
                self._num_replaced += 1
                logger.warning(
                    "%s: process %s of the operator pool has ended (%s); a new one does the group again",
                    what, worker.ended_id, worker.ending,
                )  # fmt: skip
                if death == MOST_DEATHS:
                    raise OperatorFailed(
                        f"operator {worker.at} ended its process {death} times ({worker.ending}) at {what}"
                    ) from None
        raise AssertionError("unreachable")

    def metrics(self) -> dict[str, float]:
        """Counts so far, and means over the groups that came out since the last call."""
        done = self._num_done
        means = {"seconds": self._busy_s / done, "wait_s": self._waited_s / done} if done else {}
        self._num_done, self._busy_s, self._waited_s = 0, 0.0, 0.0
        pool = {"groups": float(self._num_inside), "replaced": float(self._num_replaced), **means}
        return self._counts.metrics() | {f"replay/operators/{name}": value for name, value in pool.items()}

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.kill()


class _Worker:
    """One place of the pool, and the process that is at it: none before it is needed, or after it has ended.

    `at`: the operator that was begun last. `ended_id`, `ending`: of the process that ended last.
    """

    def __init__(self, settings: dict[str, Any], *, start_s: float) -> None:
        self._settings, self._start_s = settings, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_clean = False
        self.at, self.ending, self.ended_id = "", "", -1

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        if self._is_clean:
            return
        self.kill()
        ours, its = socket.socketpair()
        package = Path(sys.modules["leeway"].__file__ or "").absolute().parents[1]
        with its:
            self._process = subprocess.Popen(
                # -P: no module in the working directory can shadow one of Python's own.
                [sys.executable, "-P", "-m", "leeway.replay.operator_process", str(its.fileno())],
                env={**os.environ, "PYTHONPATH": str(package)},
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(self._start_s):
                await self._send(json.dumps(self._settings).encode())
                said = await self._said()
        except TimeoutError:
            self.kill()
            raise OperatorFailed(f"a process for replay.operators did not start within {self._start_s:g} s") from None
        except ConnectionError:
            self.kill()
            raise OperatorFailed(
                f"a process for replay.operators ended as it started ({self.ending}); see {self._settings['log_file']}"
            ) from None
        if "error" in said:
            self.kill()
            raise _failed(said)
        self._is_clean = True

    async def ask(self, data: bytes, group: Group, *, timeout_s: float) -> Applied:
        """What the operators made of the group, whose bytes are `data`. Raises ConnectionError when the process has
        ended, TimeoutError, or `OperatorFailed`; after the first two, the next call gets another process.
        """
        self.at = "(none)"
        await self.start()
        self._is_clean = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(data)
                while "at" in (said := await self._said()):
                    self.at = said["at"]
                result: Group | str = said.get("reason") or group
                if said.get("has_group"):
                    result = group_of(await self._frame())
        except BaseException:
            self.kill()
            raise
        self._is_clean = True
        if "error" in said:
            raise _failed(said)
        return Applied(result, tuple(said["changed"]), said["filtered_by"])

    def kill(self) -> None:
        self._is_clean = False
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                self._process.kill()
                code = self._process.wait()
            self.ended_id = self._process.pid
            self.ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._process = None

    async def _send(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        await self._writer.drain()

    async def _said(self) -> dict[str, Any]:
        return json.loads(await self._frame())

    async def _frame(self) -> bytes:
        assert self._reader is not None
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length > MOST_FRAME_BYTES:
                raise ConnectionResetError("no frame")
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the process has ended") from None


def _failed(said: dict[str, Any]) -> OperatorFailed:
    """Its message is one line. The traceback of the process is a note, which stands below ours."""
    error = OperatorFailed(said["error"])
    error.add_note(f"In the process of the operator pool:\n{said['trace']}")
    return error
