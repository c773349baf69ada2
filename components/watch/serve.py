"""Starts the page's server in this process, at the lowest priority, and ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from ..config.errors import ConfigError
from .folder import RunFolder
from .server import build_app
from .watcher import Watcher, default_cache

PARENT_ENV = "LEEWAY_WATCH_PARENT"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
LOOK_S = 1.0
SWITCH_S = 0.0005
"""How long the thread that reads files may keep one that answers a page waiting, a tenth of Python's own: an answer
changes threads dozens of times.
"""


def watch(runs: Sequence[Path], *, host: str, port: int, open_to_all: bool, must_exist: bool = True) -> None:
    """Serve until it is interrupted, or the process that `LEEWAY_WATCH_PARENT` names has ended.

    `open_to_all`: without a token. Raises ConfigError for what cannot be served.
    """
    for run in runs:
        if must_exist and not run.is_dir():
            raise ConfigError("RUN", got=str(run), expected="the folder of a run", fix="e.g. runs/leeway/quickstart")
    local = is_loopback(host)
    if open_to_all and not local:
        fix = "leave out --no-token: everybody who reaches this machine could read the run"
        raise ConfigError("--host", got=host, expected="127.0.0.1 with --no-token", fix=fix)
    lowest_priority()
    sys.setswitchinterval(SWITCH_S)
    token = None if open_to_all else secrets.token_urlsafe(24)
    listening = listening_at(host, port)
    port = listening.getsockname()[1]
    watcher = Watcher(_named(runs), default_cache())
    watcher.start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        hosts = LOOPBACK | {f"[{host}]" if ":" in host else host.lower()} if local else None
        app = build_app(watcher, token=token, hosts=hosts, cookie=f"leeway_watch_{port}")
        shown_host = f"[{host}]" if ":" in host else host
        print(f"leeway: watch: http://{shown_host}:{port}/{f'?token={token}' if token else ''}", flush=True)
        asyncio.run(serve_app(app, listening, at_stop=app.state.end))
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
        watcher.close()


def lowest_priority() -> None:
    """Take whatever is left over by the run. A session of its own is lowered as a whole, where Linux has autogroups."""
    os.nice(19)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # there are none
            Path("/proc/self/autogroup").write_text("19", encoding="ascii")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:
        """None: it would raise them again when it has stopped, in a task that nobody asks."""
        return nullcontext()


async def serve_app(
    app: object, listening: socket.socket, *, at_stop: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> None:
    """Until SIGINT, SIGTERM, or the end of the process that `LEEWAY_WATCH_PARENT` names. `at_stop`: ends what would not
    end by itself; the server waits for its answers.
    """
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)

    stopping: list[asyncio.Task[None]] = []

    def stop() -> None:
        server.should_exit = True
        if at_stop is not None and not stopping:
            stopping.append(asyncio.create_task(at_stop()))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    parent = os.environ.get(PARENT_ENV, "")
    while not serving.done():
        await asyncio.wait({serving}, timeout=LOOK_S)
        if parent.isdigit() and not psutil.pid_exists(int(parent)):
            stop()
    await serving


def listening_at(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # who opens the address at once waits, and is not refused
    except (OSError, OverflowError) as error:
        got = f"{host} port {port} ({error})"
        raise ConfigError("--port", got=got, expected="an address that is free here", fix="leave it out") from None
    return listening


def _named(runs: Sequence[Path]) -> list[RunFolder]:
    """Each by the last part of its path; by two where that would be ambiguous."""
    names = [run.absolute().name for run in runs]
    return [
        RunFolder(run, name if names.count(name) == 1 else f"{run.absolute().parent.name}/{name}")
        for run, name in zip(runs, names, strict=True)
    ]
