"""Models, in addition to the policy, that environments and rewards may call: judges, users, reward models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ..section import Section
from .engines import Temperature


class AuxiliaryModel(Section):
    """One of `env.models`. Exactly one of `url` and `path` is set."""

    url: str | None = Field(default=None, description="an OpenAI-compatible address, e.g. http://host:8000/v1")
    path: str | None = Field(default=None, description="a model that the run serves itself: folder or hub id")
    kind: Literal["generate", "classify"] = Field(
        default="generate", description="what it does with text: continues it, or scores it (sequence classifier)"
    )
    model: str | None = Field(default=None, description="its name on the server; null: the first one the server lists")
    key_variable: str | None = Field(
        default=None, description="environment variable that holds the key for `url`; null: no key is sent"
    )
    timeout_s: PositiveFloat = Field(default=30.0, description="seconds that one attempt at a request may take")
    retries: NonNegativeInt = Field(default=2, description="how many times a request is retried")
    max_in_flight: PositiveInt = Field(default=64, description="concurrent requests from one generator")
    temperature: Temperature = Field(default=0.0, description="sampling temperature; 0 is greedy, else at least 0.01")
    max_tokens: PositiveInt = Field(default=512, description="longest answer")
    max_model_len: PositiveInt = Field(default=4096, description="path: maximum length of prompt plus answer")
    engine: dict[str, Any] = Field(default_factory=dict, description="path: like rollout.engine")
