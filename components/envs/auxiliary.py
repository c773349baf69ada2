"""Clients for models other than the policy, over OpenAI's HTTP protocol, with deadlines, retries and a request limit.

What an environment or a reward sees:

    models["judge"].chat([{"role": "user", "content": "..."}])    -> text
    models["judge"].complete("...")                               -> text
    models["scorer"].classify("...")                              -> probabilities by class
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from ..config.inputs import AuxiliaryModel
from ..redaction import MASK, hide, redacted
from ..types import Message

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0
MAX_ANSWER_BYTES = 16 << 20
_WORTH_ANOTHER_TRY = {408, 409, 425, 429, 500, 502, 503, 504}


class AuxiliaryError(RuntimeError):
    """A model did not answer, or answered wrongly; the message names the model, its address and the reason."""


class AuxiliaryClient:
    """One of `env.models`. A request takes at most (retries + 1) x `timeout_s`, plus the waits in between."""

    def __init__(self, name: str, settings: AuxiliaryModel, *, where: str = "") -> None:
        """`where`: the setting it comes from, for errors (default: under `env.models`)."""
        assert settings.url is not None, "models with a path are given an address when they are served"
        self.name = name
        self._where = where or f"env.models.{name}"
        self._settings = settings
        parts = urlsplit(settings.url)
        host = parts.netloc.rpartition("@")[2]
        self._url = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        key = parts.password or (os.environ.get(settings.key_variable) if settings.key_variable else None)
        if key:
            hide({key: f"${{oc.env:{settings.key_variable}}}" if settings.key_variable else MASK})
        # A model served by the run or by this machine is local and must not go through a proxy.
        is_near = parts.password is not None or parts.hostname in ("localhost", "127.0.0.1", "::1")
        self._takes_proxies = not is_near
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._room = asyncio.Semaphore(settings.max_in_flight)
        self._model = settings.model
        self._finding_model = asyncio.Lock()

    async def chat(self, messages: Sequence[Message], **sampling: Any) -> str:
        """The answer to a conversation. `sampling` (temperature, max_tokens, ...) goes into the request."""
        answer = await self._ask("chat/completions", {"messages": list(messages), **sampling})
        return self._read(answer, lambda a: a["choices"][0]["message"]["content"] or "")

    async def complete(self, prompt: str, **sampling: Any) -> str:
        """The continuation of bare text."""
        return self._read(
            await self._ask("completions", {"prompt": prompt, **sampling}), lambda a: a["choices"][0]["text"]
        )

    async def choices(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of a response to exactly this request."""
        answer = await self._post(f"{self._url}/{path}", {"model": await self._known_as(), **body})
        return self._read(answer, lambda a: [dict(choice) for choice in a["choices"]])

    async def first_model(self) -> dict[str, Any]:
        """What the address says of the model that it serves, or of the first one."""
        return self._read(await self._post(f"{self._url}/models", None), lambda a: dict(a["data"][0]))

    async def classify(self, text: str) -> list[float]:
        """The scores that a sequence classifier gives a text, one per class."""
        model = await self._known_as()
        answer = await self._post(self._url.removesuffix("/v1") + "/classify", {"model": model, "input": text})
        return self._read(answer, lambda a: [float(p) for p in a["data"][0]["probs"]])

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        s = self._settings
        own = {"model": await self._known_as(), "temperature": s.temperature, "max_tokens": s.max_tokens}
        return await self._post(f"{self._url}/{path}", {**own, **body})

    async def _known_as(self) -> str:
        async with self._finding_model:
            if self._model is None:
                self._model = str((await self.first_model())["id"])
        return self._model

    async def _post(self, url: str, body: dict[str, Any] | None) -> Any:
        """The answer as JSON; GET where there is no body."""
        s, reason = self._settings, ""
        for attempt in range(s.retries + 1):
            if attempt:
                wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1))
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # many fail at once: spread out their retries
            try:
                async with self._room, asyncio.timeout(s.timeout_s):
                    status, answer = await self._request(url, body)
                if status < 300:
                    return json.loads(answer)
                reason = f"HTTP {status}: {answer[:300].decode(errors='replace')}"
                if status not in _WORTH_ANOTHER_TRY:
                    break
            except TimeoutError:
                reason = f"no answer within timeout_s = {s.timeout_s:g} s"
            except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
                cause = getattr(error, "os_error", error)
                reason = f"{type(cause).__name__}: {cause}"
        raise AuxiliaryError(redacted(f"{self._where} at {url}: {' '.join(reason.split())}"))

    async def _request(self, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """(status, answer). A redirect is an answer too: following it would send the key to wherever it points."""
        method = "GET" if body is None else "POST"
        async with (
            aiohttp.ClientSession(trust_env=self._takes_proxies, timeout=aiohttp.ClientTimeout(None)) as session,
            session.request(method, url, json=body, headers=self._headers, allow_redirects=False) as response,
        ):
            answer = bytearray()
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
            return response.status, bytes(answer)

    def _read(self, answer: Any, what: Any) -> Any:
        try:
            return what(answer)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise AuxiliaryError(
                f"{self._where} at {self._url}: got {json.dumps(answer)[:200]}, which is no answer of the "
                f"protocol ({type(error).__name__}: {error})"
            ) from None


def build_models(models: Mapping[str, AuxiliaryModel]) -> dict[str, AuxiliaryClient]:
    """Clients by name. A model of the run's own that is not served yet has no address, and no client."""
    return {name: AuxiliaryClient(name, model) for name, model in models.items() if model.url is not None}
