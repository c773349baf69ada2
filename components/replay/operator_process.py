"""A process of the operator pool: groups come in, what the operators make of them goes out. See `operator_pool`.

Frames on one socket, each behind its length (8 bytes, little-endian). In: the settings as JSON, then groups
(`jobs.group_bytes`). Out, as JSON: {"ready"}, then for each group {"at": operator} as each begins, and at last
{"changed", "filtered_by", "reason", "has_group"}, with the group behind it if it was changed, or {"error", "trace"}.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def received(connection: socket.socket) -> bytes | None:
    """The next frame; None at the end."""
    length = _exactly(connection, LENGTH_BYTES)
    return None if length is None else _exactly(connection, int.from_bytes(length, "little"))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        part = connection.recv(min(count, 2**20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _read(connection: socket.socket, frames: queue.Queue[bytes]) -> None:
    """In a thread of its own: the process ends with the one that uses it, whatever an operator is doing."""
    try:
        while (frame := received(connection)) is not None:
            frames.put(frame)
    except OSError:
        pass
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends us
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(received(connection) or b"{}")
    frames: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(connection, frames), daemon=True).start()

    def say(**said: Any) -> None:
        send(connection, json.dumps(said).encode())

    sys.path[:] = settings["path"]
    from ..failures import printable
    from ..jobs.group_bytes import group_bytes, group_of
    from ..monitor.logs import log_to_file
    from .operators import Pipeline

    log_to_file(Path(settings["log_file"]), settings["log_level"])
    try:
        pipeline = Pipeline(settings["steps"])
    except Exception as error:
        say(error=" ".join(str(error).split()), trace=traceback.format_exc())
        return
    say(ready=True)
    while True:
        group = group_of(frames.get())
        try:
            applied = pipeline.apply(group, begins=lambda name: say(at=name))
        except Exception as error:
            say(error=printable(" ".join(str(error).split())), trace=printable(traceback.format_exc()))
            continue
        result = applied.result
        has_group = not isinstance(result, str) and result is not group
        reason = result if isinstance(result, str) else ""
        say(changed=applied.changed, filtered_by=applied.filtered_by, reason=reason, has_group=has_group)
        if not isinstance(result, str) and has_group:
            send(connection, group_bytes(result))


if __name__ == "__main__":
    main()
