"""TensorBoard event files under <run_dir>/tensorboard (monitor.tensorboard=true); needs no torch and no TensorFlow."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .sink import Record, Sink


class TensorboardSink(Sink):
    """One scalar per metric, at the record's step and time."""

    name = "tensorboard"

    def __init__(self, log_dir: Path) -> None:
        self._writer = EventFileWriter(str(log_dir), flush_secs=10)

    def log(self, record: Record) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in record.metrics.items()]
        self._writer.add_event(Event(wall_time=record.time, step=record.step, summary=Summary(value=values)))

    def close(self, status: str) -> None:
        self._writer.close()
