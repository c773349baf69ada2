"""How requests of groups leave for vLLM's engine core: those of one turn of the event loop in one message.

A collector begins many groups at a time. vLLM sends each by itself, which takes a tenth of a millisecond here and wakes
two threads of the engine's process, both of which want Python's lock while it computes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .vllm_core import ADD_GROUPS


class Sender:
    """Sends to the one engine core of `client`. `fail(error, ids)`: told of requests that could not be sent or were
    not added there.

    Whatever else `client` sends leaves after the requests that wait, as if each had left at once.
    """

    def __init__(self, client: Any, fail: Callable[[Exception, Sequence[str]], None]) -> None:
        self._client = client
        self._fail = fail
        self._waiting: list[tuple[str, Sequence[Any]]] = []  # ids, and frames
        self._send = client._send_input_message
        client._send_input_message = self._after_those_that_wait

    def add(self, request: Any) -> None:
        """It leaves before the event loop waits for anything. Raises where it cannot be encoded."""
        request.client_index = self._client.client_index
        frames = self._client.encoder.encode(request)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._leave)
        self._waiting.append((request.request_id, frames))

    def _after_those_that_wait(self, message: Any, engine: Any) -> Awaitable[Any]:
        self._leave()
        return self._send(message, engine)

    def _leave(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        requests, self._waiting = self._waiting, []
        if not requests:
            return
        client, ids = self._client, [name for name, _ in requests]
        try:
            if len(requests) == 1 or any(len(frames) > 1 for _, frames in requests):
                kind = EngineCoreRequestType.ADD.value
                messages = [(kind, *frames) for _, frames in requests]
            else:
                call_id = uuid.uuid1().int >> 64
                client.utility_results[call_id] = self._watched(asyncio.get_running_loop().create_future(), ids)
                call = (client.client_index, call_id, ADD_GROUPS, ([bytes(own) for _, (own,) in requests],))
                messages = [(EngineCoreRequestType.UTILITY.value, *client.encoder.encode(call))]
            for message in messages:
                self._watched(asyncio.ensure_future(self._send(message, client.core_engine)), ids)
            client._ensure_output_queue_task()
        except Exception as error:  # there is no caller: those who wait for the groups are told
            self._fail(error, ids)

    def _watched(self, call: asyncio.Future[Any], ids: Sequence[str]) -> asyncio.Future[Any]:
        def done(call: asyncio.Future[Any]) -> None:
            if call.cancelled():
                return
            if isinstance(error := call.exception(), Exception):
                self._fail(error, ids)
            elif error is None and isinstance(refused := call.result(), list):  # of `ADD_GROUPS`
                for place, why in refused:
                    self._fail(RuntimeError(f"vLLM did not add the request: {why}"), [ids[int(place)]])

        call.add_done_callback(done)
        return call
