"""A sink in a thread of its own: nothing of a run waits for a service, and what fails is tried again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from .sink import MonitorError, Record, Sink

WAITS_S = (1.0, 4.0, 16.0)
"""Before each further attempt of a call that failed."""
MAX_BEHIND = 10_000
"""Calls that wait for their turn; with more, the service has stopped."""
START_S = 120.0
CLOSE_S = 60.0


class Beside(Sink):
    """Calls the sink that `make` gives, in order, from one thread, which also makes it.

    A call that has failed for the last time is raised by the next call here. What `make` raises is raised at once.
    """

    def __init__(self, name: str, make: Callable[[], Sink], *, waits_s: Sequence[float] = WAITS_S) -> None:
        self.name = name  # type: ignore[misc]  # of the class for all others
        self._waits_s = waits_s
        self._calls: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(MAX_BEHIND)
        self._failure: Exception | None = None
        made: Future[Sink] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, made), daemon=True, name=f"sink {name}")
        self._thread.start()
        try:
            made.result(START_S)
        except TimeoutError:
            raise MonitorError(f"{name} did not start within {START_S:g} s; is its server there?") from None

    def log(self, record: Record) -> None:
        self._put(lambda sink: sink.log(record))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._put(lambda sink: sink.rollouts(step, rows))

    def summary(self, numbers: Mapping[str, Any]) -> None:
        self._put(lambda sink: sink.summary(numbers))

    def close(self, status: str) -> None:
        """Waits for what is left; raises TimeoutError if that takes longer than `CLOSE_S`."""
        deadline = time.monotonic() + CLOSE_S
        self._put(lambda sink: sink.close(status))
        self._put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"it had not taken the last {self._calls.qsize()} records after {CLOSE_S:g} s")

    def _put(self, call: Callable[[Sink], None] | None) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"it is {MAX_BEHIND:,} records behind") from None

    def _run(self, make: Callable[[], Sink], made: Future[Sink]) -> None:
        try:
            sink = make()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(sink)
        while (call := self._calls.get()) is not None:
            if not self._called(call, sink):
                return

    def _called(self, call: Callable[[Sink], None], sink: Sink) -> bool:
        for wait_s in (*self._waits_s, None):
            try:
                call(sink)
                return True
            except Exception as error:
                if wait_s is None:
                    self._failure = error
                    return False
            except BaseException as error:  # a library that ends the process ends its own thread alone
                self._failure = MonitorError(f"{self.name}: {type(error).__name__}: {error}")
                return False
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns")
