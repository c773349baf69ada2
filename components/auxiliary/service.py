"""What a served model answers: the part of OpenAI's protocol that `envs.auxiliary` speaks, and `/classify`."""

from __future__ import annotations

import hmac
from typing import Any, Protocol

from ..collector.engine import Generates
from ..envs.http import Answer, Request, refusal


class Classifies(Protocol):
    """See `classifier.Classifier`."""

    async def classify(self, text: str) -> list[float]: ...


class Service:
    """A handler for `envs.http.serve`. It refuses requests without the run's key.

    `prompter` and `max_model_len` belong to an `engine`; a service has an
    engine or a `classifier`.
    """

    def __init__(
        self,
        *,
        key: str,
        model: str,
        engine: Generates | None = None,
        prompter: Any = None,
        max_model_len: int = 0,
        classifier: Classifies | None = None,
    ) -> None:
        self._key = key
        self._model = model
        self._engine = engine
        self._prompter = prompter
        self._max_model_len = max_model_len
        self._classifier = classifier

    async def answer(self, request: Request) -> Answer:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            return refusal(401, "expected the run's key", "invalid_api_key")
        try:
            return await self._answer(request.method, request.path, request.body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return refusal(400, f"{type(error).__name__}: {error}")

    async def _answer(self, method: str, path: str, body: Any) -> Answer:
        if (method, path) == ("GET", "/v1/models"):
            return Answer({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "leeway"}]})
        if (method, path) == ("POST", "/classify") and self._classifier is not None:
            return Answer({"model": self._model, "data": [{"index": 0, "probs": await self._classified(body)}]})
        if (method, path) == ("POST", "/v1/chat/completions") and self._engine is not None:
            text, reason, usage = await self._generated(self._prompter.encode(body["messages"]), body)
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
            return Answer({"object": "chat.completion", "model": self._model, "choices": [choice], "usage": usage})
        if (method, path) == ("POST", "/v1/completions") and self._engine is not None:
            text, reason, usage = await self._generated(self._prompter.encode_text(body["prompt"]), body)
            choice = {"index": 0, "text": text, "finish_reason": reason}
            return Answer({"object": "text_completion", "model": self._model, "choices": [choice], "usage": usage})
        return refusal(404, f"{method} {path}: a model of this kind does not serve it")

    async def _classified(self, body: Any) -> list[float]:
        assert self._classifier is not None
        if not isinstance(body["input"], str):
            raise ValueError("input: expected one text")
        return await self._classifier.classify(body["input"])

    async def _generated(self, prompt: list[int], body: Any) -> tuple[str, str, dict[str, int]]:
        """(text, finish reason, usage)."""
        assert self._engine is not None
        room = self._max_model_len - len(prompt)
        if room < 1:
            raise ValueError(f"prompt of {len(prompt)} tokens; max_model_len is {self._max_model_len}")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or room
        (sampled,) = await self._engine.generate(
            prompt,
            n=1,
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            max_tokens=min(int(wanted), room),
            stop_token_ids=self._prompter.stop_token_ids,
        )
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled.tokens)}
        usage["total_tokens"] = sum(usage.values())
        return self._prompter.decode(sampled.tokens), sampled.finish_reason, usage
