"""A server of JSON on loopback for clients that hold a key: one listening socket, as many keys as there are rollouts.

    connection -> head -> key -> route -> size -> body -> handler -> answer

Whoever can connect may be hostile. So nothing of a request is kept until its key has been verified, everything is
bounded in size, time and number, and one key's requests cannot starve another's. The HTTP is aiohttp's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Connections not yet accepted: hundreds of agents begin at the same moment; the usual 100 makes clients time out."""
IDLE_S = 60.0
"""How long a connection may send no complete head of a request. Clients close idle connections after 5 to 15 s."""
BODY_S = 30.0
"""How long a body may take, including the wait for other bodies of the same key."""
WRITE_S = 30.0
"""How long a client may take to read its answer."""
SMALL = 2**15
"""Bytes of an answer that the system takes at once, so that nothing waits for the client."""
LINGER_S = 1.0
"""How long the rest of a refused body is read and dropped, so that the client sees the refusal, not a reset."""
MAX_HEAD = {"max_line_size": 4096, "max_field_size": 4096, "max_headers": 64}
MAX_BODIES, MAX_REQUESTS = 4, 256
"""Of one key: bodies read at a time, requests at a time."""


def body_room(max_model_len: int) -> int:
    """Bytes that a body may have, for a model of so many tokens: text that fits into it, escaped, and its tools."""
    return 2**20 + 64 * max_model_len


_JSON, _EVENTS = ({"Content-Type": f"{kind}; charset=utf-8"} for kind in ("application/json", "text/event-stream"))


@dataclass(frozen=True)
class Answer:
    """`body`: JSON values, or bytes that are JSON. `events`: sent as a stream of server-sent events instead of it; a
    generator's one by one, as they come.
    """

    body: Any
    status: int = 200
    events: list[Any] | AsyncGenerator[Any] | None = None


class Refusal(Exception):
    """A request that is answered with an error, in the form that OpenAI's clients read."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


Handler = Callable[[Any], Awaitable[Answer]]
"""Answers the body of a request: JSON values, None where there is no body."""


@dataclass(eq=False)
class Session:
    """What one key opens. `routes`: (method, path) -> handler."""

    key: str
    routes: Mapping[tuple[str, str], Handler]
    max_body_bytes: int
    max_requests: int
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_BODIES))


class Server:
    """One listening socket. `open` gives a key, `close` ends what is being answered to it; other keys are refused.

    A client that disconnects ends its own requests. `stop` ends all. `public`: paths that anybody may GET.
    """

    def __init__(self, public: Mapping[str, Callable[[], Answer]] | None = None) -> None:
        self._public = public or {}
        self._sessions: dict[bytes, Session] = {}
        self._http: _Connections | None = None
        self._listening: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on a port of `host` (0: a free one), until `stop` or until the tasks of the event loop are cancelled.

        Raises OSError where that is not possible.
        """
        async with self._starting:
            if self._listening is None:
                self._http = _Connections(self._answer)
                loop = asyncio.get_running_loop()
                self._listening = await loop.create_server(self._http, host, port, backlog=MAX_WAITING)
                self._serving = asyncio.create_task(self._until_cancelled(), name="leeway-server")

    @property
    def address(self) -> str:
        """host:port."""
        assert self._listening is not None, "start() was not called"
        host, port, *_ = self._listening.sockets[0].getsockname()
        return f"{host}:{port}"

    def open(
        self,
        routes: Mapping[tuple[str, str], Handler],
        *,
        max_body_bytes: int,
        key: str | None = None,
        max_requests: int | None = None,
    ) -> Session:
        """`key`: None: a new one. `max_requests`: of it at a time (None: `MAX_REQUESTS`)."""
        key = key or f"{secrets.token_hex(8)}.{secrets.token_hex(24)}"
        session = Session(key, routes, max_body_bytes, max_requests or MAX_REQUESTS)
        self._sessions[_digest(session.key)] = session
        return session

    def close(self, session: Session) -> None:
        del self._sessions[_digest(session.key)]
        for task in session.requests:
            task.cancel()

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._listening is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])

    async def _until_cancelled(self) -> None:
        assert self._listening is not None
        assert self._http is not None
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            _OF_LOOP.pop(asyncio.get_running_loop(), None)
            self._listening.close()
            for session in [*self._sessions.values()]:  # aiohttp waits for those that are being answered
                self.close(session)
            await self._http.shutdown(0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and (answer := self._public.get(request.path)) is not None:
            return _written(answer())
        # Found by its digest: how long that takes says nothing about the keys that there are.
        session = self._sessions.get(_digest(request.headers.get("authorization", "").removeprefix("Bearer ")))
        if session is None:
            return _refused(Refusal(401, "expected `authorization: Bearer KEY` with a valid key", "invalid_api_key"))
        task = asyncio.current_task()
        assert task is not None
        if len(session.requests) >= session.max_requests:
            few = f"expected at most {session.max_requests} requests at a time"
            return _refused(Refusal(429, few, "rate_limit_exceeded"))
        session.requests.add(task)
        try:
            handler = _route(request, session)
            answer = await handler(await _body(request, session))
            if answer.events is None or isinstance(answer.events, list):
                return _written(answer)
            return await _streamed(request, answer.events)
        except Refusal as refusal:
            return _refused(refusal)
        except RecursionError:
            return _refused(Refusal(400, "the body is nested too deeply"))
        except Exception as error:
            logger.warning("%s %s failed", request.method, request.path, exc_info=True)
            return _refused(Refusal(500, f"{type(error).__name__}: {error}", "server_error"))
        finally:
            session.requests.discard(task)


_OF_LOOP: dict[asyncio.AbstractEventLoop, Server] = {}


async def shared_server() -> Server:
    """The server of this event loop, shared by all environments of a process. It stops with the loop's tasks."""
    server = _OF_LOOP.setdefault(asyncio.get_running_loop(), Server())
    await server.start()
    return server


class _Connections(web.Server):
    """aiohttp's server, with a limit on connections: each takes a file descriptor, and the process needs those too.

    When all are taken, a new connection takes the place of the one that has been idle for longest.
    """

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        limits: dict[str, Any] = {**MAX_HEAD, "keepalive_timeout": IDLE_S, "lingering_time": LINGER_S}
        # Compressed bodies are refused, so they are not expanded either. A client hears what it sent wrong, the log
        # does not: it would grow by a traceback for each.
        quiet = logging.getLogger(f"{__name__}.http")
        quiet.setLevel(logging.CRITICAL)
        super().__init__(
            self._answer, handler_cancellation=True, auto_decompress=False, access_log=None, logger=quiet, **limits
        )
        self._inner = handler
        self._idle: dict[RequestHandler, asyncio.Transport] = {}  # the longest idle first
        self._num_open = 0
        self._max_open = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._num_open += 1
        self._idle[handler] = transport
        if self._num_open > self._max_open:
            self._idle.pop(next(iter(self._idle))).abort()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._num_open -= 1
        self._idle.pop(handler, None)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection, transport = request.protocol, self._idle.pop(request.protocol, None)
        try:
            response = await self._inner(request)
            if transport is None or transport.get_write_buffer_size() or (response.content_length or 0) > SMALL:
                async with asyncio.timeout(WRITE_S):  # a client that does not read must not keep its answer here
                    await response.prepare(request)
                    await response.write_eof()
            return response
        finally:
            if transport is not None and not transport.is_closing():
                self._idle[connection] = transport


def _route(request: web.BaseRequest, session: Session) -> Handler:
    handler = session.routes.get((request.method, request.path))
    if handler is None:
        served = ", ".join(f"{method} {path}" for method, path in session.routes)
        known = any(path == request.path for _, path in session.routes)
        raise Refusal(405 if known else 404, f"{request.method} {request.path[:200]}: expected one of {served}")
    return handler


async def _body(request: web.BaseRequest, session: Session) -> Any:
    """The body as JSON values; None for an empty one. Raises `Refusal`."""
    if not request.body_exists:
        return None
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "content-encoding: expected a body that is not compressed")
    limit = session.max_body_bytes
    if (request.content_length or 0) > limit:
        raise Refusal(413, f"a body of {request.content_length} bytes; expected at most {limit}")
    if request.content.is_eof():  # it came with the head: nothing to wait for, and no more than a buffer
        raw = request.content.read_nowait()
        return _parsed(raw) if raw else None
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S), session.bodies:
            while chunk := await request.content.readany():
                raw += chunk
                if len(raw) > limit:
                    raise Refusal(413, f"expected a body of at most {limit} bytes")
            return _parsed(raw) if raw else None
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_S:g} s") from None


