"""Models beside the policy that environments and rewards may ask: judges, users, reward models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section, Temperature


class AuxiliaryModel(Section):
    """One of `env.models`. Exactly one of `url` and `path` is set."""

    url: str | None = Field(default=None, description="an OpenAI-compatible address, e.g. http://host:8000/v1")
    path: str | None = Field(default=None, description="a model that the run serves itself: folder or hub id")
    kind: Literal["generate", "classify"] = Field(
        default="generate", description="what it does with text: goes on, or scores it (sequence classifier)"
    )
    model: str | None = Field(default=None, description="its name at the server; null: the first it lists")
    key_variable: str | None = Field(
        default=None, description="environment variable that holds the key of `url`; null: none is sent"
    )
    timeout_s: PositiveFloat = Field(default=30.0, description="seconds that one try of a request may take")
    retries: NonNegativeInt = Field(default=2, description="times a request is tried again")
    max_in_flight: PositiveInt = Field(default=64, description="requests at a time from one generator")
    temperature: Temperature = Field(default=0.0, description="sampling temperature; 0 is greedy, else at least 0.01")
    max_tokens: PositiveInt = Field(default=512, description="longest answer")
    max_model_len: PositiveInt = Field(default=4096, description="path: longest prompt and answer together")
    engine: dict[str, Any] = Field(default_factory=dict, description="path: passed to vLLM's AsyncEngineArgs")
