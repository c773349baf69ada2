"""Agents that only speak OpenAI's protocol: an endpoint on loopback serves them the policy and records the tokens."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..types import Task, Trajectory
from .base import Environment, Policy, all_or_none
from .http import Answer, Request, refusal, serve
from .recorder import NoRoom, Recorder, Turn
from .tools import describe_schemas
from .turnstile import Turnstile

MODEL = "policy"
MAX_THREADS = 512
_NOT_REPRODUCIBLE = {
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "stop": None,
    "n": 1,
    "best_of": 1,
    "suffix": None,
    "echo": False,
}
"""Parameters that a trainer could not reproduce token by token (or that are not served), with their neutral values."""


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
        self._token = secrets.token_hex(16)
        self._recorders: dict[str, Recorder] = {}
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        # A client's work before and after each request takes milliseconds of this loop. With hundreds at once, the loop
        # would be blocked for longer than clients wait for a connection (5 s), and would not serve the engine's tokens.
        self._turnstile = Turnstile()
        # Agents wait most of the time, and asyncio's own pool has only a few threads per core.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="leeway-agent")

    @abstractmethod
    def run(self, task: Task, endpoint: Endpoint) -> Any:
        """Do the task; return the reward, or (reward, {name: number}). `async def`, or `def` (run in a thread)."""

    async def rollout(self, task: Task, policy: Policy) -> list[Trajectory]:
        async with self._starting:
            if self._server is None or not self._server.is_serving():
                self._server = await serve(self._answer)
        port = self._server.sockets[0].getsockname()[1]
        return await all_or_none(
            self._one(task, policy.conversation(i), f"http://127.0.0.1:{port}/v1") for i in range(policy.group_size)
        )

    async def _one(self, task: Task, policy: Policy, base_url: str) -> Trajectory:
        session = secrets.token_hex(8)
        recorder = self._recorders[session] = Recorder(policy)
        try:
            await self._turnstile.through()
            endpoint = Endpoint(base_url, f"{self._token}.{session}")
            if inspect.iscoroutinefunction(self.run):
                result = await self.run(task, endpoint)
            else:
                result = await asyncio.get_running_loop().run_in_executor(self._threads, self.run, task, endpoint)
        finally:
            # A thread cannot be cancelled, but from here on its requests are refused.
            del self._recorders[session]
        reward, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if isinstance(reward, bool | int | float) and isinstance(metrics, dict):
            numbers = {k: float(v) for k, v in metrics.items()}
            return recorder.trajectory(reward=float(reward), metrics=numbers, longest_only=self.longest_only)
        code = inspect.unwrap(type(self).run).__code__
        raise TypeError(
            f"{type(self).__name__}.run ({code.co_filename}:{code.co_firstlineno}) returned {result!r:.80}; "
            "expected the reward, or (reward, {name: number})"
        )

    async def _answer(self, request: Request) -> Answer:
        token, _, session = request.headers.get("authorization", "").removeprefix("Bearer ").partition(".")
        recorder = self._recorders.get(session)
        if recorder is None or not hmac.compare_digest(token, self._token):
            return refusal(401, "expected the key of a running rollout", "invalid_api_key")
        if (request.method, request.path) == ("GET", "/v1/models"):
            return Answer({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "leeway"}]})
        serves = _SERVED.get(request.path) if request.method == "POST" else None
        if serves is None:
            expected = f"POST {' or '.join(_SERVED)}, or GET /v1/models"
            return refusal(404, f"{request.method} {request.path}: expected {expected}")
        try:
            answer = await serves(request.body, recorder)
            await self._turnstile.through()
            return answer
        except NoRoom as error:
            return refusal(400, str(error), "context_length_exceeded")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return refusal(400, f"{type(error).__name__}: {error}")


async def _chat(body: Any, recorder: Recorder) -> Answer:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("expected an object with messages")
    _refuse_what_changes_sampling(body)
    tools = [tool["function"] for tool in body.get("tools") or []]
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    turn = await recorder.chat(
        body["messages"], tools_text=describe_schemas(tools) if tools else None, max_tokens=max_tokens
    )
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message["tool_calls"] = turn.calls
    delta: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(turn.calls)]
    if body.get("stream"):
        return _stream("chat.completion.chunk", {"delta": delta}, {"delta": {}}, turn)
    return _whole("chat.completion", {"message": message}, turn)


async def _complete(body: Any, recorder: Recorder) -> Answer:
    prompt = body.get("prompt") if isinstance(body, dict) else None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt or not (
        isinstance(prompt, str) or (isinstance(prompt, list) and all(type(t) is int for t in prompt))
    ):
        raise ValueError("expected an object with one prompt: text, or token ids")
    _refuse_what_changes_sampling(body)
    turn = await recorder.complete(prompt, max_tokens=body.get("max_tokens"))
    if body.get("stream"):
        return _stream("text_completion", {"text": turn.text}, {"text": ""}, turn)
    return _whole("text_completion", {"text": turn.text, "token_ids": turn.completion.tokens}, turn)


_SERVED = {"/v1/chat/completions": _chat, "/v1/completions": _complete}


def _refuse_what_changes_sampling(body: dict[str, Any]) -> None:
    for name, neutral in _NOT_REPRODUCIBLE.items():
        if body.get(name) not in (None, neutral):
            raise ValueError(f"{name}: got {body[name]!r}; tokens sampled that way cannot be trained on; leave it out")


def _whole(kind: str, content: dict[str, Any], turn: Turn) -> Answer:
    choice = {"index": 0, **content, "finish_reason": _finish_reason(turn), "logprobs": None}
    return Answer({**_head(kind), "choices": [choice], "usage": _usage(turn)})


def _stream(kind: str, content: dict[str, Any], nothing: dict[str, Any], turn: Turn) -> Answer:
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


def _finish_reason(turn: Turn) -> str:
    return "tool_calls" if turn.calls else "length" if turn.completion.finish_reason == "length" else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    sampled = len(turn.completion.tokens)
    total = turn.num_prompt_tokens + sampled
    return {"prompt_tokens": turn.num_prompt_tokens, "completion_tokens": sampled, "total_tokens": total}
