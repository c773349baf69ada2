"""Section for the critic: a value function trained alongside the policy."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat

from ..section import Section


class CriticConfig(Section):
    """A value function with its own weights, for algorithm.advantage.name=gae. Other settings come from `optimizer`."""

    path: str | None = Field(
        default=None,
        description="model whose body the critic starts from, with the policy's tokenizer; null: the weights training "
        "starts from",
    )
    lr: PositiveFloat | None = Field(
        default=None, description="peak learning rate, on the schedule of optimizer; null: optimizer.lr"
    )
    gamma: float = Field(default=1.0, gt=0.0, le=1.0, description="discount from one sampled token to the next")
    gae_lambda: float = Field(
        default=1.0, ge=0.0, le=1.0, description="1: advantages see the whole outcome; lower: less noise, more bias"
    )
    value_lambda: float = Field(default=1.0, ge=0.0, le=1.0, description="the same for the returns the critic learns")
    value_clip: PositiveFloat | None = Field(
        default=0.2,
        description="how far values may move from those computed when the batch was taken, in units of "
        "reward; null: no limit",
    )
    whiten: bool = Field(default=True, description="whiten the advantages of each batch: mean 0, standard deviation 1")
    warmup_steps: NonNegativeInt = Field(
        default=0, description="optimizer steps at the start that train the critic alone"
    )