def _parsed(raw: bytes | bytearray) -> Any:
    try:
        body = _DECODER.decode(raw.decode())
        if rb"\ud" in raw or rb"\uD" in raw:  # halves of characters, which no tokenizer takes
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except UnicodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _refused(refusal: Refusal) -> web.Response:
    return _written(Answer(_error(refusal), refusal.status))


def _error(refusal: Refusal) -> dict[str, Any]:
    return {"error": {"message": str(refusal), "type": refusal.code, "code": refusal.code}}


async def _streamed(request: web.BaseRequest, events: AsyncGenerator[Any]) -> web.StreamResponse:
    """Each event when it is there. What fails before the first one is refused as any request is; later, in an event.

    A client that does not read is cut off, and with it what makes the events.
    """
    response = web.StreamResponse(headers=_EVENTS)
    try:
        first = await anext(events)
        try:
            await _sent(response.prepare(request))
            await _sent(response.write(_event(first)))
            try:
                async for event in events:
                    await _sent(response.write(_event(event)))
            except _NotRead:
                raise
            except Refusal as refusal:
                await _sent(response.write(_event(_error(refusal))))
            except Exception as error:  # a second head would be taken for a part of the first body
                logger.warning("%s %s failed", request.method, request.path, exc_info=True)
                failed = Refusal(500, f"{type(error).__name__}: {error}", "server_error")
                await _sent(response.write(_event(_error(failed))))
            await _sent(response.write_eof(b"data: [DONE]\n\n"))
        except _NotRead:
            if request.transport is not None:
                request.transport.abort()
    finally:
        await events.aclose()
    return response


class _NotRead(Exception):
    """The client does not take what it asked for."""


async def _sent(writing: Awaitable[Any]) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await writing
    except TimeoutError:
        raise _NotRead from None


def _event(event: Any) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


def _written(answer: Answer) -> web.Response:
    if answer.events is None:
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        return web.Response(body=body, status=answer.status, headers=_JSON)
    assert isinstance(answer.events, list), "streamed"
    body = b"".join(map(_event, answer.events)) + b"data: [DONE]\n\n"
    return web.Response(body=body, status=answer.status, headers=_EVENTS)
