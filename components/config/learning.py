"""Sections for what the trainer does: the algorithm, the optimizer, the steps, the checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section


class AlgorithmConfig(Section):
    """The policy-gradient objective."""

    name: Literal["grpo"] = Field(default="grpo", description="algorithm")
    group_size: int = Field(default=8, ge=2, description="completions per task")
    advantage: Literal["grpo"] = Field(default="grpo", description="how rewards of a group become advantages")
    policy_loss: Literal["clip"] = Field(default="clip", description="how ratios and advantages become a loss")
    correction: Literal["none", "decoupled", "tis", "icepop", "mis"] = Field(
        default="none",
        description="correction for off-policy data: none, importance weights (decoupled), truncated (tis), or tokens "
        "outside a range left out, the others weighted (icepop) or not (mis)",
    )
    correction_cap: PositiveFloat = Field(default=2.0, description="correction=tis: largest weight")
    correction_low: NonNegativeFloat = Field(default=0.5, description="correction=icepop, mis: least ratio kept")
    correction_high: PositiveFloat = Field(default=2.0, description="correction=icepop, mis: largest ratio kept")
    correction_level: Literal["token", "sequence"] = Field(
        default="token", description="whose ratio of proximal to behaviour policy: each token's, or its sequence's"
    )
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0, description="ratios below 1 - clip_low are clipped")
    clip_high: PositiveFloat = Field(default=0.28, description="ratios above 1 + clip_high are clipped")
    aggregation: Literal["seq_mean_token_mean", "token_mean"] = Field(
        default="seq_mean_token_mean", description="mean over sequences of token means, or over all tokens"
    )
    advantage_eps: PositiveFloat = Field(
        default=1e-6, description="added to the standard deviation of a group's rewards"
    )


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = Field(default=1e-6, description="peak learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's decay rates")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course of the learning rate after warm-up"
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="optimizer steps of linear warm-up")
    min_lr_frac: float = Field(default=0.0, ge=0.0, le=1.0, description="last learning rate as a share of lr")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="gradients are scaled down to this norm")


class TrainConfig(Section):
    """How much is trained, and in what pieces. Exactly one of `steps` and `epochs` is set."""

    steps: PositiveInt | None = Field(default=None, description="optimizer steps")
    epochs: PositiveFloat | None = Field(default=None, description="passes over the tasks")
    groups_per_step: PositiveInt = Field(default=64, description="groups (tasks) taken for one batch")
    updates_per_batch: PositiveInt = Field(default=1, description="optimizer steps per batch; divides groups_per_step")
    batch_size: PositiveInt = Field(default=128, description="sequences per optimizer step (recipe sft)")
    stop_below_loss: PositiveFloat | None = Field(
        default=None, description="end early once the loss of the last 20 steps is below this (recipe sft)"
    )
    num_ranks: PositiveInt = Field(default=1, description="trainer processes; weights are sharded over them")
    max_tokens_per_microbatch: PositiveInt = Field(
        default=16384, description="most tokens in one forward and backward pass"
    )
    packing: Literal["auto", "padded"] = Field(
        default="auto",
        description="auto: sequences back to back and a group's prompt computed once, where model.attn is sdpa and the "
        "model allows it; padded: one row each",
    )
    logprob_chunk_tokens: PositiveInt = Field(
        default=512,
        description="most tokens whose logits exist at a time; takes about 12 bytes x this x vocabulary",
    )
    skip_zero_advantage: bool = Field(default=True, description="save the work on trajectories that move nothing")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")


class CheckpointConfig(Section):
    """What is saved, and when: the whole state to go on from, and the weights for others to load."""

    every: NonNegativeInt = Field(default=0, description="optimizer steps between checkpoints; 0: only at the end")
    keep_last: PositiveInt = Field(default=2, description="newest checkpoints kept")
    keep_every: NonNegativeInt = Field(default=0, description="kept for good: those of every so many steps; 0: none")
    save_hf: Literal["last", "always", "never"] = Field(
        default="last", description="when weights are saved for transformers"
    )
    resume: str = Field(
        default="never",
        description="never, auto (go on from the newest whole checkpoint in this run's folder, if there is one), or "
        "the path of a checkpoint",
    )
