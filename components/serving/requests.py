"""What clients of a served address may ask: a field of the wrong type, or that is not served, is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

from ..config.engines import Temperature
from ..envs.openai_requests import ChatRequest, CompletionRequest

MAX_CHOICES = 128
_NEUTRAL: dict[str, Any] = {
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "best_of": 1,
    "suffix": None,
    "echo": False,
    "min_p": 0,
    "top_k": -1,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
"""Parameters that are not served, with the values that change nothing."""
_NO_MATTER = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
}
"""Parameters that change no answer."""
MOST_REWARD = 1e6
"""The trainer squares rewards, in float32."""

StopText = Annotated[str, Field(min_length=1, max_length=256)]
Name = Annotated[str, Field(pattern=r"^[\w\-./: ]{1,120}$")]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


class Sampling(BaseModel):
    """What both kinds of request may have beside what agents' requests have."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[NonNegativeInt], Field(max_length=64, fail_fast=True)] | None = None
    logprobs: bool | Literal[0, 1] | None = None
    return_token_ids: bool = False
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_logprobs(self) -> bool:
        """OpenAI's completions write logprobs=0 for those of the sampled tokens alone."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_what_is_not_served(self) -> None:
        """Raise ValueError for the first parameter that would be ignored."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in _NO_MATTER and (name not in _NEUTRAL or value != _NEUTRAL[name]):
                raise ValueError(f"{name[:80]}: got {value!s:.80}, which is not served here; leave it out")


class Chat(Sampling, ChatRequest):
    """POST /v1/chat/completions."""


class Completion(Sampling, CompletionRequest):
    """POST /v1/completions."""


class Feedback(BaseModel):
    """POST /v1/feedback. `id`: of a response, or ID/INDEX of one of its choices."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    id: Name
    reward: Annotated[FiniteFloat, Field(ge=-MOST_REWARD, le=MOST_REWARD)]
    metrics: Annotated[dict[Annotated[str, Field(pattern=r"^[\w/.\-]{1,64}$")], FiniteFloat], Field(max_length=32)] = {}


class Commit(BaseModel):
    """POST /v1/commit. `ids`: of the choices of one group; a response's own id stands for all of its choices."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ids: Annotated[list[Name], Field(min_length=1, max_length=1024, fail_fast=True)]
    task_id: Name | None = None
