"""Sections for what the trainer does: the optimizer, the critic, the steps, the checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ..algorithms.presets import CORRECTIONS
from ..section import Refused, Section
from .effect import ANSWERS, BATCHES, GROUPS, REFERENCE, ROLLOUTS, OnlyWith

DECAYING = OnlyWith(lambda c: c.optimizer.schedule != "constant", "optimizer.schedule is linear or cosine")
SHARDED = OnlyWith(lambda c: c.train.num_ranks > 1, "train.num_ranks is above 1")
ON_GPU = OnlyWith(
    lambda c: c.cluster.device != "cpu", "cluster.device is cuda: else the weights are in the CPU's memory already"
)
NOT_AWAY = OnlyWith(lambda c: not c.train.cpu_offload, "train.cpu_offload is false: else the moments are there already")
LIMITED = OnlyWith(lambda c: c.checkpoint.max_writers > 0, "checkpoint.max_writers is above 0")
DECAYED = OnlyWith(lambda c: c.optimizer.weight_decay > 0, "optimizer.weight_decay is above 0")


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = Field(default=1e-6, description="peak learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's decay rates")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay")
    decay: Annotated[
        Literal["all", "matrices", "hidden_matrices"],
        DECAYED,
    ] = Field(
        default="matrices",
        description="what weight_decay acts on. all: every weight; matrices: not biases and norms; hidden_matrices: "
        "not embeddings, a tied output head or the critic's head either",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning-rate schedule after warm-up"
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="optimizer steps of linear warm-up")
    warmup_frac: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="linear warm-up as a share of the run's optimizer steps"
    )
    min_lr_frac: Annotated[float, DECAYING] = Field(
        default=0.0, ge=0.0, le=1.0, description="final learning rate as a share of lr"
    )
    max_grad_norm: PositiveFloat = Field(default=1.0, description="clip gradients to this norm")
    max_skipped_steps: NonNegativeInt = Field(
        default=3,
        description="how many consecutive steps may be skipped because their gradient (the policy's, or the critic's) "
        "is nan or inf; one more ends the run",
    )

    @model_validator(mode="after")
    def _one_warm_up(self) -> Self:
        if self.warmup_steps and self.warmup_frac:
            raise Refused(
                "optimizer.warmup_frac",
                got=self.warmup_frac,
                expected=f"0 where optimizer.warmup_steps is {self.warmup_steps}",
                fix="set one of them",
            )
        return self

    def warm_up(self, total_steps: int) -> int:
        """Optimizer steps of warm-up in a run of `total_steps`."""
        return self.warmup_steps or int(self.warmup_frac * total_steps)


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
    lr_warmup_steps: NonNegativeInt | None = Field(
        default=None, description="optimizer steps of linear warm-up of its learning rate; null: the optimizer's"
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=None, description="clip its gradients to this norm; null: optimizer.max_grad_norm"
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

    def optimizer_of(self, policy: OptimizerConfig) -> OptimizerConfig:
        """The policy's settings, with the critic's own in their place."""
        own: dict[str, object] = {} if self.lr is None else {"lr": self.lr}
        if self.max_grad_norm is not None:
            own["max_grad_norm"] = self.max_grad_norm
        if self.lr_warmup_steps is not None:
            own |= {"warmup_steps": self.lr_warmup_steps, "warmup_frac": 0.0}
        return policy.model_copy(update=own)


class TrainConfig(Section):
    """How much is trained, and in what pieces. Exactly one of `steps` and `epochs` is set."""

    steps: PositiveInt | None = Field(default=None, description="optimizer steps")
    epochs: PositiveFloat | None = Field(default=None, description="passes over the tasks, or the stored experiences")
    groups_per_step: Annotated[PositiveInt, GROUPS] = Field(default=64, description="groups (tasks) per batch")
    updates_per_batch: Annotated[PositiveInt, ROLLOUTS] = Field(
        default=1, description="optimizer steps per batch; divides groups_per_step"
    )
    stream_groups: Annotated[PositiveInt | None, ROLLOUTS] = Field(
        default=None,
        description="begin with a batch when so many of its groups are there, and go on with what has come meanwhile; "
        "rounding then depends on which came first; null: with all of it, in admission order",
    )
    batch_size: Annotated[PositiveInt, BATCHES] = Field(
        default=128, description="sequences per optimizer step (recipes sft and dpo; a pair counts as two)"
    )
    stop_below_loss: Annotated[PositiveFloat | None, ANSWERS] = Field(
        default=None,
        description="stop early once the mean loss of the last 20 steps is below this (recipes sft and dpo)",
    )
    num_ranks: PositiveInt = Field(default=1, description="trainer processes; weights are sharded over them")
    fsdp_size: Annotated[PositiveInt | None, SHARDED] = Field(
        default=None,
        description="ranks that share one copy of the weights, each with its own; divides num_ranks, whose other ranks "
        "have further copies (HSDP); null: all ranks share one",
    )
    max_tokens_per_microbatch: PositiveInt | None = Field(
        default=None,
        description="most tokens in one forward and backward pass; null: 4096 on a CPU, whose caches then hold more of "
        "a pass, and 16384 on a GPU",
    )
    audit_every: Annotated[NonNegativeInt, ROLLOUTS] = Field(
        default=0,
        description="optimizer steps between audits, which score older tokens again under the exact "
        "weights that sampled "
        "them; 0: never",
    )
    packing: Literal["auto", "padded"] = Field(
        default="auto",
        description="auto: pack sequences back to back and compute what those of one prompt begin with once, where "
        "model.attn is auto or sdpa and packing is exact for the model (checked at the start); padded: one row each",
    )
    logprob_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="logits are computed for this many tokens at a time, which takes about 8 bytes x this x "
        "vocabulary; null: as many as fit in 128 MiB (on a GPU, 256 MiB in bfloat16)",
    )
    skip_zero_advantage: Annotated[bool, GROUPS] = Field(
        default=True,
        description="skip trajectories whose advantage is zero, if that leaves them no gradient; a step in which all "
        "are skipped moves nothing, where AdamW's momentum would",
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    compile: bool = Field(
        default=False,
        description="compile the decoder layers: the first two microbatches can take minutes, later ones are faster",
    )
    forward_prefetch: Annotated[NonNegativeInt, SHARDED] = Field(
        default=0,
        description="gather the weights of this many further decoder layers while one computes its forward pass; 0: as "
        "FSDP2 does by itself",
    )
    fsdp_units: Annotated[list[str] | PositiveInt | None, SHARDED] = Field(
        default=None,
        description="which modules are gathered and given up as one: null: each decoder layer; [CLASS, ...]: those of "
        "these classes; N: the smallest with N weights; all within decoder layers, and what is in none stays gathered",
    )
    cpu_offload: Annotated[bool, ON_GPU] = Field(
        default=False,
        description="master weights, gradients and optimizer of policy and critic in the CPU's memory: slower",
    )
    cpu_offload_optimizer: Annotated[bool, ON_GPU, NOT_AWAY] = Field(
        default=False,
        description="AdamW's moments in the CPU's memory between steps; they come to the GPU for each",
    )
    cpu_offload_reference: Annotated[bool, ON_GPU, REFERENCE] = Field(
        default=False,
        description="the reference's weights in the CPU's memory; a layer's come to the GPU while it computes",
    )

    def microbatch_tokens(self, device: str) -> int:
        """Most tokens of a pass on this kind of device (`cluster.device`)."""
        return self.max_tokens_per_microbatch or (16384 if device == "cuda" else 4096)

    @property
    def shards(self) -> int:
        """How many ranks share a copy of the weights."""
        return self.fsdp_size or self.num_ranks


def _is_a_correction(name: str) -> str:
    if name not in CORRECTIONS:
        raise ValueError(f"one of {', '.join(CORRECTIONS)}")
    return name


class FrontierConfig(Section):
    """What the recipe frontier compares: one run per lag bound, correction and seed."""

    max_policy_lags: list[Literal["lockstep"] | NonNegativeInt] = Field(
        default=["lockstep", 2, 4, 8],
        min_length=1,
        description="lag bounds to compare; lockstep: the smallest that train.updates_per_batch and "
        "publish_every allow",
    )
    corrections: list[Annotated[str, AfterValidator(_is_a_correction)]] = Field(
        default=["none", "decoupled", "tis"], min_length=1, description="values of algorithm.correction.name to compare"
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
        default=0, description="how many ranks (or machines) may write at once, for slow shared storage; 0: all"
    )
    writers: Annotated[Literal["ranks", "machines"], LIMITED] = Field(
        default="ranks", description="what max_writers counts; machines: the ranks of one write together"
    )
    resumes: NonNegativeInt = Field(
        default=3,
        description="how often a run resumes by itself from its newest checkpoint, after a part other "
        "than a generator died, was stopped or did not answer; 0: it ends",
    )
    resume: str = Field(
        default="never",
        description="never, auto (resume from the newest complete checkpoint in this run's folder, if there is one; "
        "`leeway resume` sets this), or the path of a checkpoint",
    )
