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
    """The policy-gradient objective. `name` is a preset for everything you do not set: docs/algorithms.md."""

    name: AlgorithmName = Field(default="grpo", description="preset: fills in every setting below that you do not set")
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
        description="sample one more completion per group greedily and subtract its reward from the "
        "others'; it is not trained on",
    )
    overlong_buffer_frac: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="share of max_response_tokens, at its end, that costs reward: a penalty that grows "
        "to 1 at the limit; 0: no penalty",
    )
    rank_penalty: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="share of its positive reward that a group's likeliest completion loses; the others lose less",
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
        description="policy_loss=clip: the loss of a bad answer is at most this many times its "
        "advantage; null: no limit",
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
    correction_low: NonNegativeFloat = Field(default=0.5, description="correction=icepop, mis: smallest ratio kept")
    correction_high: PositiveFloat = Field(default=2.0, description="correction=icepop, mis: largest ratio kept")
    correction_level: Literal["token", "sequence"] = Field(
        default="token", description="ratio of proximal to behaviour policy: per token, or per sequence"
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
        description="leave out sequences with negative advantage whose mean log(behaviour / current) is above this; "
        "null: keep all",
    )
    kl_coef: NonNegativeFloat = Field(
        default=0.0, description="weight of the KL from the reference policy; 0: no reference"
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs", "corrected_k3", "jsd"] = Field(
        default="k3", description="how that KL is estimated from sampled tokens; jsd: Jensen-Shannon, for a teacher"
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
        default=None, description="adapt kl_coef towards this mean KL per token; null: kl_coef stays fixed"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus in the loss")
    expert_path: str | None = Field(
        default=None, description="jsonl of expert answers mixed into every step, with the keys of task; null: none"
    )
    expert_batch_size: PositiveInt = Field(default=64, description="number of expert answers in each optimizer step")
    expert_weight: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="share mu of expert data in the loss: (1 - mu) policy + mu expert",
    )
    expert_weight_end: float | None = Field(
        default=None, ge=0.0, le=1.0, description="mu after expert_decay_steps; null: constant"
    )
    expert_decay_steps: PositiveInt = Field(default=100, description="optimizer steps over which mu decays, linearly")
    expert_token_weights: bool = Field(
        default=False,
        description="weight each expert token by p (1 - p), which is small for what the policy knows "
        "already and for what it finds absurd",
    )
    dpo_beta: PositiveFloat = Field(default=0.1, description="recipe dpo: how far the margin may move the policy")
    dpo_label_smoothing: float = Field(
        default=0.0, ge=0.0, lt=0.5, description="recipe dpo: assumed share of mislabelled pairs"
    )


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = Field(default=1e-6, description="peak learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's decay rates")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay")
    decay: Literal["all", "matrices", "hidden_matrices"] = Field(
        default="matrices",
        description="what weight_decay acts on. all: every weight; matrices: not biases and norms; hidden_matrices: "
        "not embeddings, a tied output head or the critic's head either",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning-rate schedule after warm-up"
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="optimizer steps of linear warm-up")
    min_lr_frac: float = Field(default=0.0, ge=0.0, le=1.0, description="final learning rate as a share of lr")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="clip gradients to this norm")
    max_skipped_steps: NonNegativeInt = Field(
        default=3,
        description="how many consecutive steps may be skipped because their gradient (the policy's, or the critic's) "
        "is nan or inf; one more ends the run",
    )


class TrainConfig(Section):
    """How much is trained, and in what pieces. Exactly one of `steps` and `epochs` is set."""

    steps: PositiveInt | None = Field(default=None, description="optimizer steps")
    epochs: PositiveFloat | None = Field(default=None, description="passes over the tasks")
    groups_per_step: PositiveInt = Field(default=64, description="groups (tasks) per batch")
    updates_per_batch: PositiveInt = Field(default=1, description="optimizer steps per batch; divides groups_per_step")
    batch_size: PositiveInt = Field(
        default=128, description="sequences per optimizer step (recipes sft and dpo; two for each pair)"
    )
    stop_below_loss: PositiveFloat | None = Field(
        default=None,
        description="stop early once the mean loss of the last 20 steps is below this (recipes sft and dpo)",
    )
    num_ranks: PositiveInt = Field(default=1, description="trainer processes; weights are sharded over them")
    max_tokens_per_microbatch: PositiveInt = Field(
        default=16384, description="most tokens in one forward and backward pass"
    )
    audit_every: NonNegativeInt = Field(
        default=0,
        description="optimizer steps between audits, which score older tokens again under the exact "
        "weights that sampled "
        "them; 0: never",
    )
    packing: Literal["auto", "padded"] = Field(
        default="auto",
        description="auto: pack sequences back to back and compute a group's prompt once, where model.attn is auto or "
        "sdpa and packing is exact for the model (tried at the start); padded: one row each",
    )
    logprob_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="logits are computed for this many tokens at a time, which takes about 8 bytes x this x "
        "vocabulary; null: as many as fit in 128 MiB (on a GPU, 256 MiB in bfloat16)",
    )
    skip_zero_advantage: bool = Field(
        default=True, description="skip trajectories whose advantage is zero, where they have no gradient"
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    compile: bool = Field(
        default=False,
        description="compile the decoder layers: the first two microbatches can take minutes, later ones are faster",
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
        description="lag bounds to compare; lockstep: the smallest that train.updates_per_batch and "
        "publish_every allow",
    )
    corrections: list[CorrectionName] = Field(
        default=["none", "decoupled", "tis"], min_length=1, description="values of algorithm.correction to compare"
    )
    seeds: PositiveInt = Field(default=5, description="runs per setting; seeds count up from the run's own")
    evaluations: PositiveInt = Field(
        default=3, description="held-out evaluations per run, evenly spaced, the last at the end"
    )
    margin: PositiveFloat = Field(
        default=0.02, description="how much accuracy a bound may lose and still count as not inferior to lockstep"
    )


class CheckpointConfig(Section):
    """What is saved and when: the full state to resume from, and weights for other programs to load."""

    every: NonNegativeInt = Field(default=0, description="optimizer steps between checkpoints; 0: only at the end")
    save_state: Literal["last", "never"] = Field(
        default="last",
        description="last: a run can be extended from its end, at 12 bytes per parameter on disk; never: only the "
        "weights are saved at the end, unless the run is interrupted",
    )
    keep_last: PositiveInt = Field(default=2, description="newest checkpoints kept")
    keep_every: NonNegativeInt = Field(
        default=0, description="also keep every checkpoint whose step is a multiple of this; 0: none"
    )
    save_hf: Literal["last", "always", "never"] = Field(
        default="last", description="when weights are saved for transformers"
    )
    in_background: bool = Field(
        default=True,
        description="write in the background, from a copy in main memory (of weights and optimizer state, split over "
        "the ranks; hf/ is written immediately instead); false: no copy, training waits",
    )
    max_writers: NonNegativeInt = Field(
        default=0, description="how many ranks may write at once, for slow shared storage; 0: all"
    )
    resume: str = Field(
        default="never",
        description="never, auto (resume from the newest complete checkpoint in this run's folder, if there is one; "
        "`leeway resume` sets this), or the path of a checkpoint",
    )
