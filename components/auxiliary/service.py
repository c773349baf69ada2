"""What a served model answers: the part of OpenAI's protocol that `envs.auxiliary` speaks, and `/classify`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from ..collector.engine import Generates, SampledTokens
from ..envs.openai_requests import ChatRequest, CompletionRequest, model_list, said
from ..envs.server import Answer, Handler, Refusal


class Classifies(Protocol):
    """See `classifier.Classifier`."""

    async def classify(self, text: str) -> list[float]: ...


class LeastLoaded:
    """Several copies of a model: each request goes to one of those that work on the fewest."""

    def __init__(self, copies: Sequence[Any]) -> None:
        self._copies = copies
        self._num_requests = [0] * len(copies)

    async def generate(self, prompt_tokens: Sequence[int], **sampling: Any) -> list[SampledTokens]:
        return await self._ask("generate", prompt_tokens, **sampling)

    async def classify(self, text: str) -> list[float]:
        return await self._ask("classify", text)

    async def _ask(self, verb: str, *args: Any, **more: Any) -> Any:
        copy = self._num_requests.index(min(self._num_requests))
        self._num_requests[copy] += 1
        try:
            return await getattr(self._copies[copy], verb)(*args, **more)
        finally:
            self._num_requests[copy] -= 1


class ClassifyRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    input: str


class TopP(BaseModel):
    """Unlike the policy, a judge may be sampled with a nucleus."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Service:
    """Its `routes` are served by `envs.server`.

    `prompter` and `max_model_len` belong to an `engine`; a service has an
    engine or a `classifier`.
    """

    def __init__(
        self,
        *,
        model: str,
        engine: Generates | None = None,
        prompter: Any = None,
        max_model_len: int = 0,
        classifier: Classifies | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._prompter = prompter
        self._max_model_len = max_model_len
        self._classifier = classifier

    def routes(self) -> dict[tuple[str, str], Handler]:
        routes: dict[tuple[str, str], Handler] = {("GET", "/v1/models"): self._models}
        if self._classifier is not None:
            routes["POST", "/classify"] = _refusing(self._classify)
        if self._engine is not None:
            routes["POST", "/v1/chat/completions"] = _refusing(self._chat)
            routes["POST", "/v1/completions"] = _refusing(self._complete)
        return routes

    async def _models(self, body: Any) -> Answer:
        return model_list(self._model)

    async def _classify(self, body: Any) -> Answer:
        assert self._classifier is not None
        probs = await self._classifier.classify(ClassifyRequest.model_validate(body).input)
        return Answer({"model": self._model, "data": [{"index": 0, "probs": probs}]})

    async def _chat(self, body: Any) -> Answer:
        asked = ChatRequest.model_validate(body)
        tokens = self._prompter.encode([{"role": m.role, "content": m.text} for m in asked.messages])
        text, reason, usage = await self._generated(tokens, asked, body)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        return Answer({"object": "chat.completion", "model": self._model, "choices": [choice], "usage": usage})

    async def _complete(self, body: Any) -> Answer:
        asked = CompletionRequest.model_validate(body)
        prompt = asked.one_prompt
        tokens = self._prompter.encode_text(prompt) if isinstance(prompt, str) else prompt
        text, reason, usage = await self._generated(tokens, asked, body)
        choice = {"index": 0, "text": text, "finish_reason": reason}
        return Answer({"object": "text_completion", "model": self._model, "choices": [choice], "usage": usage})

    async def _generated(
        self, prompt: list[int], asked: ChatRequest | CompletionRequest, body: Any
    ) -> tuple[str, str, dict[str, int]]:
        """(text, finish reason, usage)."""
        assert self._engine is not None
        room = self._max_model_len - len(prompt)
        if room < 1:
            raise ValueError(f"prompt of {len(prompt)} tokens; max_model_len is {self._max_model_len}")
        (sampled,) = await self._engine.generate(
            prompt,
            n=1,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=TopP.model_validate(body).top_p,
            max_tokens=min(asked.longest or room, room),
            stop_token_ids=self._prompter.stop_token_ids,
        )
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled.tokens)}
        usage["total_tokens"] = sum(usage.values())
        return self._prompter.decode(sampled.tokens), sampled.finish_reason, usage


def _refusing(answer: Callable[[Any], Awaitable[Answer]]) -> Handler:
    """`answer`, which raises ValueError for a request that it cannot read."""

    async def handle(body: Any) -> Answer:
        try:
            return await answer(body)
        except ValueError as error:
            raise Refusal(400, said(error)) from None

    return handle
