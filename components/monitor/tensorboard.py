"""TensorBoard event files under <run_dir>/tensorboard (monitor.tensorboard=true); needs no torch and no TensorFlow."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .sink import Record, Sink


class TensorboardSink(Sink):
    """One scalar per metric, at the record's step and time.

    `resumed_at`: TensorBoard shows nothing that an earlier part of the run logged beyond this step.
    """

    name = "tensorboard"

    def __init__(self, log_dir: Path, *, resumed_at: int | None = None) -> None:
        self._writer = EventFileWriter(str(log_dir), flush_secs=10)
        if resumed_at is not None:
            begun = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_at + 1, session_log=begun))

    def log(self, record: Record) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in record.metrics.items()]
        self._writer.add_event(Event(wall_time=record.time, step=record.step, summary=Summary(value=values)))

    def close(self, status: str) -> None:
        self._writer.close()
