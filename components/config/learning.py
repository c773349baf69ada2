"""Sections for what the trainer does: the algorithm, the optimizer, the steps, the checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section
from .presets import ADVANTAGE_OPTIONS, POLICY_LOSS_OPTIONS

AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "asymre", "topr", "opmd", "opmd_kimi",
    "sppo", "rec", "raft", "on_policy_distill", "jsd", "mix", "ppo", "remax", "step_grpo", "gigpo",
]  # fmt: skip

CorrectionName = Literal["none", "decoupled", "tis", "icepop", "mis", "m2po"]


class AlgorithmConfig(Section):
    """The policy-gradient objective. `name` picks what is not set of all the rest; docs/algorithms.md has the table."""

    name: AlgorithmName = Field(default="grpo", description="preset: picks what is not set itself of all the rest")
    group_size: PositiveInt = Field(default=8, description="completions per task")
    advantage: str = Field(
        default="grpo",
        description=f"how rewards become advantages: {', '.join(ADVANTAGE_OPTIONS)}, or pkg.mod:function",
    )
    advantage_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the advantage, such as delta (asymre) or tau (log_mean_exp)"
    )
    advantage_eps: PositiveFloat = Field(default=1e-6, description="added to the standard deviation of rewards")
    greedy_baseline: bool = Field(
        default=False,
        description="one more completion per group, sampled greedily, not trained on: its reward is taken off theirs",
    )
    overlong_buffer_frac: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="the last so much of max_response_tokens costs reward, rising to 1 at the limit; 0: nothing does",
    )
    rank_penalty: float = Field(
        default=0.0, ge=0.0, le=1.0, description="share of its reward that the likeliest completion of a group loses"
    )
    policy_loss: str = Field(
        default="clip",
        description=f"how ratios and advantages become a loss: {', '.join(POLICY_LOSS_OPTIONS)}, or pkg.mod:function",
    )
    policy_loss_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the policy loss, such as tau_pos (sapo) or clip (rec)"
    )
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0, description="ratios below 1 - clip_low are clipped")
    clip_high: PositiveFloat = Field(default=0.28, description="ratios above 1 + clip_high are clipped")
    dual_clip: float | None = Field(
        default=None,
        gt=1.0,
        description="policy_loss=clip: bad answers cost at most so many advantages; null: no limit",
    )
    aggregation: Literal[
        "seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "fixed_length", "turn_mean_token_mean"
    ] = Field(
        default="seq_mean_token_mean",
        description="mean over sequences of their token means, mean over all tokens, mean over sequences of their "
        "token sums, or of these sums divided by rollout.max_response_tokens; or mean over turns of their token means",
    )
    correction: CorrectionName = Field(
        default="none",
        description="correction for off-policy data: none, importance weights (decoupled), truncated (tis), tokens "
        "outside a range left out, the others weighted (icepop) or not (mis), or weighted without outliers (m2po)",
    )
    correction_cap: PositiveFloat = Field(default=2.0, description="correction=tis: largest weight")
    correction_low: NonNegativeFloat = Field(default=0.5, description="correction=icepop, mis: least ratio kept")
    correction_high: PositiveFloat = Field(default=2.0, description="correction=icepop, mis: largest ratio kept")
    correction_level: Literal["token", "sequence"] = Field(
        default="token", description="whose ratio of proximal to behaviour policy: each token's, or its sequence's"
    )
    correction_second_moment: PositiveFloat = Field(
        default=0.04, description="correction=m2po: largest mean of (log ratio)^2 of the kept tokens"
    )
    correction_proximal: Literal["recompute", "interpolate"] = Field(
        default="recompute",
        description="proximal policy: scored when a batch is taken, or interpolated by lag between the behaviour and "
        "the current policy",
    )
    correction_mask_divergence: PositiveFloat | None = Field(
        default=None,
        description="sequences of negative advantage whose mean log(behaviour / current) is above this are left out; "
        "null: none are",
    )
    kl_coef: NonNegativeFloat = Field(
        default=0.0, description="weight of the KL from the reference policy; 0: no reference"
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "corrected_k3", "jsd"] = Field(
        default="k3", description="how that KL is estimated from sampled tokens; jsd: Jensen-Shannon, of a teacher"
    )
    jsd_beta: float = Field(
        default=0.5, gt=0.0, lt=1.0, description="kl_estimator=jsd: the teacher's share of the mixture"
    )
    kl_where: Literal["loss", "reward", "token"] = Field(
        default="loss", description="where it enters: the loss, each token's return, or each token's advantage"
    )
    reference_path: str | None = Field(
        default=None, description="model of the reference policy, or teacher; null: the weights training starts from"
    )
    kl_target: PositiveFloat | None = Field(
        default=None, description="mean KL per token that kl_coef is moved towards; null: kl_coef stays"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus in the loss")
    expert_path: str | None = Field(
        default=None, description="jsonl of expert answers mixed into every step, with the keys of task; null: none"
    )
    expert_batch_size: PositiveInt = Field(default=64, description="expert answers in each optimizer step")
    expert_weight: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="share mu of expert data in the loss: (1 - mu) policy + mu expert",
    )
    expert_weight_end: float | None = Field(
        default=None, ge=0.0, le=1.0, description="mu after expert_decay_steps; null: it stays"
    )
    expert_decay_steps: PositiveInt = Field(default=100, description="optimizer steps in which mu gets there, linearly")
    expert_token_weights: bool = Field(
        default=False, description="weigh each expert token by p (1 - p): neither what is known nor what is absurd"
    )
    dpo_beta: PositiveFloat = Field(default=0.1, description="recipe dpo: how far the margin may move the policy")
    dpo_label_smoothing: float = Field(
        default=0.0, ge=0.0, lt=0.5, description="recipe dpo: share of pairs thought to be labelled the wrong way round"
    )


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = Field(default=1e-6, description="peak learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's decay rates")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay")
    decay: Literal["all", "matrices", "hidden_matrices"] = Field(
        default="matrices",
        description="what weight_decay acts on: all, not biases and norms (matrices), nor embeddings (hidden_matrices; "
        "a tied output head counts as one)",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course of the learning rate after warm-up"
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="optimizer steps of linear warm-up")
    min_lr_frac: float = Field(default=0.0, ge=0.0, le=1.0, description="last learning rate as a share of lr")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="gradients are scaled down to this norm")
    max_skipped_steps: NonNegativeInt = Field(
        default=3,
        description="steps in a row that change nothing because their gradient is nan or inf; one more ends the run",
    )


class TrainConfig(Section):
    """How much is trained, and in what pieces. Exactly one of `steps` and `epochs` is set."""

    steps: PositiveInt | None = Field(default=None, description="optimizer steps")
    epochs: PositiveFloat | None = Field(default=None, description="passes over the tasks")
    groups_per_step: PositiveInt = Field(default=64, description="groups (tasks) taken for one batch")
    updates_per_batch: PositiveInt = Field(default=1, description="optimizer steps per batch; divides groups_per_step")
    batch_size: PositiveInt = Field(
        default=128, description="sequences per optimizer step (recipes sft and dpo; two for each pair)"
    )
    stop_below_loss: PositiveFloat | None = Field(
        default=None, description="end early once the loss of the last 20 steps is below this (recipes sft and dpo)"
    )
    num_ranks: PositiveInt = Field(default=1, description="trainer processes; weights are sharded over them")
    max_tokens_per_microbatch: PositiveInt = Field(
        default=16384, description="most tokens in one forward and backward pass"
    )
    audit_every: NonNegativeInt = Field(
        default=0,
        description="optimizer steps between audits: tokens of older versions scored again under kept publications of "
        "exactly those; 0: never",
    )
    packing: Literal["auto", "padded"] = Field(
        default="auto",
        description="auto: sequences back to back and a group's prompt computed once, where model.attn is sdpa and the "
        "model allows it; padded: one row each",
    )
    logprob_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="no more logits exist at a time than those of so many tokens, about 8 bytes x this x vocabulary; "
        "null: as many as take 128 MiB (on a GPU, 256 MiB in bfloat16)",
    )
    skip_zero_advantage: bool = Field(default=True, description="save the work on trajectories that move nothing")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    compile: bool = Field(
        default=False,
        description="decoder layers by torch.compile, at the first two microbatches: up to minutes, then faster",
    )
    cpu_offload: bool = Field(
        default=False,
        description="master weights, gradients and optimizer in the CPU's memory (device cuda): slower",
    )


class FrontierConfig(Section):
    """What the recipe frontier compares: one run per lag bound, correction and seed."""

    max_policy_lags: list[Literal["lockstep"] | NonNegativeInt] = Field(
        default=["lockstep", 2, 4, 8],
        min_length=1,
        description="bounds to compare; lockstep: the least that train.updates_per_batch and publish_every allow",
    )
    corrections: list[CorrectionName] = Field(
        default=["none", "decoupled", "tis"], min_length=1, description="values of algorithm.correction to compare"
    )
    seeds: PositiveInt = Field(default=5, description="runs of each, with seeds from the run's own on")
    evaluations: PositiveInt = Field(
        default=3, description="held-out evaluations per run, evenly spaced, the last at the end"
    )
    margin: PositiveFloat = Field(
        default=0.02, description="accuracy that a bound may cost and still count as not inferior to lockstep"
    )


class CheckpointConfig(Section):
    """What is saved, and when: the whole state to go on from, and the weights for others to load."""

    every: NonNegativeInt = Field(default=0, description="optimizer steps between checkpoints; 0: only at the end")
    keep_last: PositiveInt = Field(default=2, description="newest checkpoints kept")
    keep_every: NonNegativeInt = Field(default=0, description="kept for good: those of every so many steps; 0: none")
    save_hf: Literal["last", "always", "never"] = Field(
        default="last", description="when weights are saved for transformers"
    )
    in_background: bool = Field(
        default=True,
        description="write while training goes on, from a copy in main memory (of weights and optimizer state, shared "
        "out over the ranks; not hf/, which is written at once); false: no copy, training waits",
    )
    max_writers: NonNegativeInt = Field(
        default=0, description="most ranks that write at once, where storage that all share is slow; 0: all"
    )
    resume: str = Field(
        default="never",
        description="never, auto (go on from the newest whole checkpoint in this run's folder, if there is one), or "
        "the path of a checkpoint",
    )
