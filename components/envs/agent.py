"""Agents that only speak OpenAI's protocol: an endpoint on loopback serves them the policy and records the tokens."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..types import Task, Trajectory
from .base import Environment, Policy, all_or_none
from .openai_requests import ChatRequest, CompletionRequest, model_list, said
from .recorder import ChatTurn, NoRoom, Recorder
from .server import Answer, Handler, Refusal, Server, body_room, shared_server
from .tools import describe_schemas

MODEL = "policy"
MAX_THREADS = 512


@dataclass(frozen=True)
class Endpoint:
    """What a client needs: `OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)`, `model=endpoint.model`."""

    base_url: str
    api_key: str
    model: str = MODEL


class AgentEnvironment(Environment):
    """Subclass it and write `run`: your agent, which calls the model through any OpenAI client.

    Each of the G trajectories of a group is one call of `run` with its own endpoint key. Several requests that continue
    a conversation become one trajectory, token by token as sampled. If there are several conversations, all are trained
    on with the same reward ("env/conversations" counts them); with `longest_only`, only the one in which the policy
    wrote the most. The sampling temperature is the run's, whatever a request says. The endpoint listens on 127.0.0.1
    and refuses requests without its key.
    """

    longest_only: bool = False

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        # A client's work before and after each request takes milliseconds of this loop. With hundreds at once, the loop
        # would be blocked for longer than clients wait for a connection (5 s), and would not serve the engine's tokens.
        self._yield = FairYield()
        # Agents wait most of the time, and asyncio's own pool has only a few threads per core.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="leeway-agent")

    @abstractmethod
    def run(self, task: Task, endpoint: Endpoint) -> Any:
        """Do the task; return the reward, or (reward, {name: number}). `async def`, or `def` (run in a thread)."""

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        server = await shared_server()
        return await all_or_none(self._one(task, policy.conversation(i), server) for i in range(policy.group_size))

    async def _one(self, task: Task, policy: Policy, server: Server) -> Trajectory:
        recorder = Recorder(policy)
        session = server.open(self._routes(recorder), max_body_bytes=body_room(policy.max_model_len))
        try:
            await self._yield.wait_turn()
            endpoint = Endpoint(f"http://{server.address}/v1", session.key)
            if inspect.iscoroutinefunction(self.run):
                result = await self.run(task, endpoint)
            else:
                result = await asyncio.get_running_loop().run_in_executor(self._threads, self.run, task, endpoint)
        finally:
            # A thread cannot be cancelled, but from here on its requests are refused.
            server.close(session)
        reward, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if isinstance(reward, bool | int | float) and isinstance(metrics, dict):
            numbers = {k: float(v) for k, v in metrics.items()}
            return recorder.trajectory(reward=float(reward), metrics=numbers, longest_only=self.longest_only)
        code = inspect.unwrap(type(self).run).__code__
        raise TypeError(
            f"{type(self).__name__}.run ({code.co_filename}:{code.co_firstlineno}) returned {result!r:.80}; "
            "expected the reward, or (reward, {name: number})"
        )

    def _routes(self, recorder: Recorder) -> dict[tuple[str, str], Handler]:
        def served(answer: Callable[[Any, Recorder], Awaitable[Answer]]) -> Handler:
            async def handle(body: Any) -> Answer:
                try:
                    answered = await answer(body, recorder)
                except NoRoom as error:
                    raise Refusal(400, str(error), "context_length_exceeded") from None
                except ValueError as error:
                    raise Refusal(400, said(error)) from None
                await self._yield.wait_turn()
                return answered

            return handle

        return {
            ("POST", "/v1/chat/completions"): served(_chat),
            ("POST", "/v1/completions"): served(_complete),
            ("GET", "/v1/models"): _models,
        }


async def _models(body: Any) -> Answer:
    return model_list(MODEL)


async def _chat(body: Any, recorder: Recorder) -> Answer:
    chat = ChatRequest.model_validate(body)
    chat.refuse_what_changes_sampling()
    tools = [tool["function"] for tool in body.get("tools") or []]  # as they came, with keys that only the model reads
    turn = await recorder.chat(
        body["messages"], tools_text=describe_schemas(tools) if tools else None, max_tokens=chat.longest
    )
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message["tool_calls"] = turn.calls
    delta: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(turn.calls)]
    if chat.stream:
        return _stream("chat.completion.chunk", {"delta": delta}, {"delta": {}}, turn)
    return _whole("chat.completion", {"message": message}, turn)


async def _complete(body: Any, recorder: Recorder) -> Answer:
    asked = CompletionRequest.model_validate(body)
    asked.refuse_what_changes_sampling()
    turn = await recorder.complete(asked.one_prompt, max_tokens=asked.longest)
    if asked.stream:
        return _stream("text_completion", {"text": turn.text}, {"text": ""}, turn)
    return _whole("text_completion", {"text": turn.text, "token_ids": turn.completion.tokens}, turn)


def _whole(kind: str, content: dict[str, Any], turn: ChatTurn) -> Answer:
    choice = {"index": 0, **content, "finish_reason": _finish_reason(turn), "logprobs": None}
    return Answer({**_head(kind), "choices": [choice], "usage": _usage(turn)})


def _stream(kind: str, content: dict[str, Any], nothing: dict[str, Any], turn: ChatTurn) -> Answer:
    """One event with the whole turn, one with its end: tokens are recorded per request, not per event."""
    head = _head(kind)
    events = [
        {**head, "choices": [{"index": 0, **part, "finish_reason": reason}]}
        for part, reason in ((content, None), (nothing, _finish_reason(turn)))
    ]
    return Answer(None, events=[*events, {**head, "choices": [], "usage": _usage(turn)}])


def _head(kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{secrets.token_hex(8)}", "object": kind, "created": 0, "model": MODEL}


def _finish_reason(turn: ChatTurn) -> str:
    return "tool_calls" if turn.calls else "length" if turn.completion.finish_reason == "length" else "stop"


def _usage(turn: ChatTurn) -> dict[str, int]:
    sampled = len(turn.completion.tokens)
    total = turn.num_prompt_tokens + sampled
    return {"prompt_tokens": turn.num_prompt_tokens, "completion_tokens": sampled, "total_tokens": total}


class FairYield:
    """Releases coroutines one at a time: when hundreds become ready together, other work runs in between.

    `await wait_turn()`: in the order of asking, one for each turn of the event loop. Whoever has its turn runs until it
    first waits. So a loop whose work comes in bursts stays as responsive as the longest single piece of work.
    """

    def __init__(self) -> None:
        self._next = asyncio.Lock()  # fair: first come, first served

    async def wait_turn(self) -> None:
        async with self._next:
            await asyncio.sleep(0)
