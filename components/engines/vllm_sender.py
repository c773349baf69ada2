"""How requests of groups leave for vLLM's engine core: those of one turn of the event loop in one message.

A collector begins many groups at a time. vLLM sends each by itself, which takes a tenth of a millisecond here and wakes
two threads of the engine's process, both of which want Python's lock while it computes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from .vllm_core import ADD_GROUPS


class Sender:
    """Sends to the one engine core of `client`. `fail`: told of what could not be sent, or added there.

    Whatever else `client` sends leaves after the requests that wait, as if each had left at once.
    """

    def __init__(self, client: Any, fail: Callable[[Exception], None]) -> None:
        self._client = client
        self._fail = fail
        self._waiting: list[Any] = []
        self._send = client._send_input_message
        client._send_input_message = self._after_those_that_wait

    def add(self, request: Any) -> None:
        """It leaves before the event loop waits for anything."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._leave)
        request.client_index = self._client.client_index
        self._waiting.append(request)

    def _after_those_that_wait(self, message: Any, engine: Any) -> Awaitable[Any]:
        self._leave()
        return self._send(message, engine)

    def _leave(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        requests, self._waiting = self._waiting, []
        if not requests:
            return
        client = self._client
        try:
            if len(requests) == 1:
                message = (EngineCoreRequestType.ADD.value, *client.encoder.encode(requests[0]))
            else:
                call_id = uuid.uuid1().int >> 64
                added = client.utility_results[call_id] = asyncio.get_running_loop().create_future()
                added.add_done_callback(self._done)
                call = (client.client_index, call_id, ADD_GROUPS, (requests,))
                message = (EngineCoreRequestType.UTILITY.value, *client.encoder.encode(call))
            asyncio.ensure_future(self._send(message, client.core_engine)).add_done_callback(self._done)
            client._ensure_output_queue_task()
        except Exception as error:  # there is no caller: those who wait for the groups are told
            self._fail(error)

    def _done(self, call: asyncio.Future[Any]) -> None:
        if not call.cancelled() and isinstance(error := call.exception(), Exception):
            self._fail(error)
