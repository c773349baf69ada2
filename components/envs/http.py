"""A small HTTP server on loopback, for one kind of client: JSON in, JSON or server-sent events out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

MAX_HEAD_BYTES, MAX_BODY_BYTES = 2**16, 2**24
MAX_WAITING = 4096
"""Connections not yet accepted: hundreds of agents begin at the same moment; the usual 100 makes clients time out."""
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Too Large", 500: "Server Error"}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """`events`: sent as a stream of server-sent events instead of `body`."""

    body: Any
    status: int = 200
    events: list[Any] | None = None


Handler = Callable[[Request], Awaitable[Answer]]


async def serve(handler: Handler, host: str = "127.0.0.1") -> asyncio.Server:
    """Listen on a free port of `host`; connections are kept open between requests."""
    return await asyncio.start_server(
        lambda r, w: _connection(handler, r, w), host, 0, limit=MAX_HEAD_BYTES, backlog=MAX_WAITING
    )


def refusal(status: int, message: str, code: str = "invalid_request_error") -> Answer:
    """An error as OpenAI's clients read it."""
    return Answer({"error": {"message": message, "type": code, "code": code}}, status)


async def _connection(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while (request := await _read(reader)) is not None:
            answer = request if isinstance(request, Answer) else await handler(request)
            _write(writer, answer)
            await writer.drain()
            if isinstance(request, Answer):  # what could not be read leaves the stream at an unknown place
                return
    except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        pass  # the client has gone, or the server ends: nobody is left to answer
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Request | Answer | None:
    """The next request; None at the end of the connection; an Answer that refuses it."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        return refusal(413, "the head of the request is too large")
    first, *lines = head.split("\r\n")
    parts = first.split(" ")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    length = headers.get("content-length", "0")
    if len(parts) != 3 or not length.isdigit() or "transfer-encoding" in headers:
        return refusal(400, "expected an HTTP/1.1 request with a content-length")
    if int(length) > MAX_BODY_BYTES:
        return refusal(413, f"expected at most {MAX_BODY_BYTES} bytes")
    raw = await reader.readexactly(int(length))
    try:
        body = json.loads(raw) if raw else None
    except ValueError:
        return refusal(400, "the body is not JSON")
    return Request(parts[0], parts[1].partition("?")[0], headers, body)


def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    if answer.events is None:
        body, kind = json.dumps(answer.body).encode(), "application/json"
    else:
        lines = [*(json.dumps(event) for event in answer.events), "[DONE]"]
        body, kind = "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream"
    status = f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Error')}"
    writer.write(f"{status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
