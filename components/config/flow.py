"""Sections for what moves between generators and trainer: rollouts, the staleness bound, the buffer, the weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section
from .names import PRIORITIES


class RolloutConfig(Section):
    """How completions are generated."""

    num_generators: PositiveInt = Field(default=1, description="engines, each a process of its own")
    temperature: PositiveFloat = Field(default=1.0, description="sampling temperature; the trainer divides by the same")
    max_prompt_tokens: PositiveInt = Field(default=1024, description="longest prompt; see overlong_prompts")
    overlong_prompts: Literal["drop", "truncate", "refuse"] = Field(
        default="drop",
        description="tasks with longer prompts are left out, or cut at their beginning (both counted), or end the run",
    )
    max_response_tokens: PositiveInt = Field(default=1024, description="longest response; longer ones are cut")
    max_model_len: PositiveInt = Field(default=2048, description="longest prompt and response together")
    timeout_s: PositiveFloat = Field(default=600.0, description="seconds a group may take before it is tried again")
    retries: NonNegativeInt = Field(default=2, description="times a group is tried again before it has failed for good")
    pull_every: PositiveInt = Field(default=1, description="pull weights at most once per so many published versions")
    pull: Literal["newest", "oldest"] = Field(
        default="newest",
        description="which published version a pull takes: the newest, or, to study lag, the oldest that groups "
        "waiting for weights may start under",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="handed to vLLM's AsyncEngineArgs")


class StalenessConfig(Section):
    """How far behind the trainer the policy that generates may be."""

    max_policy_lag: NonNegativeInt = Field(
        default=2, description="hard bound: no token older than so many optimizer steps is ever used; 0 is synchronous"
    )
    target_policy_lag: NonNegativeInt | None = Field(
        default=None, description="lag that admission aims at; null: max_policy_lag"
    )
    reorder_window: PositiveInt | None = Field(
        default=None,
        description="times a slow group may be overtaken, plus 1; null: groups_per_step where possible, else 1",
    )
    in_flight: Literal["recompute", "keep", "off"] = Field(
        default="recompute",
        description="requests under way at a pull: KV rebuilt (exact), KV kept (fast), or finished first (off)",
    )


class ReplayConfig(Section):
    """The buffer between generators and trainer."""

    store: Literal["memory"] = Field(default="memory", description="where groups wait")
    max_uses: PositiveInt = Field(
        default=1,
        description="batches that a group is part of, each use within the bound; a batch has groups_per_step / "
        "max_uses new groups",
    )
    cooldown: NonNegativeInt = Field(default=0, description="batches between two uses of a group")
    sampling: Literal["admission", "priority"] = Field(
        default="admission",
        description="which groups are taken first, inside the reorder window and of those that may be used again: the "
        "oldest, or those of the highest priority",
    )
    priority: str = Field(
        default="spread",
        description=f"sampling=priority: what a group is worth: {', '.join(PRIORITIES)}, or pkg.mod:function",
    )
    priority_decay: NonNegativeFloat = Field(
        default=0.1, description="taken off a group's priority for each time that it was used"
    )
    operators: list[str | dict[str, dict[str, Any]]] = Field(
        default_factory=list,
        description="what is done to finished groups, in order: names, or {name: {option: value}}",
    )


class ParamServerConfig(Section):
    """How weights travel from the trainer to the engines."""

    publish_every: PositiveInt = Field(default=1, description="optimizer steps between published versions")
    transport: Literal["object_store"] = Field(default="object_store", description="how the bytes travel")
    bucket_mb: PositiveInt = Field(
        default=256,
        description="most MB of weights that leave the trainer in one piece (a larger tensor is a piece of its own); "
        "publishing takes the memory of two",
    )
    canary_prompts: PositiveInt = Field(default=4, description="prompts that prove the served weights after each pull")
    canary_tokens: PositiveInt = Field(
        default=160, description="tokens of the contexts that prove the prefix cache; more than one block of it"
    )
    read_back: bool = Field(
        default=True, description="after each load, compare every weight the engine holds with what was published"
    )
    quarantine_pulls: NonNegativeInt = Field(
        default=2,
        description="pulls with which an engine that failed a check may prove itself again",
    )
    served_tolerance: PositiveFloat | None = Field(
        default=None, description="largest logprob gap of engine and trainer; null: 1e-4 in float32, 0.1 in bfloat16"
    )
