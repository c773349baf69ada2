"""Parses requests of OpenAI's protocol: a field of the wrong type is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .server import Answer

Count = Annotated[int, Field(gt=0)]
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


class _Strict(BaseModel):
    """Types are not converted; keys that are not named are ignored, because every client sends some of its own."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _CalledFunction(_Strict):
    name: str
    arguments: str = ""


class _Call(_Strict):
    function: _CalledFunction


class ChatMessage(_Strict):
    role: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class _ToolFunction(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Strict):
    function: _ToolFunction


class _Request(BaseModel):
    """What both kinds of request have. Parameters that change the sampling are kept as they came: see below."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    stream: bool | None = None

    @property
    def longest(self) -> int | None:
        """How many tokens the client wants at most."""
        return self.max_completion_tokens or self.max_tokens

    def refuse_what_changes_sampling(self) -> None:
        """Raise ValueError for parameters whose tokens a trainer could not reproduce."""
        given = self.model_extra or {}
        for name, neutral in _NOT_REPRODUCIBLE.items():
            if given.get(name) not in (None, neutral):
                raise ValueError(
                    f"{name}: got {given[name]!s:.80}; tokens sampled that way cannot be trained on; leave it out"
                )


class ChatRequest(_Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None


Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]


class CompletionRequest(_Request):
    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=1, fail_fast=True)]

    @property
    def one_prompt(self) -> str | list[int]:
        """Text, or token ids. Clients may wrap one prompt in a list."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return self.prompt if isinstance(first, int) else first  # type: ignore[return-value]


def said(error: ValueError) -> str:
    """The error message for a client: the first problem, and where it is. Never all of them: there may be a million."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
    return f"{where or 'body'}: {first['msg']}"


def model_list(name: str) -> Answer:
    """The answer to GET /v1/models."""
    return Answer({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "leeway"}]})
